"""`same @a @b`: what the layout says about one of the tensors holds for the others, where it leaves them open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.mesh import SubMesh
from autopar.sharding.atoms import HasAtoms, atoms_of
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.precedence import glob_matches
from autopar.sharding.layout.resolve import SplitRequest, resolve
from autopar.sharding.layout.syntax import Block, DimRule, NotSplit, Same, Scope, SplitTerm, TensorPattern

__all__ = ["filled_from", "groups_of", "shared"]


def groups_of(layout: Layout, names: Sequence[str]) -> list[tuple[str, ...]]:
    """The tensors of each `same`, in the order of the graph."""
    return [
        tuple(name for name in names if glob_matches(same.left, name) or glob_matches(same.right, name))
        for same in layout
        if isinstance(same, Same)
    ]


def shared(layout: Layout, tensors: Mapping[str, tuple[HasAtoms, tuple[str, ...]]], axes: SubMesh) -> Layout:
    """The layout with blocks for what tensors take over from each other; `tensors` are they and their roles."""
    added: list[Block] = []
    for group in groups_of(layout, list(tensors)):
        for name in group:
            tensor, roles = tensors[name]
            for role in roles:
                others = [other for other in group if other != name and role in tensors[other][1]]
                wanted = resolve(layout, tensor, role, axes)
                found = wanted
                for other in others:
                    found = filled_from(
                        tensor, found, tensors[other][0], resolve(layout, tensors[other][0], role, axes)
                    )
                rules = _rules(tensor, wanted, found)
                if rules:
                    added.append(Block((Scope(role, glob=name),), rules, span=rules[0].span))  # type: ignore[arg-type]
    return Layout((*layout.statements, *added), layout.name)


def filled_from(tensor: HasAtoms, wanted: SplitRequest, other: HasAtoms, theirs: SplitRequest) -> SplitRequest:
    """What is wanted of a tensor; where that is open, what is wanted of another one that is cut alike."""
    if atoms_of(tensor) != atoms_of(other):
        return wanted
    taken = {axis for axes in wanted for axis in axes or ()}
    return tuple(
        given if mine is None and given is not None and not taken.intersection(given) else mine
        for mine, given in zip(wanted, theirs, strict=True)
    )


def _rules(tensor: HasAtoms, wanted: SplitRequest, found: SplitRequest) -> tuple[DimRule, ...]:
    rules = []
    for atom, before, after in zip(tensor.atoms, wanted, found, strict=True):
        if before is None and after is not None and atom.names:
            term = SplitTerm(after, pad=True) if after else NotSplit()
            rules.append(DimRule((atom.names[-1],), TensorPattern((term,))))
    return tuple(rules)
