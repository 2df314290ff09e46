"""The one differentiable collective: a reshard as a function on this rank's shard, and the dtypes that it sends.

Its forward runs the forward steps and its backward the backward steps, so the priced steps are those that run. The
collectives are functional and waited for at once, which `torch.compile` traces as one graph.

Libraries of collectives know a few dtypes; tensors of all others are sent as bytes or widened:

| sent | unchanged | otherwise |
|---|---|---|
| all-to-all | floats of 16 to 64 bits, integers of 8, 32, 64 bits, booleans | as bytes |
| all-gather | the same, and complex numbers | as bytes |
| sums | the same without booleans | widened to `SUMMED` and cast back; of booleans: any |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from autopar.lowering.collectives.gather import begin_gather
from autopar.lowering.collectives.key_ring import LocalKeyRing
from autopar.lowering.collectives.level_groups import sum_by_level
from autopar.lowering.collectives.local_steps import LocalStep, bind, finish, keep_local, prepare
from autopar.lowering.collectives.process_groups import Groups
from autopar.rules.shard_call.folded import fold
from autopar.sharding.lowered_ops.base import BareSum, Maximum, OpMessage, Send
from autopar.sharding.lowered_ops.halo import HaloExchange, HaloStretch
from autopar.sharding.lowered_ops.reorder import OrderExchange, Ranges, common
from autopar.sharding.lowered_ops.ring_attention import RingPass
from autopar.sharding.reshard.reshard import Reshard, Step, StepKind


@dataclass(frozen=True)
class LocalReshard:
    """Reshard bound to this rank, callable on its shard.

    For compilation it belongs in a module, whose numbers are constants to `torch.compile`. In a closure they become
    symbols when the same code meets another reshard.
    """

    reshard: Reshard
    forward: tuple[LocalStep, ...]
    backward: tuple[LocalStep, ...]
    shape: tuple[int, ...]
    result_shape: tuple[int, ...]

    @classmethod
    def bind(cls, reshard: Reshard, groups: Groups) -> LocalReshard:
        """Bind a reshard to this rank; all ranks of the mesh bind the same reshards, in the same order."""
        axes = reshard.axes

        def bound(step: Step) -> LocalStep:
            if step.local:
                return bind(step, reshard, groups.coordinate, ())
            group = groups.of(step.axes)
            levels = groups.levels(step.axes) if step.kind is StepKind.ALL_REDUCE else ()
            return replace(bind(step, reshard, groups.coordinate, group.members), group=group.name, levels=levels)

        shapes = [
            reshard.atoms.fold(layout.local_sizes(reshard.atoms, axes, groups.coordinate))
            for layout in (reshard.source, reshard.target)
        ]
        return cls(reshard, tuple(map(bound, reshard.forward)), tuple(map(bound, reshard.backward)), *shapes)

    def __call__(self, x: Tensor) -> Tensor:
        return convert(x, self)

    def begin(self, x: Tensor, backward: bool = False) -> Callable[[], Tensor]:
        """Run the steps up to the last collective, and start that; the function that is returned ends the reshard."""
        moves = self.backward if backward else self.forward
        shape = self.shape if backward else self.result_shape
        last = max((place for place, move in enumerate(moves) if not move.local), default=None)
        if last is None:
            return lambda: _run(x, self, backward)
        x = x.reshape(moves[0].before)
        for move in moves[:last]:
            x = run_step(move, x)
        arrival = begin_step(moves[last], x)

        def arrive() -> Tensor:
            found = arrival()
            for move in moves[last + 1 :]:
                found = run_step(move, found)
            return found.reshape(shape)

        return arrive


def convert(x: Tensor, conversion: LocalReshard, backward: bool = False) -> Tensor:
    """Return the tensor in its new sharding, differentiable if `x` is; `backward` converts a gradient."""
    shape = conversion.result_shape if backward else conversion.shape
    if tuple(x.shape) != shape:
        raise ValueError(
            f"a conversion from {conversion.reshard.source} to {conversion.reshard.target} is for a local tensor of "
            f"shape {shape}, this one has {tuple(x.shape)}"
        )
    if x.requires_grad and torch.is_grad_enabled() and (conversion.forward or conversion.backward):
        converted: Tensor = _ReshardFunction.apply(x, conversion, backward)  # type: ignore[no-untyped-call]
        return converted
    return _run(x, conversion, backward)


class _ReshardFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, conversion: LocalReshard, backward: bool) -> Tensor:
        ctx.conversion, ctx.backward_way = conversion, backward
        # Without steps, still another tensor: autograd takes an input that a Function returns for one changed in place.
        return _run(x.view_as(x), conversion, backward)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        # Through `convert`, so that gradients of gradients are right.
        return convert(gradient, ctx.conversion, not ctx.backward_way), None, None


def _run(x: Tensor, conversion: LocalReshard, backward: bool) -> Tensor:
    moves = conversion.backward if backward else conversion.forward
    if not moves:
        return x
    x = _in_shape(x, moves[0].before)
    for move in moves:
        x = run_step(move, x)
    return _in_shape(x, conversion.shape if backward else conversion.result_shape)


def _in_shape(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor in a shape that it mostly has: an op that changes nothing takes time, too."""
    return x if x.shape == shape else x.reshape(shape)


