"""Complete the layout of a plan for inputs of other sizes: it speaks of dims, so most statements stay valid."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.errors import LayoutError
from autopar.ir.graph import NamedGraph
from autopar.mesh import SubMesh
from autopar.sharding.assignment import Assignment
from autopar.sharding.layout.check import LayoutWords
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.left_whole import left_whole
from autopar.sharding.layout.matching import POSITION, glob_matches, matches
from autopar.sharding.layout.syntax import (
    Block,
    DimRule,
    GatherStatement,
    MeshStatement,
    OpPin,
    Pin,
    Same,
    SplitTerm,
    Statement,
    TensorPattern,
    tensor_globs,
)
from autopar.sharding.op_pins import words_of
from autopar.sharding.propagation import propagate

__all__ = ["Retargeted", "retarget", "retargeted"]

PLAN_AGAIN = "plan again with inputs of these sizes"


@dataclass(frozen=True)
class Retargeted:
    """Assignment of a plan at other sizes, and sentences about statements that do not hold there."""

    assignment: Assignment
    lost: tuple[str, ...]


def retarget(graph: NamedGraph, layout: Layout, axes: SubMesh) -> Assignment:
    """Return the assignment of a layout on another graph of the same model, as `retargeted` does."""
    return retargeted(graph, layout, axes).assignment


def retargeted(graph: NamedGraph, layout: Layout, axes: SubMesh) -> Retargeted:
    """Complete a layout on another graph of the same model.

    Statements about absent ops and values are dropped, and sizes that no longer divide are split unevenly. If the pins
    are infeasible at the new sizes, only the rules remain.
    """
    words = words_of(graph)
    known = [kept for statement in layout for kept in _known(statement, words)]
    without_ops = [statement for statement in known if not isinstance(statement, OpPin)]
    rules: list[Statement] = [
        statement for statement in without_ops if isinstance(statement, DimRule | MeshStatement | GatherStatement)
    ]
    rules += [one for one in without_ops if isinstance(one, Block) and all(scope.glob is None for scope in one.scopes)]
    # From the most faithful to the most tolerant; the error of the last attempt is the one to show.
    attempts = ((known, ""), (without_ops, "choices of ops"), (rules, "statements about single tensors and ops"))
    first = error = None
    for tried, dropped in attempts:
        try:
            assignment = propagate(graph, Layout(tuple(tried), layout.name), axes)
        except LayoutError as found:
            error, first = found, first or found
            continue
        lost = tuple(_lost(graph, layout, Layout(tuple(tried), layout.name), axes))
        if first is not None:
            why = str(first).partition("\n")[0]
            lost += (f"the plan's {dropped} do not hold at these sizes and are dropped: {why}; fix: {PLAN_AGAIN}",)
        return Retargeted(assignment, lost)
    assert error is not None
    raise error


def _lost(graph: NamedGraph, layout: Layout, kept: Layout, axes: SubMesh) -> Iterator[str]:
    """Yield a sentence for each dim that the plan splits, and that is whole or absent here."""
    for name, over in dict(_splits(layout, axes)).items():
        if not any(matches(name, own) for own in graph.dims):
            yield (
                f"the plan splits {name} over {over}, and no dim of this call has this name; "
                "fix: give the dims= that the plan was made with, or plan again"
            )
    yield from left_whole(graph, kept, axes, "the plan")


def _splits(layout: Layout, axes: SubMesh) -> Iterator[tuple[str, str]]:
    """Yield the dims that rules split by name, and the axes."""
    for statement in layout:
        rules = statement.rules if isinstance(statement, Block) else (statement,)
        for rule in (one for one in rules if isinstance(one, DimRule)):
            over = [axis for term in rule.place.terms if isinstance(term, SplitTerm) for axis in term.axes]
            if any(axes[axis] > 1 for axis in over):
                yield from ((dim, "*".join(over)) for dim in rule.dims if not dim.startswith((POSITION, "*")))


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
    elif isinstance(statement, GatherStatement):
        if _any(statement.glob, words.layers if statement.action == "recompute" else words.of_kind(None)):
            yield statement
    elif not isinstance(statement, Same) or all(_any(glob, words.of_kind(None)) for glob in tensor_globs(statement)):
        yield statement


def _rule(rule: DimRule, words: LayoutWords) -> Iterator[DimRule]:
    dims = tuple(dim for dim in rule.dims if dim.startswith(POSITION) or any(matches(dim, own) for own in words.dims))
    if dims:
        *others, last = rule.place.terms
        # A size that no longer divides is padded, so that parameters keep the storage of the old plan.
        terms = (*others, replace(last, pad=last.by is None) if isinstance(last, SplitTerm) else last)
        yield replace(rule, dims=dims, place=TensorPattern(terms, rule.place.priority))


def _any(glob: str, names: object) -> bool:
    return any(glob_matches(glob, name) for name in names)  # type: ignore[attr-defined]
