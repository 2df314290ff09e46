"""The legal choices of an op: its use of each mesh axis, and the shardings of its tensors that follow.

An axis that splits a factor: operands with the factor are split. Operands without it are broadcast, because each shard
gives a term of their gradient. Results are split, or partial where the op sums over the factor. A bias that is added to
such a sum is a partial sum itself: one rank keeps it.

An axis that splits nothing: operands and results are replicated. Or all are broadcast, so that gradients are summed
further up. Or the operands in which the op is linear are partial sums and the others broadcast, so that the sum is made
further down. The others must be finite (autopar/ir/analysis/finite.py): with infinite ones, terms of unlike sign would
give NaN where the sum gives infinity.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, permutations, product, zip_longest
from math import prod
from operator import mul

import torch

from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode, NamedTensor
from autopar.mesh import SubMesh
from autopar.rules.notation import FactorKind, Operand
from autopar.rules.ops.routed import COMBINE
from autopar.sharding.lowered_ops import lowered_op_of
from autopar.sharding.lowered_ops.ring_attention import MASK, rows_beside
from autopar.sharding.sharding import MICRO, Sharding, atoms_of, splits_evenly

SPLITTABLE = (FactorKind.PARALLEL, FactorKind.SUM, FactorKind.MEAN)

# A factor and one of its atoms.
Site = tuple[str, int]

# Positions of the operands that are partial sums along an axis that splits nothing; all others are broadcast.
Passing = frozenset[int]

BROADCAST: Passing = frozenset()

# Sites that these axes, together, may split in pieces of different lengths.
Uneven = Collection[tuple[Site, tuple[str, ...]]]


@dataclass(frozen=True)
class Choice:
    """Axes that split each atom of a factor, major to minor, and the passing of axes that split nothing."""

    splits: tuple[tuple[Site, tuple[str, ...]], ...] = ()
    passes: tuple[tuple[str, Passing], ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that split something, each once."""
        return tuple(dict.fromkeys(axis for _, axes in self.splits for axis in axes))

    def of(self, site: Site) -> tuple[str, ...]:
        return dict(self.splits).get(site, ())

    def __str__(self) -> str:
        parts = [f"{factor}{f'.{atom}' if atom else ''} -> {'*'.join(axes)}" for (factor, atom), axes in self.splits]
        for axis, summed in self.passes:
            parts.append(f"{'+'.join(map(str, sorted(summed)))} partial({axis})" if summed else f"broadcast({axis})")
        return ", ".join(parts)


def sites_of(node: NamedNode, operand: Operand | None, tensor: NamedTensor) -> tuple[Site | None, ...] | None:
    """Return the site of each atom of a tensor, None if the op unfolds it otherwise."""
    if operand is None:
        return None
    sites: list[Site | None] = []
    for dim, term in enumerate(operand.terms):
        own = [atom.size for atom in tensor.atoms if atom.dim == dim]
        found = [(factor, i) for factor in term for i in range(len(node.atoms.get(factor, ())))]
        # Most dims are one atom of one factor, whatever their sizes: a window makes the output shorter.
        if len(found) == len(own) == 1:
            sites.append(found[0])
        else:
            sites.extend(_matched(own, [(site, node.atoms[site[0]][site[1]]) for site in found]))
    return tuple(sites)


def _matched(own: list[int], found: list[tuple[Site, int]]) -> list[Site | None]:
    """Return the sites of atoms that equal those of the op up to size 1."""
    if own == [extent for _, extent in found]:
        return [site for site, _ in found]
    long = [(site, extent) for site, extent in found if extent != 1]
    if [size for size in own if size != 1] != [extent for _, extent in long]:
        return [None] * len(own)
    sites = iter(site for site, _ in long)
    return [None if size == 1 else next(sites) for size in own]