def run_step(move: LocalStep, x: Tensor) -> Tensor:
    """Run one step on a tensor whose dims are the local atoms."""
    return keep_local(move, x) if move.local else _exchange(move, x)


def _exchange(move: LocalStep, x: Tensor) -> Tensor:
    wide = summed_in(x.dtype)
    if move.kind in (StepKind.ALL_REDUCE, StepKind.REDUCE_SCATTER) and wide != x.dtype:
        return restored(_exchange(move, x.to(wide)), x.dtype)
    buffer = prepare(move, x)
    if _is_empty(move, buffer):
        return x.new_zeros(move.after)
    return finish(move, sent_and_received(move, buffer))


def _is_empty(move: LocalStep, buffer: Tensor) -> bool:
    """Return whether the whole tensor is empty: it is so on all members of the group, and none of them sends."""
    return buffer.numel() == 0 and move.kind is not StepKind.ALL_TO_ALL


def begin_step(move: LocalStep, x: Tensor) -> Callable[[], Tensor]:
    """Start the collective of a step; the function that is returned waits for its result."""
    wide = summed_in(x.dtype)
    if move.kind in (StepKind.ALL_REDUCE, StepKind.REDUCE_SCATTER) and wide != x.dtype:
        arrival = begin_step(move, x.to(wide))
        return lambda: restored(arrival(), x.dtype)
    buffer = prepare(move, x)
    if _is_empty(move, buffer):
        return lambda: x.new_zeros(move.after)
    with torch._C._AutoDispatchBelowAutograd():
        sent = send(move, buffer)

    def arrive() -> Tensor:
        nonlocal buffer
        with torch._C._AutoDispatchBelowAutograd():
            found: Tensor = torch.ops._c10d_functional.wait_tensor(sent)
        del buffer  # the library reads it until then
        return finish(move, found)

    return arrive


def sent_and_received(move: LocalStep, buffer: Tensor) -> Tensor:
    """Return the result of the collective of a step; it has no history."""
    if torch.compiler.is_compiling():
        return torch.ops._c10d_functional.wait_tensor(send(move, buffer))  # type: ignore[no-any-return]
    # torch records the history of these ops in Python: a tenth of the processor time of a small forward.
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops._c10d_functional.wait_tensor(send(move, buffer))  # type: ignore[no-any-return]


def send(move: LocalStep, buffer: Tensor) -> Tensor:
    """Start the collective of a step on its flat buffer; the result must not be read before `wait_tensor`."""
    moved = move.kind in (StepKind.ALL_GATHER, StepKind.ALL_TO_ALL)
    if moved and not is_known(buffer.dtype, gathered=move.kind is StepKind.ALL_GATHER):
        size = buffer.element_size()
        sent_sizes, received = (tuple(size * count for count in counts) for counts in (move.sent, move.received))
        return send(replace(move, sent=sent_sizes, received=received), as_bytes(buffer)).view(buffer.dtype)
    return SENDERS[move.kind](move, buffer)


def _all_reduce(move: LocalStep, buffer: Tensor) -> Tensor:
    level = move.level_of(buffer.numel() * buffer.element_size())
    if level is not None and not buffer.is_complex():  # Gloo scatters no complex numbers
        return sum_by_level(buffer, level)
    sent: Tensor = torch.ops._c10d_functional.all_reduce(buffer, "sum", move.group)
    return sent


def _all_gather(move: LocalStep, buffer: Tensor) -> Tensor:
    return begin_gather(buffer, move.ranks, move.group)


def _reduce_scatter(move: LocalStep, buffer: Tensor) -> Tensor:
    sent: Tensor = torch.ops._c10d_functional.reduce_scatter_tensor(buffer, "sum", move.ranks, move.group)
    return sent


