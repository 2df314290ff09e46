"""The legal choices of an op: what it does with each mesh axis, and the layouts that its tensors then have.

An axis that splits a factor takes the operands that have the factor split, those that lack it broadcast (each shard's
gradient is a part of theirs), and gives results that are split, or partial where the factor is summed away. A bias that
is added to such a sum is taken as a partial sum itself: one rank keeps it.

An axis that splits nothing takes and gives replicated tensors; or takes all operands broadcast and gives broadcast
results, so that the gradients are summed further up; or takes the operands in which the op is linear, together, as
partial sums and the others broadcast, and gives partial sums, so that the sum is made further down. That is for others
that cannot be infinite (autopar/ir/analysis/finite.py): terms of unlike sign would give NaN where the sum gives
infinity.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations, product, zip_longest
from math import prod

import torch

from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode, NamedTensor
from autopar.mesh import SubMesh
from autopar.rules.notation import FactorKind, Operand
from autopar.sharding.atoms import atoms_of
from autopar.sharding.lowered_ops import communicating
from autopar.sharding.sharding import Sharding

SPLITTABLE = (FactorKind.PARALLEL, FactorKind.SUM, FactorKind.MEAN)

Site = tuple[str, int]
"""A factor and one of its atoms."""

Passing = frozenset[int]
"""What an axis that splits nothing passes through: these operands are partial sums, all others are broadcast."""

BROADCAST: Passing = frozenset()

Uneven = Collection[tuple[Site, tuple[str, ...]]]
"""The sites that these axes may split in pieces of different lengths."""


@dataclass(frozen=True)
class Choice:
    """The axes that split each atom of a factor, major to minor, and what other axes pass through."""

    splits: tuple[tuple[Site, tuple[str, ...]], ...] = ()
    passes: tuple[tuple[str, Passing], ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that split something."""
        return tuple(axis for _, axes in self.splits for axis in axes)

    def of(self, site: Site) -> tuple[str, ...]:
        return dict(self.splits).get(site, ())

    def __str__(self) -> str:
        parts = [f"{factor}{f'.{atom}' if atom else ''} -> {'*'.join(axes)}" for (factor, atom), axes in self.splits]
        for axis, summed in self.passes:
            parts.append(f"{'+'.join(map(str, sorted(summed)))} partial({axis})" if summed else f"broadcast({axis})")
        return ", ".join(parts)


def sites_of(node: NamedNode, operand: Operand | None, tensor: NamedTensor) -> tuple[Site | None, ...] | None:
    """The site of each atom of a tensor that the op takes or gives; None where op and tensor cut a dim differently."""
    if operand is None:
        return None
    sites: list[Site | None] = []
    for dim, term in enumerate(operand.terms):
        own = [atom.size for atom in tensor.atoms if atom.dim == dim]
        found = [(factor, i) for factor in term for i in range(len(node.atoms.get(factor, ())))]
        if len(found) == len(own) == 1:
            sites.append(found[0])
        else:
            sites.extend(_matched(own, [(site, node.atoms[site[0]][site[1]]) for site in found]))
    return tuple(sites)


def _matched(own: list[int], found: list[tuple[Site, int]]) -> list[Site | None]:
    """The sites of atoms of these sizes, where the op's are the same but for those of size 1."""
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
    """All choices that give each axis one of its candidate sites, or one of what it may pass through, or nothing.

    Axes that split one site do so in every order; the mesh's comes first.
    """
    passing = passing or {}
    names = [axis for axis in axes if axis in candidates or axis in passing]
    options: list[list[Site | Passing | None]] = [
        [None, *dict.fromkeys(candidates.get(name, ())), *dict.fromkeys(passing.get(name, ()))] for name in names
    ]
    for picked in product(*options):
        splits: dict[Site, tuple[str, ...]] = {}
        for axis, way in zip(names, picked, strict=True):
            if isinstance(way, tuple):
                splits[way] = (*splits.get(way, ()), axis)
        passes = tuple((axis, way) for axis, way in zip(names, picked, strict=True) if isinstance(way, frozenset))
        sites = sorted(splits)
        for orders in product(*(permutations(splits[site]) for site in sites)):
            choice = Choice(tuple(zip(sites, orders, strict=True)), passes)
            if all(can_split(node, site, used, axes, (site, used) in uneven) for site, used in choice.splits):
                yield choice


