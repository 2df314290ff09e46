"""The legal choices of an op: which of its factors each mesh axis splits, and the layouts that its tensors then have.

An axis that splits a factor takes the operands that have the factor split, those that lack it broadcast (each shard's
gradient is a part of theirs), and gives results that are split, or partial where the factor is summed away. A bias that
is added to such a sum is taken as a partial sum itself: one rank keeps it. An axis that the op does not use takes and
gives replicated tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations, product
from math import prod

import torch

from autopar.layout.resolve import atoms_of
from autopar.layout.state import Layout
from autopar.rewrite.lowerings import communicating
from autopar.rules.notation import FactorKind, Operand
from autopar.tracing.graph import NamedGraph, NamedNode, NamedTensor

__all__ = ["Choice", "Site", "can_split", "choices", "layouts_of", "sites_of"]

SPLITTABLE = (FactorKind.PARALLEL, FactorKind.SUM, FactorKind.MEAN)

Site = tuple[str, int]
"""A factor and one of its atoms."""


@dataclass(frozen=True)
class Choice:
    """The axes that split each atom of a factor, major to minor."""

    splits: tuple[tuple[Site, tuple[str, ...]], ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(axis for _, axes in self.splits for axis in axes)

    def of(self, site: Site) -> tuple[str, ...]:
        return dict(self.splits).get(site, ())

    def __str__(self) -> str:
        return ", ".join(
            f"{factor}{f'.{atom}' if atom else ''} -> {'*'.join(axes)}" for (factor, atom), axes in self.splits
        )


def sites_of(node: NamedNode, operand: Operand | None, tensor: NamedTensor) -> tuple[Site | None, ...] | None:
    """The site of each atom of a tensor that the op takes or gives; None where op and tensor cut a dim differently."""
    if operand is None:
        return None
    sites: list[Site | None] = []
    for dim, term in enumerate(operand.terms):
        own = [atom.size for atom in tensor.atoms if atom.dim == dim]
        found = [(factor, i) for factor in term for i in range(len(node.atoms.get(factor, ())))]
        extents = [node.atoms[factor][i] for factor, i in found]
        if not term:
            sites.extend([None] * len(own))
        elif extents == own:
            sites.extend(found)
        elif len(term) == 1 and len(own) == 1:
            sites.append((term[0], 0) if len(extents) == 1 else None)
        else:
            return None
    return tuple(sites)


def choices(node: NamedNode, candidates: Mapping[str, Iterable[Site]], axes: Mapping[str, int]) -> Iterator[Choice]:
    """All choices that give each axis one of its candidate sites or none, and that the op allows.

    Axes that split one site do so in every order; the mesh's comes first.
    """
    names = list(candidates)
    options: list[list[Site | None]] = [[None, *dict.fromkeys(candidates[name])] for name in names]
    for picked in product(*options):
        splits: dict[Site, tuple[str, ...]] = {}
        for axis, site in zip(names, picked, strict=True):
            if site is not None:
                splits[site] = (*splits.get(site, ()), axis)
        if all(can_split(node, site, used, axes) for site, used in splits.items()):
            sites = sorted(splits)
            for orders in product(*(permutations(splits[site]) for site in sites)):
                yield Choice(tuple(zip(sites, orders, strict=True)))


def can_split(node: NamedNode, site: Site, used: tuple[str, ...], axes: Mapping[str, int]) -> bool:
    """Whether an op allows these axes, together, to split an atom of a factor."""
    factor, atom = site
    kind = node.rule.kinds.get(factor)
    if atom >= len(node.atoms.get(factor, ())):
        return False
    lowering = communicating(node, factor)
    if lowering is not None and not lowering.allows(node, factor, atom, prod(axes[axis] for axis in used)):
        return False
    if lowering is None and kind not in SPLITTABLE:
        return False
    by_offset = node.rule.lowering(factor) is not None or "diagonal" in node.rule.localise
    if by_offset and atom != 0:
        return False  # these count positions from the shard's first one, so a shard must be one stretch
    count = 1
    for axis in used:
        count *= axes[axis]
    return node.atoms[factor][atom] % count == 0


def layouts_of(
    graph: NamedGraph, node: NamedNode, choice: Choice
) -> tuple[tuple[Layout | None, ...], tuple[Layout | None, ...]] | None:
    """The layouts that a choice wants of the operands and gives to the outputs; None where it cannot be had."""
    operands: list[Layout | None] = []
    for position, (operand, name) in enumerate(zip(node.rule.operands, node.operands, strict=False)):
        tensor = None if name is None else graph.tensors[name]
        operands.append(None)
        if operand is None or tensor is None:
            continue
        layout = _layout(node, operand, tensor, choice, position, tensor.requires_grad)
        if layout is None:
            return None
        operands[-1] = layout
    outputs: list[Layout | None] = []
    for operand, name in zip(node.rule.outputs, node.outputs, strict=True):
        tensor = None if name is None else graph.tensors[name]
        outputs.append(None)
        if operand is None or tensor is None:
            continue
        layout = _layout(node, operand, tensor, choice, None, False)
        if layout is None:
            return None
        outputs[-1] = layout
    return tuple(operands), tuple(outputs)


def _layout(
    node: NamedNode, operand: Operand, tensor: NamedTensor, choice: Choice, position: int | None, differentiable: bool
) -> Layout | None:
    sites = sites_of(node, operand, tensor)
    if sites is None:
        return Layout.replicated(atoms_of(tensor)) if not choice.splits else None
    splits = tuple(() if site is None else choice.of(site) for site in sites)
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
        elif differentiable:
            broadcast.update(axes)
    return Layout(splits, frozenset(partial), frozenset(broadcast))