def _all_to_all(move: LocalStep, buffer: Tensor) -> Tensor:
    ops = torch.ops._c10d_functional
    sent: Tensor = ops.all_to_all_single(buffer, list(move.received), list(move.sent), move.group)
    return sent


# The function that starts each collective; the library of the process group chooses its algorithm.
SENDERS: Mapping[StepKind, Callable[[LocalStep, Tensor], Tensor]] = {
    StepKind.ALL_REDUCE: _all_reduce,
    StepKind.ALL_GATHER: _all_gather,
    StepKind.REDUCE_SCATTER: _reduce_scatter,
    StepKind.ALL_TO_ALL: _all_to_all,
}


def send_all(move: LocalStep, buffers: list[Tensor]) -> list[Tensor]:
    """Start one collective on several flat buffers, or one on each."""
    ops = torch.ops._c10d_functional
    sent: list[Tensor]
    gathers = move.kind is StepKind.ALL_GATHER
    are_apart = gathers and all(buffer.is_cpu for buffer in buffers)  # see `begin_gather`
    if len(buffers) == 1 or are_apart or not all(is_known(buffer.dtype, gathered=True) for buffer in buffers):
        return [send(move, buffer) for buffer in buffers]
    if gathers:
        sent = ops.all_gather_into_tensor_coalesced(buffers, move.ranks, move.group)
    else:
        assert move.kind is StepKind.REDUCE_SCATTER, f"{move.kind} is for one buffer"
        sent = ops.reduce_scatter_tensor_coalesced(buffers, "sum", move.ranks, move.group)
    return sent


# -- messages of lowered ops -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _HaloExchange:
    """Halo exchange on this rank: returns the part of the input that its part of the output reads."""

    stretch: HaloStretch
    own: int
    # Places of the ranks of the group; none if nothing is sent.
    members: tuple[int, ...]
    group: str

    def __call__(self, x: Tensor) -> Tensor:
        dim, own = self.stretch.dim, self.own
        kept = {own: x.narrow(dim, *self.stretch.shared(own, own))}
        if self.members:
            kept |= self._received(x)
        # Empty parts too: a rank that gets nothing has gradients to receive, so the exchange must be in its graph.
        return torch.cat([kept[place] for place in sorted(kept)], dim) if len(kept) > 1 else kept[own]

    def _received(self, x: Tensor) -> dict[int, Tensor]:
        dim, own, others = self.stretch.dim, self.own, [place for place in self.members if place != self.own]
        line = prod(size for i, size in enumerate(x.shape) if i != dim)
        given = {place: self.stretch.shared(own, place) for place in others} | {own: (0, 0)}
        taken = {place: self.stretch.shared(place, own)[1] for place in others} | {own: 0}
        flat = torch.cat([x.narrow(dim, *given[place]).reshape(-1) for place in self.members])
        sent = [given[place][1] * line for place in self.members]
        received = [taken[place] * line for place in self.members]
        parts = _AllToAll.apply(flat, received, sent, self.group).split(received)  # type: ignore[no-untyped-call]
        shapes = {place: (*x.shape[:dim], taken[place], *x.shape[dim + 1 :]) for place in others}
        found = zip(self.members, parts, strict=True)
        return {place: part.reshape(shapes[place]) for place, part in found if place != own}


@dataclass(frozen=True)
class _OrderExchange:
    """Change of the order of a split sequence, on this rank."""

    message: OrderExchange
    own: Mapping[str, int]
    # Coordinates of the ranks of the group, in their order.
    members: tuple[Mapping[str, int], ...]
    group: str

    def __call__(self, x: Tensor) -> Tensor:
        message, dim = self.message, self.message.dim
        # Both orders are ascending once the odd pieces of a folded shard are reversed.
        x = x if message.to_folded else fold(x, dim, message.pieces)
        held, wanted = (message.ranges(self.own, folded) for folded in (not message.to_folded, message.to_folded))
        # By member: the positions that it gets from here, and those that it sends.
        given = [common(held, message.ranges({**self.own, **one}, message.to_folded)) for one in self.members]
        taken = [common(message.ranges({**self.own, **one}, not message.to_folded), wanted) for one in self.members]
        line = prod(size for i, size in enumerate(x.shape) if i != dim)
        sent, received = ([line * sum(count for _, count in one) for one in each] for each in (given, taken))
        flat = torch.cat([_at(x, dim, held, one).reshape(-1) for one in given])
        parts = _AllToAll.apply(flat, received, sent, self.group).split(received)  # type: ignore[no-untyped-call]
        found: list[tuple[int, Tensor]] = []
        for part, ranges in zip(parts, taken, strict=True):
            opened = part.reshape(*x.shape[:dim], sum(count for _, count in ranges), *x.shape[dim + 1 :])
            pieces = opened.split([count for _, count in ranges], dim) if ranges else ()
            found += zip((begin for begin, _ in ranges), pieces, strict=True)
        ordered = [piece for _, piece in sorted(found, key=lambda pair: pair[0])]
        result = torch.cat(ordered, dim) if ordered else parts[0].reshape(*x.shape[:dim], 0, *x.shape[dim + 1 :])
        return fold(result, dim, message.pieces) if message.to_folded else result


