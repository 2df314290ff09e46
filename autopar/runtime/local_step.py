"""Run the step of an elementwise optimizer on this rank's shards, in place of DTensors.

Torch decides for each op on DTensors how to run it, which takes longer than the arithmetic of a small parameter: a step
of AdamW takes 2.4 times the time of one on plain tensors. Where each element of a parameter is updated from the same
element of its gradient and its states, a step on the shards gives the same numbers.

The optimizer itself never changes: a hook passes to its step a *stand-in*, an optimizer of the same class with local
tensors as parameters and states. They share memory, so updates need no copy. A hook after the step puts new states into
the optimizer as DTensors. So checkpoints, schedulers, norms and other hooks see DTensors, and a step that raises leaves
the optimizer as it was.

On a CPU torch updates parameters one by one, which takes small ones more time to call than to compute. The stand-in
updates small shards together, where the ops of the optimizer give the same numbers either way.

Parameters whose states live on the host are stepped after the others (`autopar/runtime/host_states.py`).
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.errors import AutoparError
from autopar.runtime.host_states import HostShard, step_from_host

__all__ = ["ALIKE_TOGETHER", "ELEMENTWISE", "local_tensor", "same_objects", "step_locally"]

# Exact classes: a subclass may compute anything. Adafactor, Muon and LBFGS compute across elements.
ELEMENTWISE = frozenset(
    {
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.Adamax,
        torch.optim.AdamW,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
# Those of float32 and float64 that are updated by the same operations one by one and together. NAdam, RAdam and ASGD
# round otherwise, and all but SGD and Rprop in half precision.
ALIKE_TOGETHER = ELEMENTWISE - {torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD}
# Most elements of a shard that is updated together with others, and of all of these at a time: with their gradients and
# states they stay in the caches of a core.
SMALL, AT_A_TIME = 2**14, 2**18

# Torch keeps this hook for the whole process, so it is registered once.
_HOOKS: list[Any] = []
# The key of our hooks among those of one optimizer, which numbers its own.
_KEY: Any = "autopar"
# The attribute of parameters of parallel modules; other DTensors are not ours to change. No weak references: torch
# does not convert a parameter that has one. True where its states live on the host.
_MARK = "_autopar_parameter"
# The attribute of an optimizer with its shards, for the next step.
_KEPT = "_autopar_shards"


def step_locally(parameters: Iterable[Tensor], offload_states: bool) -> None:
    """Let elementwise optimizers update the shards of these DTensors, without DTensor's dispatch."""
    for parameter in parameters:
        setattr(parameter, _MARK, offload_states)
    if not _HOOKS:
        _HOOKS.append(register_optimizer_step_pre_hook(_install))


