"""`ParallelModule`: an `nn.Module` that runs the generated graph of a model on every rank of a mesh."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from autopar.errors import AutoparError, ModuleAttributeError
from autopar.ir.graph import NamedGraph
from autopar.lowering.emitted import Emitted, with_ends, with_notes
from autopar.lowering.modules.late_tensor import LateTensor
from autopar.runtime.begun_call import BegunCall
from autopar.runtime.call_cache import CallCache, Disagreement
from autopar.runtime.call_planner import FixedInputs, Planner
from autopar.runtime.compiler_order import keep_order_in_backward
from autopar.runtime.hosts import HostAnswers, save_pretrained
from autopar.runtime.input_rows import batch_shard, from_rows
from autopar.runtime.kept_calls import SizeOptions
from autopar.runtime.model_attributes import ModelClass, attribute_of, class_for, has_attribute, set_attribute
from autopar.runtime.module_shell import ClosedModule, entry_of, tie
from autopar.runtime.routed_load import RoutedLoad, routed_loads
from autopar.runtime.sync.replica_group import ReplicaSetting
from autopar.runtime.sync.replicas import Replicas
from autopar.runtime.torch_wrappers import (
    UNTRACED,
    check_conversion,
    check_hook,
    check_not_captured,
    refuse_capture,
    watch_replaced,
    watch_wrappers,
)
from autopar.sharding.assignment import Assignment
from autopar.sharding.options import Outputs, TrainingOptions
from autopar.sharding.reshard_insertion import StepCollective, step_collectives

__all__ = ["ParallelModule", "Planner"]

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _untraced(method: _Method) -> _Method:
    """Exclude a method from tracing by Dynamo, in torch.compile and torch.export."""
    return torch.compiler.disable(method, reason=UNTRACED)  # type: ignore[no-untyped-call, no-any-return]


class ParallelModule(ClosedModule, metaclass=ModelClass):
    """Module that runs a model on all devices of a mesh; its parameters are DTensors under the model's names.

    Call it as the model. The first call with another input shape, train or eval mode, or grad mode is traced and
    planned; its parameters keep their sharding.
    """

    _plans: CallCache
    _replicas: Replicas | None
    _hosts: HostAnswers

    def __new__(cls, model: nn.Module, *args: Any, **kwargs: Any) -> Self:
        # A class for each module: the signature of a method belongs to its class.
        return super().__new__(class_for(cls, model))

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        planner: Planner,
        options: TrainingOptions,
        inputs: tuple[Any, ...] | Mapping[str, Any] | None,
        replica: ReplicaSetting | None = None,
        sizes: SizeOptions = SizeOptions(),  # noqa: B008  # it is frozen
    ) -> None:
        super().__init__()
        # Not in the tables of the module: the model may have a child module of this name.
        object.__setattr__(self, "_plans", CallCache(self, model, mesh, planner, options, replica, sizes))
        object.__setattr__(self, "_replicas", self._replicas_of(replica))
        object.__setattr__(self, "_hosts", HostAnswers(options.local_inputs, mesh.device_type))
        self._hosts.announce(self._plans.weights.skeleton)
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
        """Return a module that runs one graph with a given assignment, and no other calls."""
        made = cls(
            graph.model,
            mesh,
            FixedInputs(graph, assignment),
            TrainingOptions(outputs, local_inputs),
            None,
        )
        made._plans.prepare_traced(graph)
        return made

    def __getattr__(self, name: str) -> Any:
        """Return a plain attribute of the model, such as its `config`; raise for its methods."""
        if name == "replicas":
            raise ModuleAttributeError(
                "the module has no replicas that drift\nfix: a layout with a 'drift' line, as in "
                "'drift pod -> mean every 16; fsdp'"
            )
        try:
            return super().__getattr__(name)
        except AttributeError:
            # `_plans` is missing until the constructor has set it.
            plans = self.__dict__.get("_plans")
            if plans is None or name.startswith("__"):
                raise
        answer = self._hosts.find(name)
        return answer[0] if answer is not None else attribute_of(self, plans.weights.skeleton, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Return the class of the model, for `isinstance` and `super()` in its methods; `type` gives this one."""
        plans = self.__dict__.get("_plans")
        return type(self) if plans is None else type(plans.weights.skeleton)

    def __setattr__(self, name: str, value: Any) -> None:
        plans = self.__dict__.get("_plans")
        if plans is not None and name not in self.__dict__ and name not in self._parameters:
            if isinstance(value, nn.Module):
                self._refuse(f"it cannot take the module {name!r}")
            if name not in self._buffers and has_attribute(plans.weights.skeleton, name):
                if set_attribute(plans.weights.skeleton, name, value):
                    plans.forget()
                return
        super().__setattr__(name, value)

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(self._plans.weights.skeleton, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            raise TypeError(f"a parallel {self._plans.weights.owner} is not subscriptable")
        return entry_of(self, key)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Dynamo cannot trace through one compiled module that stands at several places.
        if not torch.compiler.is_compiling() or self._plans.compiler is not None:
            return self._call(args, kwargs)
        check_not_captured()
        # The two ends of a call cannot be traced by torch.compile; the graph between them can.
        begun = self._begin_untraced(args, kwargs)
        outputs = self._run_exactly(begun) if self._plans.randomness.is_exact else begun.run()
        return self._end_untraced(begun, outputs)

    # If Dynamo gives up on `forward`, it compiles the functions that `forward` calls; on torch 2.11 with wrong results.
    @_untraced
    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], part: str = "") -> Any:
        """Run a call eagerly; the ranks compare it during the forward, before its first collective."""
        try:
            begun = BegunCall.begin(self._plans, args, kwargs, part)
            outputs = begun.run()
            self._plans.check()
        except Disagreement:
            # No rank has sent anything of this call, so all begin it again: one may trace it, or all raise one error.
            begun = BegunCall.begin(self._plans, args, kwargs, part, differ=True)
            outputs = begun.run()
        return self._end(begun, outputs)

    def call_part(self, path: str, *args: Any, **kwargs: Any) -> Any:
        latest = self._plans.latest  # `graph`, `code` and the like are of calls of the whole model
        try:
            return self._call(args, kwargs, path)
        finally:
            self._plans.latest = latest

    def _end(self, begun: BegunCall, outputs: tuple[Any, ...]) -> Any:
        # A recomputed call counts twice, in all replicas alike. Reentrant checkpoints have gradients then alone.
        if self._replicas is not None and begun.given.grad_enabled:
            assert self._plans.replica is not None, "it made the replicas"
            self._replicas.count_rows(self._plans.replica.rows(begun.plan.graph))
        return begun.end(self._plans, outputs)

    @_untraced
    def _begin_untraced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BegunCall:
        """Begin a call of a compiled graph: wait for late tensors; compare the ranks, if the graph sends anything."""
        # The compiler orders collectives, so no point within the graph is surely before all of them.
        try:
            begun = BegunCall.begin(self._plans, args, kwargs, compiled=True)
            LateTensor.arrive_all(begun.values)
            if begun.plan.emitted.sends:
                self._plans.check()
        except Disagreement:
            begun = BegunCall.begin(self._plans, args, kwargs, differ=True, compiled=True)
            LateTensor.arrive_all(begun.values)
        return begun

    @_untraced
    def _run_exactly(self, begun: BegunCall) -> tuple[Any, ...]:
        """Run the graph uncompiled: a compiler may reorder ops that draw from the default generator."""
        return begun.run()

    @_untraced
    def _end_untraced(self, begun: BegunCall, outputs: tuple[Any, ...]) -> Any:
        try:
            self._plans.check()
        except Disagreement:  # the graph has sent nothing
            begun = BegunCall.begin(self._plans, begun.args, begun.kwargs, differ=True)
            outputs = begun.run()
        keep_order_in_backward(outputs)
        return self._end(begun, outputs)

    def batch_shard(self, dim: str = "batch") -> tuple[int, int]:
        """Return which part of the batch this rank works on, and of how many: `(1, 4)` is the second of four.

        A loader gives each rank these rows of every batch. Ranks that work on the same rows get the same numbers.

        Parameters:
            dim: the dim of samples, as `graph` names it.
        """
        return batch_shard(self._plans.current(), dim)

    def from_rows(self, dim: str = "batch", /, **rows: Tensor) -> dict[str, Tensor]:
        """Return the inputs of a call of which each rank has its rows alone; nothing is sent.

        Parameters:
            dim: the dim of samples, as `graph` names it.
            rows: by name, this rank's rows of each input, `batch_shard` of them; other dims are whole.

        Returns:
            DTensors that stand for the whole batch: `module(**module.from_rows(x=rows))`.
        """
        return from_rows(self._plans.current(), dim, rows)

    def compile_layers(self, **options: Any) -> None:
        """Compile each kind of repeated layer once, in place of the whole graph; calls of other shapes follow.

        The time of compilation does not grow with the number of layers. Gathers of parameters run beside the layers.

        Parameters:
            options: those of `torch.compile`, such as `mode` and `backend`.
        """
        plans = self._plans
        plans.current()
        if plans.compiler is not None:
            raise AutoparError(
                "the layers are compiled already: expected one call of compile_layers(), got two\nfix: drop it"
            )
        compiler: Callable[[nn.Module], nn.Module] = partial(torch.compile, **options)  # type: ignore[assignment]
        done = [call.compile_layers(compiler) for call in plans.kept]
        if not any(done):
            raise AutoparError(
                "no repeated layer can be compiled alone: expected equal layers without dropout, ops that send inside, "
                "regathered weights, recomputation, micro-batches and stages\n"
                "fix: torch.compile(module), which compiles the whole graph"
            )
        plans.compiler = compiler

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without reducing them: the next backward outside reduces the sum.

        That backward sets `.grad`, or adds to it. If the layout splits the gradients (`fsdp`), every backward reduces
        them, inside this context too.
        """
        with self._plans.synchronisation.off():
            yield

    @contextmanager
    def exact_randomness(self) -> Iterator[None]:
        """Draw the random numbers of one process, to verify a run: same seed, same dropout masks.

        Every rank draws the numbers of whole tensors from its default generator and uses those of its shard, which is
        slower. All ranks must enter with the same generator state.
        """
        with self._plans.randomness.exact():
            yield

    @property
    def replicas(self) -> Replicas:
        """Return the replicas that a `drift` line of the layout makes of the module: index, weight, state, mean."""
        if self._replicas is None:
            raise AttributeError  # `__getattr__` says why; a missing attribute is what `hasattr` and torch look for
        return self._replicas

    def _replicas_of(self, replica: ReplicaSetting | None) -> Replicas | None:
        """Return the replicas of this module; of a copy too, whose parameters are its own."""
        if replica is None:
            return None
        own = weakref.ref(self)

        def parameters() -> Mapping[str, nn.Parameter]:
            module = own()
            return {} if module is None else dict(nn.Module.named_parameters(module))

        return Replicas(replica.drift, replica.group, parameters)

    def collectives(self) -> tuple[StepCollective, ...]:
        """Return the collectives of a forward and backward of the latest call, in order of the graph."""
        groups, emitted, precision = self._plans.groups, self.emitted, self._plans.options.precision
        sizes = dict(zip(groups.names, groups.mesh.shape, strict=True))
        inserted, sums = emitted.inserted, emitted.sum_bytes
        return tuple(step_collectives(inserted, groups.level_sums, sizes, sums, self.graph, precision))

    def routed_loads(self) -> tuple[RoutedLoad, ...]:
        """Return the rows that each rank multiplied in each routing of the latest uncompiled forward.

        Prices assume a ratio of the busiest rank to the mean (`imbalance`). Every rank must call this: it is a
        collective and waits for the device. A step without it reads nothing. Of micro-batches the last one counts.
        """
        return routed_loads(self.graph, self.emitted, self._plans.agreement)

    @property
    def code(self) -> str:
        """Return the graph of this rank as Python; comments name each collective's tensor and op."""
        return with_ends(with_notes(self.emitted.graph_module), self.emitted.ends)

    @property
    def graph(self) -> NamedGraph:
        """Return the named graph of the latest call, or of the example inputs of `parallelize`."""
        return self._plans.current().graph

    @property
    def assignment(self) -> Assignment:
        """Return the assignment of that graph."""
        return self._plans.current().assignment

    @property
    def emitted(self) -> Emitted:
        """Return the emitted graph of this rank."""
        return self._plans.current().emitted

    def init_weights(self, init: Callable[[nn.Module], None] | None = None) -> None:
        """Initialise the weights of a model that was built on the meta device, one module at a time.

        Parameters:
            init: sets the parameters and buffers of one module, as a function for `nn.Module.apply` does. The default
                is each module's `reset_parameters`.

        Every rank draws the same numbers, so the weights do not depend on the layout.
        """
        self._plans.weights.initialise(init, self._plans.everyone)

    def load_full_state_dict(self, state_dict: Mapping[str, Tensor] | None) -> None:
        """Load this rank's shards from a state dict of whole tensors, also from mapped files.

        Parameters:
            state_dict: whole tensors under the model's names, on every rank. Or on the first rank alone, and None on
                the others: the first rank then sends each of them its pieces.
        """
        self._plans.weights.load_full(state_dict, self._plans.agreement, self._plans.first_rank)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Gather the whole tensors on the first rank, in the memory of the host; all ranks call it together.

        Returns:
            Parameters and persistent buffers under the model's names on the first rank, nothing on the others. No
            other rank ever has a whole tensor of those that are split.
        """
        self._plans.weights.check_there()
        return self._plans.weights.full(self._plans.first_rank())

    def save_pretrained(self, *arguments: Any, **options: Any) -> None:
        """Run `save_pretrained` of a transformers or peft model on the first rank; all ranks call it together.

        It gets the whole tensors. The files are those of one process, in parts as `max_shard_size` says.
        """
        weights, first = self._plans.weights, self._plans.first_rank()
        weights.check_there()
        self._plans.agreement.together(
            lambda: save_pretrained(
                self, weights.skeleton, lambda: weights.full(first), first.is_here, arguments, options
            )
        )

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict of whole tensors, or of DTensors of any layout and mesh.

        All ranks call this together: each DTensor with another sharding is gathered before it is split again.
        """
        weights = self._plans.weights
        names = weights.names()
        try:
            found = super().load_state_dict(weights.placed(state_dict), strict, assign)
        finally:
            # With `assign=True` torch gives each name of a tied tensor a tensor of its own.
            tie(self, names)
        if not found.missing_keys:
            weights.was_given(state_dict)
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """Return a module with a copy of the weights, the same layout and mesh, and an empty call cache."""
        made: ParallelModule = object.__new__(type(self))
        memo[id(self)] = made
        # `_plans.copied` fills these: the call cache has process groups, which cannot be copied.
        tables = ("_parameters", "_buffers", "_modules", "_plans", "_replicas")
        nn.Module.__init__(made)
        made.__dict__.update(
            {name: copy.deepcopy(value, memo) for name, value in self.__dict__.items() if name not in tables}
        )
        object.__setattr__(made, "_plans", self._plans.copied(made, memo))
        object.__setattr__(made, "_replicas", made._replicas_of(self._plans.replica))
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
        """Raise for torch.jit.script, which calls this method first."""
        refuse_capture()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AutoparError(
            "a parallel module cannot be pickled, because it has process groups\n"
            "fix: save its weights: torch.save(module.state_dict(), ...) on every rank, or all ranks together "
            "with torch.distributed.checkpoint; copy.deepcopy(module) makes a copy"
        )

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        self._plans.weights.check_there()
        return super().named_parameters(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._plans.weights.check_there()
        return super().state_dict(*args, **kwargs)
