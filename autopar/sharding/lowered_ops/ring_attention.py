"""Attention over split keys: keys and values pass from rank to rank, beside the products of the last ones.

An axis that splits the keys splits the rows as well, so it stands for the pair (rows, keys). Each rank sends the keys
and values of one rank in each hop, in one message; in the backward their gradients follow them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

from autopar.ir.analysis.contractions import ATTENTION
from autopar.ir.values import NamedNode
from autopar.mesh import SubMesh
from autopar.rules.ops.folded import FOLDED_ATTENTION
from autopar.rules.shard_call.key_blocks import HopWork, Stretches, hop_works, shard_stretches
from autopar.rules.shard_call.local_call import FactorSlice, LocalCall
from autopar.rules.shard_call.ring import KeyRing, RingShard, attend_ring
from autopar.sharding.lowered_ops.base import LoweredOpContext, OpMessage
from autopar.sharding.reshard.reshard import Reshard, Step, StepKind
from autopar.sharding.sharding import Atoms, Sharding, piece

# Operands of attention; the fourth is a mask.
KEY, VALUE, MASK = 1, 2, 3

_Site = tuple[str, int]
_Splits = tuple[tuple[_Site, tuple[str, ...]], ...]


def rows_beside(node: NamedNode, site: _Site) -> _Site | None:
    """Return the site of the rows that the axes of a site of keys split too; None for all other sites."""
    factor, atom = site
    if factor != "t" or node.op not in LOWERED_OPS or node.source != "table" or node.rule.random:
        return None
    rows, keys = node.atoms.get("s", ()), node.atoms.get("t", ())
    if node.op == str(FOLDED_ATTENTION):
        # Pieces, and positions in a piece.
        pieces = node.atoms.get("f", ())
        return ("s", 0) if len(rows) == 1 and keys == (*pieces, *rows) and atom == 1 else None
    if len(rows) == len(keys) == 1:
        return "s", 0
    # Without an order, rows and keys may have parts.
    is_ordered = node.rule.lowering("s") is not None
    return ("s", atom) if rows == keys and atom == len(keys) - 1 and not is_ordered else None


@dataclass(frozen=True)
class RingPass(OpMessage):
    """Message with the keys and values of one rank, to the next rank in each hop."""

    axes: tuple[str, ...]
    # Coordinates along the axes of each place.
    places: tuple[tuple[int, ...], ...]
    works: tuple[HopWork, ...]

    @property
    def operand(self) -> int:
        return KEY

    @property
    def beside(self) -> tuple[float, ...]:
        total = sum(work.pairs for work in self.works)
        return tuple(work.pairs / max(total, 1) for work in self.works)

    def place(self, coordinate: Mapping[str, int]) -> int:
        """Return the place of the rank at these coordinates."""
        return self.places.index(tuple(coordinate[axis] for axis in self.axes))


class RingAttention:
    """Attention whose rows and keys are split by the same axes."""

    def takes(self, node: NamedNode, factor: str) -> bool:
        return any(rows_beside(node, (factor, atom)) is not None for atom in range(len(node.atoms.get(factor, ()))))

    def allows(self, node: NamedNode, factor: str, atom: int) -> bool:
        return rows_beside(node, (factor, atom)) is not None

    def messages(self, split: LoweredOpContext) -> tuple[OpMessage, ...]:
        (axes,) = split.factors.values()
        found = [split.operands[i] for i in (KEY, VALUE)]
        numel = sum(prod(one.shape) for one in found if one is not None)
        trained = any(one is not None and one.differentiable for one in split.operands[: VALUE + 1])
        hops = prod(split.mesh[axis] for axis in axes) - 1
        whole = Sharding(((),))
        steps = [
            Step(StepKind.RING_PASS, axes, 0, whole, whole, numel=times * hops * numel, sent_numel=times * hops * numel)
            for times in (1, 2)
        ]
        forward, backward = ((step,) if hops else () for step in steps)
        reshard = Reshard(Atoms.plain([numel]), split.mesh, whole, whole, forward, backward)
        works = ring_works(split.node, split.splits, split.mesh)
        return (RingPass(reshard, split.dtype.itemsize, trained, axes, _places(axes, split.mesh), works),)

    def run(
        self, split: LoweredOpContext, local: LocalCall, pieces: Mapping[str, FactorSlice], sends: tuple[KeyRing, ...]
    ) -> Any:
        given = local.arguments
        (ring,) = sends
        operands = given["query"], given["key"], given["value"], given.get("attn_mask")
        shard = ring_shard(split.node, split.splits, split.mesh, split.at)
        shard = replace(shard, keys=shard.keys[: ring.most_places])
        return attend_ring(*operands, given["scale"], bool(given["enable_gqa"]), shard, ring)


def _places(axes: tuple[str, ...], mesh: SubMesh) -> tuple[tuple[int, ...], ...]:
    return tuple(product(*(range(mesh[axis]) for axis in axes)))


def ring_shard(node: NamedNode, splits: _Splits, mesh: SubMesh, at: Mapping[str, int]) -> RingShard:
    """Return the positions of the rows of a rank, and those of the keys of each place of its ring."""
    axes_of = dict(splits)
    ((keys, axes),) = ((site, used) for site, used in splits if site[0] == "t")
    rows = rows_beside(node, keys)
    assert rows is not None, f"{node.name} splits {keys}"
    row_slice = piece(node.atoms[rows[0]][rows[1]], axes_of[rows], mesh, at, by_share=False)
    length = node.atoms["t"][keys[1]]
    slices = [
        piece(length, axes, mesh, {**at, **dict(zip(axes, place, strict=True))}, by_share=False)
        for place in _places(axes, mesh)
    ]
    return _shard(node, prod(node.atoms["t"][: keys[1]]), (node.atoms["s"][rows[1]], *row_slice), length, slices)


def _shard(
    node: NamedNode, pieces: int, rows: tuple[int, int, int], length: int, slices: list[tuple[int, int]]
) -> RingShard:
    window = 0
    if node.op == str(FOLDED_ATTENTION):
        band = None if node.attention is None else node.attention.band
        window = 0 if band is None or band.left is None else band.left + 1
        is_causal = True
    else:
        is_causal = node.rule.lowering("s") is not None

    def stretches(extent: int, start: int, count: int) -> Stretches:
        return shard_stretches(pieces, extent, start, count)

    columns = tuple(tuple((part * length + start, count) for part in range(pieces)) for start, count in slices)
    keys = tuple(stretches(length, start, count) for start, count in slices)
    return RingShard(stretches(*rows), keys, is_causal, window, columns)


def ring_works(node: NamedNode, splits: _Splits, mesh: SubMesh) -> tuple[HopWork, ...]:
    """Return the work of the last rank, the busiest in a plain order, on its own keys and on those of each hop."""
    shard = ring_shard(node, splits, mesh, {axis: size - 1 for axis, size in mesh.items()})
    ((_, axes),) = ((site, used) for site, used in splits if site[0] == "t")
    count = prod(mesh[axis] for axis in axes)
    keys = tuple(shard.keys[(count - 1 - hop) % count] for hop in range(count))
    return hop_works(shard.rows, keys, shard.causal, shard.window)


LOWERED_OPS = {ATTENTION: RingAttention(), str(FOLDED_ATTENTION): RingAttention()}
