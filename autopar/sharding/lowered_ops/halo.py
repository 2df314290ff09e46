"""Convolutions and pooling over split dims: shards receive the edges that they need from their neighbours.

The output of a shard reads a stretch of the input. The stretch joins the own shard with the edges of others, one split
dim after the other, so that corners are included. It is padded outside of the image, and the op itself then pads no
more. Where a window reaches further than the next shard, the shards after it send as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from autopar.ir.values import NamedNode
from autopar.rules.call import takes_tensors
from autopar.rules.notation import FactorKind, Halo
from autopar.rules.shard_call.local_call import FactorSlice, LocalCall, amounts, nothing
from autopar.rules.shard_call.windows import WindowReach, numeric_padding, padded, reach, unpadded
from autopar.sharding.lowered_ops.base import LoweredOpContext, OpMessage, Send, dims_of
from autopar.sharding.reshard.reshard import Reshard, Step, StepKind
from autopar.sharding.sharding import Atoms, Sharding, chunk


class Window:
    """Op that slides windows along split dims."""

    def takes(self, node: NamedNode, factor: str) -> bool:
        operand, output = node.rule.operands[0], node.rule.outputs[0]
        alone = operand is not None and (factor,) in operand.terms and output is not None and (factor,) in output.terms
        return node.rule.kinds[factor] is FactorKind.HALO and node.rule.halo(factor) is not None and alone

    def allows(self, node: NamedNode, factor: str, atom: int) -> bool:
        return len(node.atoms[factor]) == 1

    def messages(self, split: LoweredOpContext) -> tuple[OpMessage, ...]:
        return tuple(HaloExchange.of(split, stretch) for stretch in _stretches(split))

    def run(
        self, split: LoweredOpContext, local: LocalCall, pieces: Mapping[str, FactorSlice], sends: tuple[Send, ...]
    ) -> Any:
        stretches = _stretches(split)
        dims = [stretch.dim for stretch in stretches]
        local = numeric_padding(local, dims)
        name = "input" if "input" in local.arguments else "self"
        read: Tensor = local.arguments[name]
        # One split dim after the other, so that corners come with the edges of earlier dims.
        for send in sends:
            read = send(read)
        local = unpadded(local, dims)
        reaches = [(stretch.dim, stretch.reach(stretch.place(split.at))) for stretch in stretches]
        made = {stretch.factor: stretch.made(stretch.place(split.at))[1] for stretch in stretches}
        shape = replace(local, local_sizes={**local.local_sizes, **made}).output_shape()
        # A rank whose piece of the output is empty still takes part in the exchange above.
        if 0 in shape:
            given = local.with_arguments(**{name: read}).arguments.values()
            return nothing(shape, split.dtype, [value for value in given if isinstance(value, Tensor)])

        def result(read: Tensor, call: LocalCall) -> Any:
            for dim, part in reaches:
                read = padded(call, read, dim, part.before, part.after)
            return _filled(call.with_arguments(**{name: read})).run()

        if "window_mean" not in [split.node.rule.lowering(stretch.factor) for stretch in stretches]:
            return result(read, local)
        # A mean that leaves the padding out: sums divided by counts, both with zeros as padding.
        local = local.with_arguments(count_include_pad=True)
        return result(read, local) / result(torch.ones_like(read, requires_grad=False), local)


def _filled(local: LocalCall) -> LocalCall:
    """Return the call with a channel of zeros where the rank has no channel of the sum."""
    filled = {}
    assert isinstance(local.op, torch._ops.OpOverload), local.op
    for name, operand in zip(takes_tensors(local.op), local.rule.operands, strict=False):
        value = local.arguments[name]
        added = amounts(operand, local.local_sizes) if isinstance(value, Tensor) and operand is not None else []
        if added:
            filled[name] = torch.constant_pad_nd(value, added)
    return local.with_arguments(**filled) if filled else local


@dataclass(frozen=True)
class HaloStretch:
    """Split dim with its global extents in the input and the output."""

    factor: str
    dim: int
    halo: Halo
    axes: tuple[str, ...]
    sizes: tuple[int, ...]  # of the axes
    extent: int
    made_extent: int

    @property
    def count(self) -> int:
        return prod(self.sizes)

    def place(self, coordinate: Mapping[str, int]) -> int:
        """Return the number of the piece of the rank at these coordinates."""
        found = 0
        for axis, size in zip(self.axes, self.sizes, strict=True):
            found = found * size + coordinate[axis]
        return found

    def held(self, place: int) -> tuple[int, int]:
        """Return the piece of the input at a place."""
        return self._piece(self.extent, place)

    def made(self, place: int) -> tuple[int, int]:
        """Return the piece of the output at a place."""
        return self._piece(self.made_extent, place)

    def _piece(self, extent: int, place: int) -> tuple[int, int]:
        cuts = []
        for size in reversed(self.sizes):
            place, index = divmod(place, size)
            cuts.append((size, index))
        start = 0
        for size, index in reversed(cuts):
            offset, extent = chunk(extent, size, index)
            start += offset
        return start, extent

    def reach(self, place: int) -> WindowReach:
        """Return the stretch of the input that a piece of the output reads."""
        start, length = self.made(place)
        return reach(self.halo, start, start + length, self.extent) if length else WindowReach(0, 0, 0, 0)

    def shared(self, holder: int, reader: int) -> tuple[int, int]:
        """Return start and length of the part of an input piece that an output reads."""
        return _overlap(self.held(holder), self.reach(reader))


def _overlap(piece: tuple[int, int], part: WindowReach) -> tuple[int, int]:
    """Return start and length within a piece of the part of it that is read."""
    start, length = piece
    first, last = max(start, part.first), min(start + length, part.last)
    return (first - start, last - first) if last > first else (0, 0)


def _stretches(split: LoweredOpContext) -> tuple[HaloStretch, ...]:
    found = []
    for factor, dim in sorted(dims_of(split).items(), key=lambda pair: pair[1]):
        axes, halo = split.factors[factor], split.node.rule.halo(factor)
        assert halo is not None, split.node.rule
        sizes = tuple(split.mesh[axis] for axis in axes)
        found.append(HaloStretch(factor, dim, halo, axes, sizes, split.whole[dim], split.node.sizes[factor]))
    return tuple(found)


def received_share(split: LoweredOpContext) -> Mapping[str, float]:
    """Return, by split factor, the most that a shard receives, as a share of its own extent."""
    return {stretch.factor: _received(stretch) for stretch in _stretches(split)}


# Ops of one kind have many options with the same cuts.
@lru_cache(maxsize=4096)
def _received(stretch: HaloStretch) -> float:
    shares = []
    for place in range(stretch.count):
        part, (_, held) = stretch.reach(place), stretch.held(place)
        got = part.last - part.first - stretch.shared(place, place)[1]
        shares.append(got / held if held else float(got > 0))
    return max(shares)


@lru_cache(maxsize=4096)
def _most_sent(stretch: HaloStretch) -> int:
    """Return the most positions that a shard sends to others."""
    places = range(stretch.count)
    held, read = [stretch.held(place) for place in places], [stretch.reach(place) for place in places]
    return max(
        sum(_overlap(piece, part)[1] for reader, part in enumerate(read) if reader != place)
        for place, piece in enumerate(held)
    )


@lru_cache(maxsize=4096)
def _most_read(stretch: HaloStretch) -> int:
    """Return the most positions that a piece of the output reads."""
    read = [stretch.reach(place) for place in range(stretch.count)]
    return max(part.last - part.first for part in read)


# -- the exchange -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HaloExchange(OpMessage):
    """Message that sends the edges of shards along one split dim."""

    stretch: HaloStretch

    @classmethod
    def of(cls, split: LoweredOpContext, stretch: HaloStretch) -> HaloExchange:
        """Return the exchange along one split dim."""
        # Edges are exchanged dim by dim, so the dims before this one have theirs already.
        shape = list(split.shape)
        for other in _stretches(split):
            if other.dim < stretch.dim:
                shape[other.dim] = _most_read(other)
        line = prod(shape[: stretch.dim] + shape[stretch.dim + 1 :])
        most = _most_sent(stretch)
        shape[stretch.dim] = stretch.extent
        sharding = Sharding(tuple(stretch.axes if dim == stretch.dim else () for dim in range(len(shape))))
        kind, dim = StepKind.HALO_EXCHANGE, stretch.dim
        step = Step(kind, stretch.axes, dim, sharding, sharding, numel=line * most, sent_numel=line * most)
        steps = (step,) if most else ()
        found = Reshard(Atoms.plain(shape), split.mesh, sharding, sharding, steps, steps)
        return cls(found, split.dtype.itemsize, split.differentiable, stretch)


LOWERED_OPS = {
    **{f"aten.conv{n}d.{overload}": Window() for n in (1, 2, 3) for overload in ("default", "padding")},
    "aten.convolution.default": Window(),
    **{f"aten.{kind}_pool{n}d.default": Window() for n in (1, 2, 3) for kind in ("max", "avg")},
}
