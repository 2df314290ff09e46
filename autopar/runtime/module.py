"""`ParallelModule`: the user's model, as far as a training loop can tell, on many devices."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from autopar.errors import AutoparError, ModuleAttributeError
from autopar.ir.graph import NamedGraph
from autopar.lowering.comments import with_ends, with_notes
from autopar.lowering.emitted import Emitted
from autopar.lowering.modules.late_tensor import LateTensor
from autopar.runtime.call_cache import CallCache, CallSettings, Disagreement, FixedInputs, Planner
from autopar.runtime.compiled_call import CallSignature, CompiledCall
from autopar.runtime.module_shell import ClosedModule, entry_of, tie
from autopar.runtime.stale_optimizers import watch_replaced
from autopar.runtime.torch_wrappers import (
    UNTRACED,
    check_conversion,
    check_hook,
    check_not_captured,
    refuse_capture,
    watch_wrappers,
)
from autopar.sharding.assignment import Assignment
from autopar.sharding.options import Outputs, TrainingOptions
from autopar.sharding.reshard_insertion import StepCollective

__all__ = ["CallSettings", "ParallelModule", "Planner"]

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _untraced(method: _Method) -> _Method:
    """Leave a method to Python where Dynamo meets it, in torch.compile and torch.export."""
    return torch.compiler.disable(method, reason=UNTRACED)  # type: ignore[no-untyped-call, no-any-return]


class ParallelModule(ClosedModule):
    """Called as the model is; its parameters are DTensors under the model's names.

    Another input shape, train or eval mode, or grad mode is traced and decided at its first call; the parameters stay.
    """

    _plans: CallCache

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        planner: Planner,
        settings: CallSettings,
        inputs: tuple[Any, ...] | Mapping[str, Any] | None,
    ) -> None:
        super().__init__()
        # Outside of the tables of the module, where the names of the model's own modules are.
        object.__setattr__(self, "_plans", CallCache(self, model, mesh, planner, settings))
        self.training = model.training
        watch_replaced(model.parameters())
        watch_wrappers()
        if inputs is not None:
            self._plans.prepare(inputs)

    @classmethod
    def planned(
        cls,
        graph: NamedGraph,
        assignment: Assignment,
        mesh: DeviceMesh,
        outputs: Outputs = "sharded",
        local_inputs: bool = False,
    ) -> ParallelModule:
        """The model of a graph under decisions already made; for calls of that shape and mode alone."""
        made = cls(
            graph.model,
            mesh,
            FixedInputs(graph, assignment),
            CallSettings(TrainingOptions(outputs, local_inputs)),
            None,
        )
        made._plans.prepare_traced(graph)
        return made

    def __getattr__(self, name: str) -> Any:
        """Plain attributes of the model, such as its `config`, are there too; its other methods are not."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            plans = self.__dict__.get("_plans")
            model = None if plans is None or name.startswith("_") else plans.weights.skeleton
            if model is None or not _has(model, name):
                raise
        value = model.__dict__.get(name)
        if name in model.__dict__ and not callable(value) and not isinstance(value, Tensor):
            return value
        owner = type(model).__name__
        raise ModuleAttributeError(
            f"a parallel module runs the forward of the model and has none of its other code: no {owner}.{name}\n"
            f"fix: use {name} of a copy of {owner} on each rank, with load_state_dict of the whole weights; or let "
            "forward do what it does"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        plans = self.__dict__.get("_plans")
        if plans is not None and name not in self.__dict__ and name not in self._parameters:
            if isinstance(value, nn.Module):
                self._refuse(f"it cannot take the module {name!r}")
            if name not in self._buffers and _has(plans.weights.skeleton, name):
                self._refuse(f"setting {name!r}, which its graph may have as a constant, would change nothing")
        super().__setattr__(name, value)

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(self._plans.weights.skeleton, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            raise TypeError(f"a parallel {self._plans.weights.owner} is not subscriptable")
        return entry_of(self, key)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            return self._call(args, kwargs)
        check_not_captured()
        # The two ends cannot be traced by torch.compile; what is between them is one graph.
        plan, given, values = self._begin_untraced(args, kwargs)
        outputs = self._run_exactly(plan, values) if self._plans.randomness.is_exact else plan.graph_module(*values)
        return self._end_untraced(plan, given, outputs)

    # Where Dynamo gives up `forward`, it would compile the functions below it: their caches must stay out of its reach.
    @_untraced
    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Eagerly: that the ranks make the same call is found out beside the forward, before it sends anything."""
        try:
            plan, given, values = self._begin(args, kwargs)
            outputs = plan.graph_module(*values)
            self._plans.check()
        except Disagreement:
            plan, given, values = self._begin(args, kwargs, differ=True)
            outputs = plan.graph_module(*values)
        return self._end(plan, given, outputs)

    def _begin(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], differ: bool = False, compiled: bool = False
    ) -> tuple[CompiledCall, CallSignature, list[Tensor]]:
        plan, given = self._plans.find(args, kwargs, later=not differ, differ=differ)
        values = plan.values(given, compiled)
        if plan.emitted.draws:
            values.append(self._plans.randomness.key(plan.emitted.draws))
        values += plan.emitted.ends.first(values, self._plans)
        return plan, given, values

    def _end(self, plan: CompiledCall, given: CallSignature, outputs: tuple[Any, ...]) -> Any:
        return plan.finish(given, plan.emitted.ends.last(outputs, self._plans))

    @_untraced
    def _begin_untraced(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[CompiledCall, CallSignature, list[Tensor]]:
        """A compiled graph sends when it likes, so the ranks are compared before it; and it takes what is there."""
        try:
            begun = self._begin(args, kwargs, compiled=True)
            LateTensor.arrive_all(begun[2])
            self._plans.check()
        except Disagreement:
            begun = self._begin(args, kwargs, differ=True, compiled=True)
            LateTensor.arrive_all(begun[2])
        return begun

    @_untraced
    def _run_exactly(self, plan: CompiledCall, values: list[Tensor]) -> tuple[Any, ...]:
        """Ops that draw from the default generator draw in the order of the graph, which a compiler may change."""
        outputs: tuple[Any, ...] = plan.graph_module(*values)
        return outputs

    @_untraced
    def _end_untraced(self, plan: CompiledCall, given: CallSignature, outputs: tuple[Any, ...]) -> Any:
        return self._end(plan, given, outputs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """For gradient accumulation: gradients of a backward in here stay on their rank, until one outside sends all.

        The next backward outside adds them to its own and sends the sums, so `.grad` is set (or added to) there. Where
        a layout splits the gradients (`fsdp`) every backward sends them, in here as well.
        """
        with self._plans.synchronisation.off():
            yield

    @contextmanager
    def exact_randomness(self) -> Iterator[None]:
        """Draw what one process would draw, to compare the two: the same dropout masks from the same `manual_seed`.

        Every rank draws the numbers of the whole tensors from its default generator, and uses those of its shard. The
        ranks' generators must have one state when this is entered. It is slower, and for verification only.
        """
        with self._plans.randomness.exact():
            yield

    def collectives(self) -> tuple[StepCollective, ...]:
        """Every collective of one forward and backward, in the order of the graph of the latest call."""
        return tuple(
            StepCollective(
                step.kind.value, step.axes, direction, inserted.tensor, inserted.op, step.numel * inserted.itemsize
            )
            for inserted in self.emitted.inserted
            for direction, step in inserted.collectives()
        )

    @property
    def code(self) -> str:
        """The graph that this rank runs, as Python; before each collective its tensor, layouts, op and rule."""
        return with_ends(with_notes(self.emitted.graph_module), self.emitted.ends)

    @property
    def graph(self) -> NamedGraph:
        """The named graph of the latest call, or of the inputs that `parallelize` was given."""
        return self._plans.current().graph

    @property
    def assignment(self) -> Assignment:
        """Return the assignment of that graph."""
        return self._plans.current().assignment

    @property
    def emitted(self) -> Emitted:
        """The graph that this rank runs."""
        return self._plans.current().emitted

    def init_weights(self, init: Callable[[nn.Module], None] | None = None) -> None:
        """Give values to a model that was built on the meta device, one module of it at a time.

        `init` sets the parameters and buffers that a module itself holds, as a function for `nn.Module.apply` does;
        without it each module's own `reset_parameters` runs. Every rank draws the same numbers, so that the weights
        do not depend on the layout.
        """
        self._plans.weights.initialise(init, self._plans.agreement)

    def load_full_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Take this rank's part of a state dict of whole tensors; mapped files (`torch.load(..., mmap=True)`) do."""
        self._plans.weights.load_full(state_dict, self._plans.agreement)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As of any module; tensors may be whole, or split as another layout on another mesh has them.

        All ranks load together: a tensor that comes split in another way is gathered for a moment.
        """
        weights = self._plans.weights
        names = weights.names()
        try:
            found = super().load_state_dict(weights.placed(state_dict), strict, assign)
        finally:
            tie(self, names)
        if not found.missing_keys:
            weights.was_given(state_dict)
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """A module with values of its own, under the same layout on the same mesh; traced again at its first call."""
        made = ParallelModule.__new__(ParallelModule)
        memo[id(self)] = made
        tables = ("_parameters", "_buffers", "_modules", "_plans")
        nn.Module.__init__(made)
        made.__dict__.update(
            {name: copy.deepcopy(value, memo) for name, value in self.__dict__.items() if name not in tables}
        )
        object.__setattr__(made, "_plans", self._plans.copied(made, memo))
        return made

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        if check_conversion(fn, self._plans.weights.kinds(), self._plans.device):
            self._plans.weights.check_there()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def register_forward_pre_hook(self, hook: Callable[..., Any], **options: Any) -> RemovableHandle:
        check_hook(hook)
        return super().register_forward_pre_hook(hook, **options)

    def __prepare_scriptable__(self) -> NoReturn:
        """Raise for torch.jit.script, which asks modules for this first."""
        refuse_capture()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AutoparError(
            "a parallel module holds process groups and cannot be pickled\n"
            "fix: save what it has learned, torch.save(module.state_dict(), ...) on every rank, or all ranks together "
            "with torch.distributed.checkpoint; copy.deepcopy(module) makes another one"
        )

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        self._plans.weights.check_there()
        return super().named_parameters(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._plans.weights.check_there()
        return super().state_dict(*args, **kwargs)


def _has(model: nn.Module, name: str) -> bool:
    return name in model.__dict__ or (hasattr(type(model), name) and not hasattr(nn.Module, name))
