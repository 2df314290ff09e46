"""Substitute axes in a layout: `let` names by their axes, axes of a strategy by those of a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter

from autopar.sharding.layout.source import SourceSpan, layout_error
from autopar.sharding.layout.syntax import (
    Axes,
    Block,
    DimRule,
    Hole,
    Let,
    MeshStatement,
    NotSplit,
    OpPin,
    OverAxes,
    Pin,
    PinState,
    SplitTerm,
    Statement,
    TensorPattern,
    Term,
)


def expand_lets(statements: Sequence[Statement]) -> tuple[Statement, ...]:
    """Return the statements with every `let` name replaced by its axes; the `let` lines stay."""
    lets = _lets(statements)
    users = {name: set(lets).intersection(let.axes) for name, let in lets.items()}
    try:
        order = tuple(TopologicalSorter(users).static_order())
    except CycleError as error:
        cycle = [lets[name] for name in dict.fromkeys(error.args[1])]
        message = "these names stand for one another" if len(cycle) > 1 else f"'{cycle[0].name}' stands for itself"
        raise layout_error(
            "E0", message, "define one of them by axes of the mesh", *(let.span for let in cycle)
        ) from error
    # In the order of definition by others, so that each name is replaced by axes at once.
    meaning: dict[str, Axes] = {}
    for name in order:
        meaning[name] = _replaced(lets[name].axes, meaning, lets[name].span)
    return tuple(kept for kept in (replace_axes(statement, meaning) for statement in statements) if kept is not None)


def replace_axes(statement: Statement, meaning: Mapping[str, Axes]) -> Statement | None:
    """Return the statement with other axes, or None if nothing is left of it.

    Without their axes `tp` is `none`, `tp?` is `?`, and guards and pinned states are gone.
    """
    match statement:
        case DimRule():
            return _rule(statement, meaning)
        case Block(rules=rules):
            return replace(statement, rules=tuple(_rule(rule, meaning) for rule in rules))
        case Pin(rules=rules, states=states, span=span):
            moved = [PinState(state.state, _replaced(state.axes, meaning, span)) for state in states]
            kept = tuple(state for state in moved if state.axes)
            return replace(statement, rules=tuple(_rule(rule, meaning) for rule in rules), states=kept)
        case OpPin(choice=choice, span=span):
            chosen = [(factor, _replaced(axes, meaning, span)) for factor, axes in choice]
            split = tuple((factor, axes) for factor, axes in chosen if axes)
            return replace(statement, choice=split) if split else None
    if isinstance(statement, OverAxes):
        over = _replaced(statement.axes, meaning, statement.span)
        return replace(statement, axes=over) if over else None
    return statement


def _lets(statements: Sequence[Statement]) -> dict[str, Let]:
    lets: dict[str, Let] = {}
    for let in (statement for statement in statements if isinstance(statement, Let)):
        if let.name in lets:
            raise layout_error(
                "E0", f"'{let.name}' is defined twice", "remove one of the lines", lets[let.name].span, let.span
            )
        lets[let.name] = let
    for mesh in (statement for statement in statements if isinstance(statement, MeshStatement)):
        for name in mesh.mesh.names:
            if name in lets:
                message = f"'{name}' is both an axis of the mesh and a name for axes"
                raise layout_error("E0", message, "give the 'let' another name", mesh.span, lets[name].span)
    return lets


def _rule(rule: DimRule, meaning: Mapping[str, Axes]) -> DimRule:
    # Alternatives that differ in absent axes only become equal.
    terms = dict.fromkeys(_term(term, meaning, rule.span) for term in rule.place.terms)
    return replace(rule, place=TensorPattern(tuple(terms), rule.place.priority))


def _term(term: Term, meaning: Mapping[str, Axes], span: SourceSpan | None) -> Term:
    match term:
        case Hole(candidates=candidates) if candidates:
            axes = dict.fromkeys(_replaced(candidate, meaning, span) for candidate in candidates)
            left = tuple(candidate for candidate in axes if candidate)
            return Hole(left) if left else NotSplit()
        case SplitTerm(axes=axes, extends=extends):
            replaced = _replaced(axes, meaning, span)
            if not replaced:
                return Hole() if extends else NotSplit()
            return replace(term, axes=replaced)
    return term


def _replaced(axes: Axes, meaning: Mapping[str, Axes], span: SourceSpan | None) -> Axes:
    replaced = tuple(axis for name in axes for axis in meaning.get(name, (name,)))
    for axis in replaced:
        if replaced.count(axis) > 1:
            written = "*".join(axes)
            message = f"axis '{axis}' stands twice in '{written}', which is {'*'.join(replaced)}"
            raise layout_error("E0", message, "name it once", span.at(axes[0]) if span else f"{written}")
    return replaced