def _install(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Put our hooks next to the step: other hooks before and after it may replace gradients and read states."""
    if type(optimizer) not in ELEMENTWISE:
        _check_on_device(optimizer)
        return
    before: Any = optimizer._optimizer_step_pre_hooks
    after: Any = optimizer._optimizer_step_post_hooks
    before.pop(_KEY, None)
    before[_KEY] = _begin
    after[_KEY] = _end
    after.move_to_end(_KEY, last=False)


def _begin(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of the step with a stand-in for the optimizer; None to run the step as it is."""
    # Dynamo traces a compiled step through DTensors: nothing is dispatched when it runs.
    return None if torch.compiler.is_compiling() else _begin_untraced(optimizer, args, kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _begin_untraced(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    stand_in = _stand_in(optimizer)
    if stand_in is None:
        _check_on_device(optimizer)
        return None
    shards: list[_Shard] = stand_in.__dict__[_KEY].shards
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        _take_gradients(shards)
        return (stand_in, *args[1:]), kwargs
    # The closure computes gradients within the step.
    return (stand_in,), {"closure": partial(_run, closure, shards)}


def _check_on_device(optimizer: Optimizer) -> None:
    """Raise for parameters with states on the host, where the optimizer cannot step their shards."""
    if any(getattr(parameter, _MARK, False) for group in optimizer.param_groups for parameter in group["params"]):
        able = ", ".join(sorted(each.__name__ for each in ELEMENTWISE))
        raise AutoparError(
            f"offload_states with {type(optimizer).__name__}: expected one of torch's optimizers that update element "
            f"by element, got another, one with differentiable=True, or parameters of other DTensors besides\n"
            f"fix: take one of {able}, or offload_states=False"
        )


def _run(closure: Callable[[], Any], shards: Iterable[_Shard]) -> Any:
    loss = closure()
    _take_gradients(shards)
    return loss


def _end(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Store the states that a stand-in has made, as DTensors in the optimizer."""
    stand_in = args[0]
    if stand_in is not optimizer and _KEY in stand_in.__dict__:
        _end_untraced(optimizer, stand_in)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _end_untraced(optimizer: Optimizer, stand_in: Optimizer) -> None:
    of_step: _Shards = stand_in.__dict__.pop(_KEY)
    made = of_step.give_back(optimizer, stand_in)
    kept = {"state", "param_groups"}
    optimizer.__dict__.update({name: value for name, value in stand_in.__dict__.items() if name not in kept})
    if not made:  # mostly states are updated in place
        optimizer.__dict__[_KEPT] = of_step


@dataclass(slots=True)
class _Shard:
    """A parameter, its shard as a plain tensor, and the shards of its states."""

    parameter: DTensor
    local: Tensor
    states: dict[str, Any]
    # The parameter group, where the states live on the host.
    group: int | None = None

    @property
    def is_small(self) -> bool:
        """Return whether it may be updated together with others, for which torch wants states of its dtype."""
        local, states = self.local, [one for one in self.states.values() if isinstance(one, Tensor) and one.dim()]
        is_exact = local.dtype in (torch.float32, torch.float64) and all(one.dtype == local.dtype for one in states)
        return is_exact and local.is_cpu and local.numel() <= SMALL

    def give_back(self, states: dict[Tensor, dict[str, Any]], local: dict[str, Any]) -> bool:
        """Store the new states of the shard as those of the parameter; return whether there are any."""
        made = [(name, value) for name, value in local.items() if self.states.get(name, self) is not value]
        for name, value in made:
            states[self.parameter][name] = self._whole(value)
        return bool(made)

    def _whole(self, value: Any) -> Any:
        """Return a new state as a DTensor if it has an element for each of the parameter's."""
        if not isinstance(value, Tensor) or value.shape != self.local.shape:
            return value
        local = value.view(self.parameter._local_tensor.shape)
        if self.group is not None:
            # `from_local` would move it to the device of the mesh.
            return DTensor(local, self.parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]
        return DTensor.from_local(
            local,
            self.parameter.device_mesh,
            self.parameter.placements,
            run_check=False,
            shape=self.parameter.shape,
            stride=self.parameter.stride(),
        )


@dataclass(slots=True)
class _Shards:
    """The shards of an optimizer in a step."""

    shards: list[_Shard]
    # The number of a group, some of its tensors, and whether they are updated together.
    groups: list[tuple[int, list[Tensor], bool]]
    states: dict[Tensor, dict[str, Any]]
    # Tensors and choices that they were made of; None where they cannot be kept for another step.
    source: _ShardSource | None

    @staticmethod
    def of(optimizer: Optimizer, source: _ShardSource | None) -> _Shards | None:
        """Return the shards of all parameters; None if none is ours, or some are DTensors of others."""
        found = _Shards([], [], {}, source)
        small: list[tuple[int, list[Tensor], bool]] = []
        for number, group in enumerate(optimizer.param_groups):
            takes_small = _takes_small(optimizer, group)
            parameters, together = list[Tensor](), list[Tensor]()
            for parameter in group["params"]:
                state = optimizer.state.get(parameter)
                if not isinstance(parameter, DTensor):
                    if state is not None:
                        found.states[parameter] = state
                    parameters.append(parameter)
                    continue
                shard = _shard(parameter, state or {})
                if shard is None or group.get("differentiable"):
                    return None
                found.shards.append(shard)
                if getattr(parameter, _MARK):
                    shard.group = number
                    found.source = None
                    continue
                (together if takes_small and shard.is_small else parameters).append(shard.local)
                if state:
                    found.states[shard.local] = dict(shard.states)
            found.groups.append((number, parameters, False))
            small += [(number, piece, True) for piece in _pieces(together)]
        found.groups += small  # shards on the host know their group by its number
        return found if found.shards else None

    def give_back(self, optimizer: Optimizer, stand_in: Optimizer) -> bool:
        """Store the states that a stand-in has made; return whether there are any."""
        hosted: dict[int, list[HostShard]] = {number: [] for number in range(len(stand_in.param_groups))}
        made = False
        for shard in self.shards:
            if shard.group is None:
                made |= shard.give_back(optimizer.state, stand_in.state.pop(shard.local, {}))
            elif shard.local.grad is not None:
                hosted[shard.group].append(shard)
        if any(hosted.values()):

            def keep(shard: Any, name: str, value: Any) -> None:
                shard.give_back(optimizer.state, {name: value})

            step_from_host(stand_in, list(hosted.values()), keep)
        # The rest are plain parameters.
        optimizer.state.update(stand_in.state)
        for shard in self.shards:
            shard.local.grad = None  # the shard may be kept longer than the gradient
        return made


class _ShardSource(NamedTuple):
    """Tensors and choices that shards were made of."""

    tensors: list[Any]
    numbers: list[int]

    @staticmethod
    def of(optimizer: Optimizer) -> _ShardSource | None:
        """Return those of an optimizer; None where a parameter is no DTensor."""
        found = _ShardSource([], [])
        for group in optimizer.param_groups:
            parameters = group["params"]
            try:
                shards = list(map(local_tensor, parameters))
            except AttributeError:
                return None
            states = [state for state in map(optimizer.state.get, parameters) if state]
            found.tensors.extend((*parameters, *shards, *map(_spec, parameters)))
            for state in states:
                found.tensors.extend(state.values())
            # `shard.data = other` leaves the tensor and changes its memory.
            found.numbers.extend(map(Tensor.data_ptr, shards))
            found.numbers.extend((len(states), _takes_small(optimizer, group), bool(group.get("differentiable"))))
        return found

    def is_same(self, other: _ShardSource) -> bool:
        return self.numbers == other.numbers and same_objects(self.tensors, other.tensors)


# C functions: they run on all parameters at every call and at every step.
local_tensor, _spec = map(attrgetter, ("_local_tensor", "_spec"))


def same_objects(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _stand_in(optimizer: Optimizer) -> Optimizer | None:
    """Return an optimizer of the same class on shards; None if it has no parameter of ours, or DTensors of others."""
    if not any(isinstance(parameter, DTensor) for group in optimizer.param_groups for parameter in group["params"]):
        return None  # of other models
    source = _ShardSource.of(optimizer)
    kept: _Shards | None = optimizer.__dict__.pop(_KEPT, None)  # a step that raises may have changed them
    if kept is None or kept.source is None or source is None or not source.is_same(kept.source):
        kept = _Shards.of(optimizer, source)
    if kept is None:
        return None
    made: Optimizer = object.__new__(type(optimizer))
    # What torch.amp sets for the time of a step is there too.
    made.__dict__.update(optimizer.__dict__)
    made.param_groups = [
        {**optimizer.param_groups[number], "params": tensors, **({"foreach": True} if is_together else {})}
        for number, tensors, is_together in kept.groups
    ]
    made.state = defaultdict(dict, kept.states)
    made.__dict__[_KEY] = kept
    return made


def _takes_small(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Return whether torch can take small tensors of a group together, and would by itself take them one by one."""
    if type(optimizer) not in ALIKE_TOGETHER or any(group.get(name) is not None for name in ("foreach", "fused")):
        return False
    return not any(isinstance(value, Tensor) for value in group.values())  # such as a rate


def _pieces(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield small tensors in pieces that are updated together."""
    piece, left = list[Tensor](), AT_A_TIME
    for tensor in tensors:
        size = tensor.numel()
        if size > left:
            yield piece
            piece, left = [], AT_A_TIME
        piece.append(tensor)
        left -= size
    if piece:
        yield piece


def _shard(parameter: DTensor, state: dict[str, Any]) -> _Shard | None:
    """Return the shard of a parameter; None if it is not ours, or a state is not split as the parameter."""
    if not hasattr(parameter, _MARK):
        return None
    spec = parameter._spec
    states = {}
    for name, value in state.items():
        local = value
        if isinstance(value, DTensor):
            if not _split_alike(value._spec, spec):
                return None
            local = _plain(value._local_tensor)
        elif isinstance(value, Tensor) and value.dim():
            return None
        states[name] = local
    # Of its own version: the module keeps views of the shard, and a write through another view would break them.
    local = _plain(parameter._local_tensor.data)
    return _Shard(parameter, local, states)


def _take_gradients(shards: Iterable[_Shard]) -> None:
    """Let the shards have the gradients of their parameters, split as these; count a write to each."""
    written: list[Tensor] = []
    for shard in shards:
        gradient: Any = shard.parameter.grad
        if gradient is None:
            shard.local.grad = None  # that of a step that raised
            continue
        if not isinstance(gradient, DTensor):
            raise AutoparError(
                f"a parameter of a parallel module has a plain tensor as gradient, of shape {list(gradient.shape)}: "
                f"expected a DTensor of shape {list(shard.parameter.shape)}\n"
                "fix: parameter.grad = torch.distributed.tensor.distribute_tensor(gradient, parameter.device_mesh, "
                "parameter.placements)"
            )
        spec = shard.parameter._spec
        if not _split_alike(gradient._spec, spec):
            gradient = gradient.redistribute(spec.mesh, spec.placements)
        shard.local.grad = _plain(gradient._local_tensor)
        written += shard.parameter, shard.parameter._local_tensor
    # Autograd then sees writes to what a graph has saved, and the module sees that its gathered copies are old.
    torch.autograd.graph.increment_version(written)


def _split_alike(one: Any, other: Any) -> bool:
    """Return whether two specs of DTensors have the same shards on the same ranks."""
    # Mostly the mesh is one object, whose comparison takes longer than all else here.
    same: bool = one.placements == other.placements and (one.mesh is other.mesh or one.mesh == other.mesh)
    return same


def _plain(local: Tensor) -> Tensor:
    """Return a shard with a dim: states without one, such as the number of steps, do not belong to elements."""
    return local if local.dim() else local.view(1)
