"""Retargeting: a plan for inputs of other sizes. A plan speaks of dims, so most statements stay valid.

Statements about absent ops and values are dropped, and sizes that no longer divide are split unevenly. If the pins
are infeasible at the new sizes, only the rules remain.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopar.errors import LayoutError
from autopar.ir.graph import NamedGraph
from autopar.mesh import SubMesh
from autopar.sharding.assignment import StepPlan
from autopar.sharding.layout.check import LayoutWords
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.matching import POSITION, glob_matches, matches
from autopar.sharding.layout.syntax import (
    Block,
    DimRule,
    GatherStatement,
    MeshStatement,
    OpPin,
    Pin,
    SplitTerm,
    Statement,
    TensorPattern,
)
from autopar.sharding.op_pins import words_of
from autopar.sharding.propagation import propagate_plan

__all__ = ["retarget"]


def retarget(graph: NamedGraph, layout: Layout, axes: SubMesh) -> StepPlan:
    """Return the plan of a layout on another graph of the same model."""
    words = words_of(graph)
    known = [kept for statement in layout for kept in _known(statement, words)]
    without_ops = [statement for statement in known if not isinstance(statement, OpPin)]
    rules: list[Statement] = [
        statement for statement in without_ops if isinstance(statement, DimRule | MeshStatement | GatherStatement)
    ]
    rules += [one for one in without_ops if isinstance(one, Block) and all(scope.glob is None for scope in one.scopes)]
    error: LayoutError | None = None
    # From the most faithful to the most tolerant; the error of the last attempt is the one to show.
    for tried in (known, without_ops, rules):
        try:
            return propagate_plan(graph, Layout(tuple(tried), layout.name), axes)
        except LayoutError as found:
            error = found
    assert error is not None
    raise error


def _known(statement: Statement, words: LayoutWords) -> Iterator[Statement]:
    """Yield the part of a statement that the graph has names for; uneven pieces are allowed."""
    if isinstance(statement, DimRule):
        yield from _rule(statement, words)
    elif isinstance(statement, Pin):
        rules = tuple(kept for rule in statement.rules for kept in _rule(rule, words))
        if rules and _any(statement.glob, words.of_kind(None)):
            yield replace(statement, rules=rules)
    elif isinstance(statement, Block):
        rules = tuple(kept for rule in statement.rules for kept in _rule(rule, words))
        globs = [(scope.glob, words.of_kind(scope.kind)) for scope in statement.scopes if scope.glob is not None]
        dims = {dim for scope in statement.scopes for dim in scope.dims}
        if rules and dims <= words.dims and all(_any(glob, names) for glob, names in globs):
            yield replace(statement, rules=rules)
    elif isinstance(statement, OpPin):
        if _any(statement.glob, words.ops):
            yield replace(statement, uneven=tuple(factor for factor, _ in statement.choice))
    elif (
        not isinstance(statement, GatherStatement)
        or statement.action == "recompute"
        or _any(statement.glob, words.of_kind(None))
    ):
        yield statement


def _rule(rule: DimRule, words: LayoutWords) -> Iterator[DimRule]:
    dims = tuple(dim for dim in rule.dims if dim.startswith(POSITION) or any(matches(dim, own) for own in words.dims))
    if dims:
        *others, last = rule.place.terms
        # A size that no longer divides is padded, so that parameters keep the storage of the old plan.
        terms = (*others, replace(last, pad=True) if isinstance(last, SplitTerm) else last)
        yield replace(rule, dims=dims, place=TensorPattern(terms, rule.place.priority))


def _any(glob: str, names: object) -> bool:
    return any(glob_matches(glob, name) for name in names)  # type: ignore[attr-defined]
