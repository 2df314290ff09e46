"""Fill what a layout leaves open: `?{tp, dp*tp}` and `tp?` by picks, `same @a @b` by the rules of the other tensor.

Each place of a `?` in the text is one decision, for all tensors that its rule covers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from autopar.mesh import SubMesh
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.matching import glob_matches
from autopar.sharding.layout.resolve import SplitRequest, resolve
from autopar.sharding.layout.syntax import (
    Axes,
    Block,
    DimRule,
    Hole,
    NotSplit,
    Pin,
    Same,
    Scope,
    SplitTerm,
    Statement,
    TensorPattern,
    Term,
)
from autopar.sharding.sharding import HasAtoms, atoms_of


def options_of(layout: Layout, axes: SubMesh) -> list[tuple[Axes, ...]]:
    """Return the axes to pick from for each decision, in the order of the text."""
    found: list[tuple[Axes, ...]] = []

    def look(term: Term) -> Term:
        options = _options(term, axes)
        if options:
            found.append(options)
        return term

    for statement in layout:
        _with_terms(statement, look)
    return found


def fill_holes(layout: Layout, axes: SubMesh, picks: Sequence[Axes]) -> Layout:
    """Return the layout with one pick for each decision."""
    left = iter(picks)

    def fill(term: Term) -> Term:
        if not _options(term, axes):
            return term
        return SplitTerm(next(left), pad=isinstance(term, SplitTerm) and term.pad)

    return Layout(tuple(_with_terms(statement, fill) for statement in layout), layout.name)


def _options(term: Term, axes: SubMesh) -> tuple[Axes, ...]:
    if isinstance(term, Hole):
        return term.candidates
    if isinstance(term, SplitTerm) and term.extends:
        # The axes themselves first, then with further axes of the mesh, in its order, as minor ones.
        others = [axis for axis, size in axes.items() if axis not in term.axes and size > 1]
        counts = range(len(others) + 1)
        return tuple((*term.axes, *added) for count in counts for added in combinations(others, count))
    return ()


def _with_terms(statement: Statement, change: Callable[[Term], Term]) -> Statement:
    """Return the statement with every term of its rules changed, in text order."""

    def rule(given: DimRule) -> DimRule:
        return replace(given, place=TensorPattern(tuple(map(change, given.place.terms)), given.place.priority))

    if isinstance(statement, DimRule):
        return rule(statement)
    if isinstance(statement, Block | Pin):
        return replace(statement, rules=tuple(map(rule, statement.rules)))
    return statement


def groups_of(layout: Layout, names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the tensors of each `same`, in the order of the graph."""
    return [
        tuple(name for name in names if glob_matches(same.left, name) or glob_matches(same.right, name))
        for same in layout
        if isinstance(same, Same)
    ]


def spell_out_same(layout: Layout, tensors: Mapping[str, tuple[HasAtoms, tuple[str, ...]]], axes: SubMesh) -> Layout:
    """Return the layout with a block for each tensor that takes axes over."""
    added: list[Block] = []
    for group in groups_of(layout, list(tensors)):
        for name in group:
            tensor, roles = tensors[name]
            for role in roles:
                others = [other for other in group if other != name and role in tensors[other][1]]
                wanted = resolve(layout, tensor, role, axes)
                found = wanted
                for other, _ in (tensors[other] for other in others):
                    found = fill_from(tensor, found, other, resolve(layout, other, role, axes))
                rules = _rules_for(tensor, wanted, found)
                if rules:
                    added.append(Block((Scope(role, glob=name),), rules, span=rules[0].span))  # type: ignore[arg-type]
    return Layout((*layout.statements, *added), layout.name)


def fill_from(tensor: HasAtoms, wanted: SplitRequest, other: HasAtoms, theirs: SplitRequest) -> SplitRequest:
    """Return a request with open atoms filled from that of a tensor of equal atoms."""
    if atoms_of(tensor) != atoms_of(other):
        return wanted
    taken = {axis for axes in wanted for axis in axes or ()}
    return tuple(
        given if mine is None and given is not None and not taken.intersection(given) else mine
        for mine, given in zip(wanted, theirs, strict=True)
    )


def _rules_for(tensor: HasAtoms, wanted: SplitRequest, found: SplitRequest) -> tuple[DimRule, ...]:
    rules = []
    for atom, before, after in zip(tensor.atoms, wanted, found, strict=True):
        if before is None and after is not None and atom.names:
            # The rule of the other tensor allowed these axes already, evenly or not.
            term = SplitTerm(after, pad=True) if after else NotSplit()
            rules.append(DimRule((atom.names[-1],), TensorPattern((term,))))
    return tuple(rules)
