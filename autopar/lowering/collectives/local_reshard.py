"""The one differentiable collective: a reshard as a function on the tensor that a rank holds.

Its forward runs the forward steps of the reshard and its backward the backward steps, so what is priced is what runs.
The collectives are the functional ones and are waited for at once, which `torch.compile` traces as one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autopar.lowering.collectives.local_steps import LocalStep, bind, finish, keep_local, prepare
from autopar.lowering.collectives.process_groups import Groups
from autopar.lowering.collectives.wire_dtypes import as_bytes, is_known, restored, summed_in
from autopar.sharding.reshard.reshard import Reshard, Step, StepKind

__all__ = ["SENDERS", "LocalReshard", "convert", "send", "send_all"]


@dataclass(frozen=True)
class LocalReshard:
    """A reshard bound to this rank; called on its local tensor.

    To be compiled it belongs in a module, whose numbers are constants to `torch.compile`. In a closure they become
    symbols as soon as the same code meets another conversion.
    """

    reshard: Reshard
    forward: tuple[LocalStep, ...]
    backward: tuple[LocalStep, ...]
    shape: tuple[int, ...]
    result_shape: tuple[int, ...]

    @classmethod
    def bind(cls, reshard: Reshard, groups: Groups) -> LocalReshard:
        """All ranks of the mesh bind the same conversions, in the same order."""
        axes = reshard.axes

        def bound(step: Step) -> LocalStep:
            if step.local:
                return bind(step, reshard, groups.coordinate, ())
            group = groups.of(step.axes)
            return replace(bind(step, reshard, groups.coordinate, group.members), group=group.name)

        shapes = [
            reshard.atoms.fold(layout.local_sizes(reshard.atoms, axes, groups.coordinate))
            for layout in (reshard.source, reshard.target)
        ]
        return cls(reshard, tuple(map(bound, reshard.forward)), tuple(map(bound, reshard.backward)), *shapes)

    def __call__(self, x: Tensor) -> Tensor:
        return convert(x, self)


def convert(x: Tensor, conversion: LocalReshard, backward: bool = False) -> Tensor:
    """The tensor in its new layout, differentiable where `x` needs a gradient; `backward` converts a gradient."""
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
        # Where nothing is done, still another tensor: a Function that gives back its input marks it as changed.
        return _run(x.view_as(x), conversion, backward)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        # Through `convert`, so that gradients of gradients come out right.
        return convert(gradient, ctx.conversion, not ctx.backward_way), None, None


def _run(x: Tensor, conversion: LocalReshard, backward: bool) -> Tensor:
    moves = conversion.backward if backward else conversion.forward
    if not moves:
        return x
    x = x.reshape(moves[0].before)
    for move in moves:
        x = keep_local(move, x) if move.local else _exchange(move, x)
    return x.reshape(conversion.shape if backward else conversion.result_shape)


def _exchange(move: LocalStep, x: Tensor) -> Tensor:
    wide = summed_in(x.dtype)
    if move.kind in (StepKind.ALL_REDUCE, StepKind.REDUCE_SCATTER) and wide != x.dtype:
        return restored(_exchange(move, x.to(wide)), x.dtype)
    buffer = prepare(move, x)
    if buffer.numel() == 0 and move.kind is not StepKind.ALL_TO_ALL:
        # The tensor itself is empty: so it is on all members of the group.
        return x.new_zeros(move.after)
    return finish(move, torch.ops._c10d_functional.wait_tensor(send(move, buffer)))


def send(move: LocalStep, buffer: Tensor) -> Tensor:
    """Start the collective of a step on its flat buffer; read the result after `wait_tensor` only."""
    moved = move.kind in (StepKind.ALL_GATHER, StepKind.ALL_TO_ALL)
    if moved and not is_known(buffer.dtype, gathered=move.kind is StepKind.ALL_GATHER):
        size = buffer.element_size()
        sent_sizes, received = (tuple(size * count for count in counts) for counts in (move.sent, move.received))
        return send(replace(move, sent=sent_sizes, received=received), as_bytes(buffer)).view(buffer.dtype)
    return SENDERS[move.kind](move, buffer)


def _all_reduce(move: LocalStep, buffer: Tensor) -> Tensor:
    sent: Tensor = torch.ops._c10d_functional.all_reduce(buffer, "sum", move.group)
    return sent


def _all_gather(move: LocalStep, buffer: Tensor) -> Tensor:
    sent: Tensor = torch.ops._c10d_functional.all_gather_into_tensor(buffer, move.ranks, move.group)
    return sent


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
    """Start one collective on several flat buffers, each as by itself."""
    ops = torch.ops._c10d_functional
    sent: list[Tensor]
    if len(buffers) == 1 or not all(is_known(buffer.dtype, gathered=True) for buffer in buffers):
        return [send(move, buffer) for buffer in buffers]
    if move.kind is StepKind.ALL_GATHER:
        sent = ops.all_gather_into_tensor_coalesced(buffers, move.ranks, move.group)
    else:
        assert move.kind is StepKind.REDUCE_SCATTER, f"{move.kind} is for one buffer"
        sent = ops.reduce_scatter_tensor_coalesced(buffers, "sum", move.ranks, move.group)
    return sent