def choices(
    node: NamedNode,
    candidates: Mapping[str, Iterable[Site]],
    axes: SubMesh,
    uneven: Uneven = (),
    passing: Mapping[str, Iterable[Passing]] | None = None,
) -> Iterator[Choice]:
    """Yield all choices that give each axis a candidate site, a passing, or nothing.

    Axes that split one site do so in every order; the order of the mesh comes first. An axis that splits the keys of
    attention splits the rows too.
    """
    passing = passing or {}
    names = [axis for axis in axes if axis in candidates or axis in passing]
    if MICRO in names and (node.rule.localise or node.rule.lowerings) and not any(node.operands):
        names.remove(MICRO)  # positions along the batch, as `arange` gives: each micro-batch takes its part of them
    options: list[list[Site | Passing | None]] = [
        [None, *dict.fromkeys(candidates.get(name, ())), *dict.fromkeys(passing.get(name, ()))] for name in names
    ]
    for picked in product(*options):
        splits: dict[Site, tuple[str, ...]] = {}
        # Sites of keys, with their axes: they follow the order of the rows.
        keys: dict[Site, tuple[str, ...]] = {}
        for axis, way in zip(names, picked, strict=True):
            if isinstance(way, tuple):
                rows = rows_beside(node, way)
                if rows is not None:
                    keys[way] = (*keys.get(way, ()), axis)
                    way = rows
                splits[way] = (*splits.get(way, ()), axis)
        if any(MICRO in axes for axes in keys.values()):
            continue
        passes = tuple((axis, way) for axis, way in zip(names, picked, strict=True) if isinstance(way, frozenset))
        sites = sorted(splits)
        for orders in product(*(_orders(splits[site]) for site in sites)):
            ordered = dict(zip(sites, orders, strict=True))
            for site, used in keys.items():
                along = ordered[rows_beside(node, site) or site]
                ordered[site] = tuple(axis for axis in along if axis in used)
            choice = Choice(tuple((site, ordered[site]) for site in sorted(ordered)), passes)
            if all(can_split(node, site, used, axes, (site, used) in uneven) for site, used in choice.splits):
                yield choice


def _orders(axes: tuple[str, ...]) -> Iterable[tuple[str, ...]]:
    """Return the orders of axes that split one site; a micro-batch has rows of all ranks, so its axis is major."""
    if MICRO not in axes:
        return permutations(axes)
    return ((MICRO, *rest) for rest in permutations(axis for axis in axes if axis != MICRO))


def can_split(node: NamedNode, site: Site, used: tuple[str, ...], axes: SubMesh, uneven: bool = False) -> bool:
    """Return whether these axes together may split an atom of a factor of an op."""
    factor, atom = site
    kind = node.rule.kinds.get(factor)
    if atom >= len(node.atoms.get(factor, ())) or site in node.fixed:
        return False
    lowering = lowered_op_of(node, factor)
    if lowering is not None and not lowering.allows(node, factor, atom):
        return False
    if lowering is None and kind not in SPLITTABLE:
        return False
    by_offset = node.rule.lowering(factor) is not None or "diagonal" in node.rule.localise
    if by_offset and atom != 0:
        return False  # positions are counted from the first one of the shard, so a shard must be contiguous
    extents = [node.atoms[factor][atom]]
    if kind is FactorKind.HALO:
        extents.append(node.sizes[factor])  # the extent of the output
    if site in node.by_share and axes.shares is not None and axes.shares.along(used) is not None:
        if rows_beside(node, site) is not None:
            return False  # a message has the keys of one length
        # Neighbours exchange the edges of even pieces.
        is_tried = node.source != "discovered" and kind is not FactorKind.HALO
        return is_tried and splits_evenly(extents[0], used, axes, by_share=True)
    count = prod(axes[axis] for axis in used)
    # A discovered rule was tried on even pieces only; of routed rows each rank has as many groups.
    uneven = uneven and node.source != "discovered" and site not in group_sites(node)
    return all(extent % count == 0 for extent in extents) or uneven


def group_sites(node: NamedNode) -> tuple[Site, ...]:
    """Return the sites of the groups of routed rows; none for an op without."""
    rows = node.rule.operands[0] if node.op == str(COMBINE) else node.rule.outputs[0]
    if not node.routed or rows is None:
        return ()
    sites = [(factor, i) for factor in rows.terms[0] for i in range(len(node.atoms[factor]))]
    counts = accumulate((node.atoms[factor][i] for factor, i in sites), mul)
    return tuple(site for site, count in zip(sites, counts, strict=True) if count <= node.routed)


def passings_of(graph: NamedGraph, node: NamedNode) -> tuple[Passing, ...]:
    """Return the passings that an op allows an axis that splits nothing of it."""
    tensors = [None if name is None else graph.tensors[name] for name in node.operands]
    found = [BROADCAST] if any(tensor is not None and tensor.requires_grad for tensor in tensors) else []
    results = [graph.tensors[name] for name in node.outputs if name is not None]
    if any(tensor.dtype is torch.bool for tensor in results):
        return tuple(found)  # booleans have no sum
    for group in node.rule.linear:
        present = [tensors[i] for i in group if i < len(tensors)]
        numbers = all(tensor is not None and tensor.dtype is not torch.bool for tensor in present)
        if numbers and frozenset(group) in graph.passable_sums[node.name]:
            found.append(frozenset(group))
    return tuple(found)


