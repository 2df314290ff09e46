"""Ways to keep a tensor that several ops take: the factors by which it comes to be in a state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.solver.model.cost_tables import CostTable
from autopar.solver.model.model import Factor, FactorByMode, Model
from autopar.solver.model.objective import Sum
from autopar.solver.model.shared_reshards import SharedTensor

__all__ = ["WaysToKeep"]


@dataclass(frozen=True)
class WaysToKeep:
    """Factors by which a tensor comes to be kept in a state."""

    # The reshard from the op that makes a value.
    maker: int | None
    # Costs by the mode of a layer.
    modes: tuple[int, ...]
    # Memory by the mode of another layer, whose recompute alone keeps the value.
    crossing: int | None = None

    @staticmethod
    def of(model: Model, one: SharedTensor, incident: Sequence[int]) -> WaysToKeep | None:
        """Return None where contracts bear on the tensor, which forbid some ways."""
        alone = model.variables[one.place].parts
        if any(Sum.FORBIDDEN in parts for parts in alone) or any(
            map(_forbids, (model.factors[i].table for i in incident))
        ):
            return None
        into = [i for i in incident if model.factors[i].scope[-1] == one.place]
        modes = tuple(i for i in into if model.variables[model.factors[i].scope[-2]].kind == "recompute")
        makers = [i for i in into if i not in modes]
        assert len(makers) <= 1, one.tensor.name
        crossing = [i for i in modes if _is_crossing(model, one, model.factors[i])]
        rest = tuple(i for i in modes if i not in crossing)
        return WaysToKeep(next(iter(makers), None), rest, next(iter(crossing), None))


def _is_crossing(model: Model, one: SharedTensor, factor: Factor) -> bool:
    """Return whether a factor is the memory of a value that no op saves, by the mode of another layer that reads it."""
    is_of_maker = model.variables[factor.scope[0]].name == one.layer_of_maker
    return not is_of_maker and not model.setting.kept.is_kept(one.tensor.name)


def _forbids(table: CostTable | FactorByMode) -> bool:
    """Return whether a table is a contract: it costs nothing but what is forbidden."""
    return isinstance(table, CostTable) and set(table.parts) == {Sum.FORBIDDEN}
