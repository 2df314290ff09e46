"""Messages of lowered ops, bound to a rank."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from autopar.lowering.collectives.local_reshard import LocalReshard
from autopar.lowering.collectives.process_groups import Groups
from autopar.lowering.collectives.wire_dtypes import as_bytes, is_known
from autopar.sharding.lowered_ops.base import Maximum, OpMessage, Send
from autopar.sharding.lowered_ops.halo import HaloExchange, HaloStretch

__all__ = ["bind_message"]


@dataclass(frozen=True)
class _HaloExchange:
    """An exchange bound to a rank: the stretch of the input that its part of the output reads."""

    stretch: HaloStretch
    own: int
    # The places of the ranks of the group; none where nothing is sent.
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


class _AllToAll(torch.autograd.Function):
    """Its gradient goes back the way that it came."""

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


def bind_message(message: OpMessage, groups: Groups) -> Send:
    """Bind a message to this rank; all ranks bind the same messages, in the same order."""
    if isinstance(message, HaloExchange):
        return _edges(message, groups)
    if isinstance(message, Maximum):
        return _maximum(message, groups)
    return LocalReshard.bind(message.reshard, groups)


def _edges(message: HaloExchange, groups: Groups) -> Send:
    stretch = message.stretch
    own = stretch.place(groups.coordinate)
    if not message.reshard.forward:
        return _HaloExchange(stretch, own, (), "")
    group = groups.of(stretch.axes)
    return _HaloExchange(stretch, own, tuple(map(stretch.place, group.members)), group.name)


def _maximum(message: Maximum, groups: Groups) -> Send:
    bound = [groups.of(step.axes).name for step in message.reshard.forward]
    ops = torch.ops._c10d_functional

    def send(x: Tensor) -> Tensor:
        for group in bound if x.numel() else ():
            x = ops.wait_tensor(ops.all_reduce(x.contiguous(), "max", group))
        return x

    return send