def shardings_of(
    graph: NamedGraph, node: NamedNode, choice: Choice
) -> tuple[tuple[Sharding | None, ...], tuple[Sharding | None, ...]] | None:
    """Return the shardings of operands and results under a choice, None if infeasible."""
    return OpShardings(graph, node).under(choice)


@dataclass(frozen=True, eq=False)
class _OpTensor:
    """Operand or result of an op that is a tensor."""

    tensor: NamedTensor
    # Of an operand.
    position: int | None
    # None where the rule does not name the tensor: each rank needs all of it.
    factors: frozenset[str] | None
    # Of each atom, None if the op unfolds the tensor otherwise.
    sites: tuple[Site | None, ...] | None


class OpShardings:
    """Shardings of the operands and results of one op under its choices."""

    def __init__(self, graph: NamedGraph, node: NamedNode) -> None:
        self.node = node
        self.passable = graph.passable_sums[node.name]

        def made(operand: Operand | None, name: str | None, position: int | None) -> _OpTensor | None:
            tensor = None if name is None else graph.tensors[name]
            if tensor is None:
                return None
            factors = None if operand is None else frozenset(operand.factors)
            return _OpTensor(tensor, position, factors, sites_of(node, operand, tensor))

        # A call may leave out the last operands of its rule, and may pass tensors that the rule does not name.
        taken = list(zip_longest(node.rule.operands, node.operands))[: len(node.operands)]
        self.operands = [made(*each, position) for position, each in enumerate(taken)]
        results = zip(node.rule.outputs, node.outputs, strict=True)
        self.outputs = [None if operand is None else made(operand, name, None) for operand, name in results]

    def under(self, choice: Choice) -> tuple[tuple[Sharding | None, ...], tuple[Sharding | None, ...]] | None:
        """Return those of a choice, None if infeasible."""
        if any(way and way not in self.passable for _, way in choice.passes):
            return None
        found: list[Sharding | None] = []
        for one in (*self.operands, *self.outputs):
            found.append(None if one is None else self._sharding(one, choice))
            if one is not None and found[-1] is None:
                return None
        return tuple(found[: len(self.operands)]), tuple(found[len(self.operands) :])

    def _sharding(self, one: _OpTensor, choice: Choice) -> Sharding | None:
        node, tensor, position = self.node, one.tensor, one.position
        if one.factors is None:
            return Sharding.replicated(atoms_of(tensor))
        if one.sites is None and choice.splits:
            return None
        if position == MASK and any(rows_beside(node, site) is not None for site, _ in choice.splits):
            # Keys pass by, and each rank has the mask of its rows for all of them. A kernel gives it no gradient.
            if tensor.requires_grad:
                return None
            choice = replace(choice, splits=tuple(pair for pair in choice.splits if rows_beside(node, pair[0]) is None))
        used = dict(choice.splits)
        splits = (
            tuple(() if site is None else used.get(site, ()) for site in one.sites)
            if one.sites is not None
            else ((),) * len(tensor.atoms)
        )
        partial: set[str] = set()
        broadcast: set[str] = set()
        own = {axis for split in splits for axis in split}
        for (factor, _), axes_used in choice.splits:
            # Some axes of the rows may split the keys too.
            axes = [axis for axis in axes_used if axis not in own]
            if not axes:
                continue
            if factor in one.factors:
                return None  # the tensor has the factor, but not the atom that is split
            if position is None:
                if lowered_op_of(node, factor) is not None:
                    continue  # its own collectives give the sum to all ranks
                if node.rule.kinds[factor] is FactorKind.PARALLEL:
                    return None
                if tensor.dtype is torch.bool or (len(node.outputs) > 1 and node.rule.kinds[factor] is FactorKind.MEAN):
                    return None  # booleans have no sum; a mean beside other results has no weight of its own
                partial.update(axes)
            elif node.rule.kinds[factor] is FactorKind.SUM and position in node.rule.added_operands(factor):
                partial.update(axes)
            else:
                broadcast.update(axes)
        for axis, summed in choice.passes:
            is_sum = position in summed if position is not None else bool(summed)
            (partial if is_sum else broadcast).add(axis)
        return Sharding(splits, frozenset(partial), frozenset(broadcast if tensor.requires_grad else ()))