def can_split(node: NamedNode, site: Site, used: tuple[str, ...], axes: SubMesh, uneven: bool = False) -> bool:
    """Whether an op allows these axes, together, to split an atom of a factor; in `uneven` pieces too, or not.

    What was found out about an op by trying it holds for even pieces alone.
    """
    factor, atom = site
    kind = node.rule.kinds.get(factor)
    if atom >= len(node.atoms.get(factor, ())):
        return False
    lowering = communicating(node, factor)
    if lowering is not None and not lowering.allows(node, factor, atom):
        return False
    if lowering is None and kind not in SPLITTABLE:
        return False
    by_offset = node.rule.lowering(factor) is not None or "diagonal" in node.rule.localise
    if by_offset and atom != 0:
        return False  # these count positions from the shard's first one, so a shard must be one stretch
    count = prod(axes[axis] for axis in used)
    extents = [node.atoms[factor][atom]]
    if kind is FactorKind.HALO:
        extents.append(node.sizes[factor])  # that of the output
    return all(extent % count == 0 for extent in extents) or (uneven and node.source != "discovered")


def passings_of(graph: NamedGraph, node: NamedNode) -> tuple[Passing, ...]:
    """What an axis that splits nothing of an op can pass through it."""
    tensors = [None if name is None else graph.tensors[name] for name in node.operands]
    found = [BROADCAST] if any(tensor is not None and tensor.requires_grad for tensor in tensors) else []
    results = [graph.tensors[name] for name in node.outputs if name is not None]
    if any(tensor.dtype is torch.bool for tensor in results):
        return tuple(found)  # truths do not add up
    for group in node.rule.linear:
        present = [tensors[i] for i in group if i < len(tensors)]
        numbers = all(tensor is not None and tensor.dtype is not torch.bool for tensor in present)
        if numbers and frozenset(group) in graph.passable_sums[node.name]:
            found.append(frozenset(group))
    return tuple(found)


def layouts_of(
    graph: NamedGraph, node: NamedNode, choice: Choice
) -> tuple[tuple[Sharding | None, ...], tuple[Sharding | None, ...]] | None:
    """The layouts that a choice wants of the operands and gives to the outputs; None where it cannot be had."""
    if any(way and way not in graph.passable_sums[node.name] for _, way in choice.passes):
        return None
    operands: list[Sharding | None] = []
    for position, (operand, name) in enumerate(zip_longest(node.rule.operands, node.operands)):
        tensor = None if name is None else graph.tensors[name]
        if tensor is None:
            operands.append(None)
        elif operand is None:
            operands.append(Sharding.replicated(atoms_of(tensor)))
        elif (layout := _layout(node, operand, tensor, choice, position)) is not None:
            operands.append(layout)
        else:
            return None
    outputs: list[Sharding | None] = []
    for operand, name in zip(node.rule.outputs, node.outputs, strict=True):
        tensor = None if name is None else graph.tensors[name]
        outputs.append(None)
        if operand is None or tensor is None:
            continue
        layout = _layout(node, operand, tensor, choice, None)
        if layout is None:
            return None
        outputs[-1] = layout
    return tuple(operands[: len(node.operands)]), tuple(outputs)


def _layout(
    node: NamedNode, operand: Operand, tensor: NamedTensor, choice: Choice, position: int | None
) -> Sharding | None:
    sites = sites_of(node, operand, tensor)
    if sites is None and choice.splits:
        return None
    splits = tuple(() if site is None else choice.of(site) for site in sites or (None,) * len(tensor.atoms))
    partial: set[str] = set()
    broadcast: set[str] = set()
    for (factor, _), axes in choice.splits:
        if set(axes) <= {axis for split in splits for axis in split}:
            continue
        if factor in operand.factors:
            return None  # the tensor has the factor, but not the atom that is split
        if position is None:
            if communicating(node, factor) is not None:
                continue  # whatever it adds up inside, all ranks get
            if node.rule.kinds[factor] is FactorKind.PARALLEL:
                return None
            if tensor.dtype is torch.bool or (len(node.outputs) > 1 and node.rule.kinds[factor] is FactorKind.MEAN):
                return None  # truths do not add up; a mean beside other results has no share of its own
            partial.update(axes)
        elif node.rule.kinds[factor] is FactorKind.SUM and position in node.rule.added_operands(factor):
            partial.update(axes)
        else:
            broadcast.update(axes)
    for axis, summed in choice.passes:
        is_sum = position in summed if position is not None else bool(summed)
        (partial if is_sum else broadcast).add(axis)
    return Sharding(splits, frozenset(partial), frozenset(broadcast if tensor.requires_grad else ()))
