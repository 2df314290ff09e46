"""What a layout leaves to choose: holes with candidates, `?{tp, dp*tp}`, and splits that may extend, `tp?`.

Each place where one stands is one decision, for all tensors that its rule is about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from autopar.mesh import SubMesh
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.syntax import Axes, Block, DimRule, Hole, Pin, SplitTerm, Statement, TensorPattern, Term

__all__ = ["filled", "options_of"]


def options_of(layout: Layout, axes: SubMesh) -> list[tuple[Axes, ...]]:
    """For each decision that a layout leaves, in the order of its text, the axes to choose from."""
    found: list[tuple[Axes, ...]] = []

    def look(term: Term) -> Term:
        options = _options(term, axes)
        if options:
            found.append(options)
        return term

    for statement in layout:
        _with_terms(statement, look)
    return found


def filled(layout: Layout, axes: SubMesh, picks: Sequence[Axes]) -> Layout:
    """The layout with these axes picked, one for each decision."""
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
        return tuple(_extensions(term.axes, axes))
    return ()


def _extensions(own: Axes, axes: SubMesh) -> Iterator[Axes]:
    """The axes themselves, then with others of the mesh, in its order, as minor ones."""
    others = [axis for axis, size in axes.items() if axis not in own and size > 1]
    for count in range(len(others) + 1):
        for added in combinations(others, count):
            yield (*own, *added)


def _with_terms(statement: Statement, change: Callable[[Term], Term]) -> Statement:
    """The statement with every term of its rules changed, in the order of the text."""

    def rule(given: DimRule) -> DimRule:
        return replace(given, place=TensorPattern(tuple(map(change, given.place.terms)), given.place.priority))

    if isinstance(statement, DimRule):
        return rule(statement)
    if isinstance(statement, Block | Pin):
        return replace(statement, rules=tuple(map(rule, statement.rules)))
    return statement