def _at(x: Tensor, dim: int, held: Ranges, wanted: Ranges) -> Tensor:
    """Return some positions of a shard that holds these, ascending."""
    found, before = [x.narrow(dim, 0, 0)], 0
    for begin, count in held:
        found += [x.narrow(dim, before + first - begin, number) for first, number in common(((begin, count),), wanted)]
        before += count
    return torch.cat(found, dim)


class _AllToAll(torch.autograd.Function):
    """Differentiable all-to-all; the gradient takes the reverse way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int], sent: list[int], group: str) -> Tensor:
        ctx.way = sent, received, group
        ops = torch.ops._c10d_functional
        known = is_known(x.dtype, gathered=False)
        given, size = (x.contiguous(), 1) if known else (as_bytes(x.contiguous()), x.element_size())
        sizes = ([size * count for count in counts] for counts in (received, sent))
        exchanged: Tensor = ops.wait_tensor(ops.all_to_all_single(given, *sizes, group))
        return exchanged if known else exchanged.view(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _AllToAll.apply(gradient, *ctx.way), None, None, None  # type: ignore[no-untyped-call]


def bind_message(message: OpMessage, groups: Groups) -> Send | LocalKeyRing:
    """Bind a message to this rank; all ranks bind the same messages, in the same order."""
    if isinstance(message, RingPass):
        return LocalKeyRing.bind(message, groups)
    if isinstance(message, HaloExchange):
        return _edges(message, groups)
    if isinstance(message, OrderExchange):
        group = groups.of(message.axes)
        return _OrderExchange(message, groups.coordinate, group.members, group.name)
    if isinstance(message, Maximum | BareSum):
        return _reduction(message, "max" if isinstance(message, Maximum) else "sum", groups)
    return LocalReshard.bind(message.reshard, groups)


def _edges(message: HaloExchange, groups: Groups) -> Send:
    stretch = message.stretch
    own = stretch.place(groups.coordinate)
    if not message.reshard.forward:
        return _HaloExchange(stretch, own, (), "")
    group = groups.of(stretch.axes)
    return _HaloExchange(stretch, own, tuple(map(stretch.place, group.members)), group.name)


def _reduction(message: OpMessage, kind: Literal["max", "sum"], groups: Groups) -> Send:
    bound = [groups.of(step.axes).name for step in message.reshard.forward]
    ops = torch.ops._c10d_functional

    def send(x: Tensor) -> Tensor:
        for group in bound if x.numel() else ():
            x = ops.wait_tensor(ops.all_reduce(x.contiguous(), kind, group))
        return x

    return send


# -- dtypes that are sent ----------------------------------------------------------------------------------------------


_KNOWN = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
)
_COMPLEX = (torch.complex128, torch.complex64)

# Dtypes that no library sums, and the dtypes that they are summed in.
SUMMED: Mapping[torch.dtype, torch.dtype] = {
    torch.bool: torch.int32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,  # wraps around as it does
    torch.complex32: torch.complex64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
}


def is_known(dtype: torch.dtype, gathered: bool) -> bool:
    """Return whether a dtype is sent unchanged; complex numbers only where they are gathered."""
    return dtype in _KNOWN or (gathered and dtype in _COMPLEX)


def as_bytes(buffer: Tensor) -> Tensor:
    return buffer.view(torch.uint8)


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums of a dtype are sent."""
    return SUMMED.get(dtype, dtype)


def summed_together(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return one dtype for several sums: their own, or one that holds the values of all."""
    found = {summed_in(dtype) for dtype in dtypes}
    if len(found) == 1:
        return found.pop()
    # Counts are exact in float64 below 2**53.
    return torch.complex128 if any(dtype.is_complex for dtype in found) else torch.float64


def restored(total: Tensor, dtype: torch.dtype, copy: bool = False) -> Tensor:
    """Cast a sum back to the dtype of its terms."""
    value = total.real if total.is_complex() and not dtype.is_complex else total
    return value.to(dtype, copy=copy)
