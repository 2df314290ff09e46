"""`BegunCall`: a call of a parallel module between its two ends, and the graph between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from autopar.runtime.call_cache import CallCache
from autopar.runtime.compiled_call import CallSignature, CompiledCall


# No tuple: `torch.compile` compares all that is in a tuple, and of an object what is read alone.
@dataclass(frozen=True)
class BegunCall:
    """Call whose inputs are read and whose numbers are on their way."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    plan: CompiledCall
    given: CallSignature
    # Inputs of the graph.
    values: list[Tensor]
    # Sums that are sent before the graph, by number.
    early: list[Tensor]

    @classmethod
    def begin(
        cls,
        plans: CallCache,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        part: str = "",
        differ: bool = False,
        compiled: bool = False,
    ) -> BegunCall:
        """Begin a call; with `differ` once more, after the ranks were found to differ."""
        plan, given = plans.find(args, kwargs, part, later=not differ, differ=differ)
        values = plan.values(given, compiled)
        if plan.emitted.draws:
            values.append(plans.randomness.key(plan.emitted.draws))
        ends = plan.emitted.ends
        early = ends.first(values, plans)
        values += [early[number] for number in ends.taken]
        return cls(args, kwargs, plan, given, values, early)

    def run(self) -> tuple[Any, ...]:
        """Run the graph of this rank."""
        outputs: tuple[Any, ...] = self.plan.graph_module(*self.values)
        return outputs

    def end(self, plans: CallCache, outputs: tuple[Any, ...]) -> Any:
        """Return the result of the model from those of the graph."""
        return self.plan.finish(self.given, self.plan.emitted.ends.last(outputs, self.early, plans))
