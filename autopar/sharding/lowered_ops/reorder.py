"""Fold and unfold of a split sequence: each shard sends the positions that other shards hold in the other order.

A shard of the plain order has one stretch of the sequence, a shard of the folded one a stretch of each piece. One
all-to-all takes the sequence from one order to the other, and its gradient back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from autopar.ir.values import NamedNode
from autopar.rules.notation import FactorKind
from autopar.rules.ops.folded import FOLD, UNFOLD
from autopar.rules.shard_call.folded import stretches_of
from autopar.rules.shard_call.local_call import FactorSlice, LocalCall
from autopar.sharding.lowered_ops.base import LoweredOpContext, OpMessage, Send, dims_of
from autopar.sharding.reshard.reshard import Reshard, Step, StepKind
from autopar.sharding.sharding import Atoms, Sharding, piece

# First position and number of positions, ascending.
Ranges = tuple[tuple[int, int], ...]


class Reorder:
    """Op that changes the order of a split sequence."""

    def takes(self, node: NamedNode, factor: str) -> bool:
        return node.rule.kinds[factor] is FactorKind.WHOLE and factor == "s"

    def allows(self, node: NamedNode, factor: str, atom: int) -> bool:
        return len(node.atoms[factor]) == 1

    def messages(self, split: LoweredOpContext) -> tuple[OpMessage, ...]:
        return (OrderExchange.of(split),)

    def run(
        self, split: LoweredOpContext, local: LocalCall, pieces: Mapping[str, FactorSlice], sends: tuple[Send, ...]
    ) -> Any:
        return sends[0](local.arguments["self"])


@dataclass(frozen=True)
class OrderExchange(OpMessage):
    """Message that takes a split dim from the plain order to the folded one, or back."""

    dim: int
    # Positions in a piece, and pieces.
    length: int
    pieces: int
    # Positions in a piece of each shard, by its coordinates along the axes.
    held: Mapping[tuple[int, ...], tuple[int, int]]
    axes: tuple[str, ...]
    to_folded: bool

    @classmethod
    def of(cls, split: LoweredOpContext) -> OrderExchange:
        """Return the exchange for the split of an op."""
        (dim,) = dims_of(split).values()
        (axes,) = split.factors.values()
        sharding = Sharding(tuple(axes if i == dim else () for i in range(len(split.shape))))
        numel = prod(split.shape)
        count = prod(split.mesh[axis] for axis in axes)
        sent = numel - numel // count
        step = Step(StepKind.ALL_TO_ALL, axes, dim, sharding, sharding, dim, axes, numel, sent)
        # Other dims are those of the shard.
        shape = [split.whole[i] if i == dim else size for i, size in enumerate(split.shape)]
        found = Reshard(Atoms.plain(shape), split.mesh, sharding, sharding, (step,), (step,))
        length, pieces = split.node.sizes["s"], split.node.sizes["f"]
        held = {
            tuple(at.values()): piece(length, axes, split.mesh, at, by_share=False) for at in _places(axes, split.mesh)
        }
        to_folded = split.node.op == str(FOLD)
        size = split.dtype.itemsize
        return cls(found, size, split.differentiable, dim, length, pieces, held, axes, to_folded)

    def ranges(self, coordinate: Mapping[str, int], folded: bool) -> Ranges:
        """Return the positions of a shard in one of the two orders."""
        start, count = self.held[tuple(coordinate[axis] for axis in self.axes)]
        if not folded:
            return ((start * self.pieces, count * self.pieces),)
        return tuple((one.begin, one.rows) for one in stretches_of(self.pieces, self.length, start, count))


def _places(axes: tuple[str, ...], mesh: Mapping[str, int]) -> list[dict[str, int]]:
    found: list[dict[str, int]] = [{}]
    for axis in axes:
        found = [{**at, axis: index} for at in found for index in range(mesh[axis])]
    return found


def common(held: Ranges, wanted: Ranges) -> Ranges:
    """Return the positions that are in both."""
    found = []
    for begin, count in held:
        for first, number in wanted:
            start, stop = max(begin, first), min(begin + count, first + number)
            if stop > start:
                found.append((start, stop - start))
    return tuple(found)


LOWERED_OPS = {str(FOLD): Reorder(), str(UNFOLD): Reorder()}
