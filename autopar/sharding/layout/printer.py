"""Layouts as text, in one normal form: a statement a line, '->' for arrows, long blocks a rule a line."""

from __future__ import annotations

from autopar.sharding.layout.syntax import (
    Axes,
    Block,
    DimRule,
    GatherStatement,
    Guard,
    Hole,
    Let,
    Limit,
    MeshStatement,
    NotSplit,
    OpPin,
    Pin,
    Same,
    Scope,
    Statement,
    StrategyStatement,
    TensorPattern,
    Term,
)
from autopar.sharding.layout.tokens import format_percent, format_size

WIDTH = 120


def print_statement(statement: Statement) -> str:
    """One statement, without the end of its line."""
    match statement:
        case StrategyStatement(name, description):
            return f"strategy {name}" + ("" if description is None else f" {_quoted(description)}")
        case MeshStatement(mesh):
            return f"mesh {', '.join(map(str, mesh.declared))}"
        case Let(name, axes):
            return f"let {name} = {print_axes(axes)}"
        case DimRule():
            return _rule(statement)
        case Block():
            return _block(statement)
        case Pin(glob, rules, states):
            added = "".join(f" + {state.state}({print_axes(state.axes)})" for state in states)
            return f"@{glob}[{', '.join(map(_rule, rules))}]{added}"
        case OpPin(glob, choice, uneven=uneven):
            return f"op @{glob}[{', '.join(_factor(*one, one[0] in uneven) for one in choice)}]"
        case GatherStatement(action, glob, level):
            return f"{action} {level} @{glob}" if level else f"{action} @{glob}"
        case Same(left, right):
            return f"same @{left} @{right}"
        case Guard(action, collective, scope, axes):
            return f"{action} {collective}({print_scope(scope)}) over {print_axes(axes)}"
        case Limit():
            return f"limit {statement.quantity} {_amount(statement)}"


def print_axes(axes: Axes) -> str:
    return "*".join(axes)


def print_place(place: TensorPattern) -> str:
    terms = " | ".join(map(_term, place.terms))
    return f"{terms} !{place.priority}" if place.priority else terms


def print_scope(scope: Scope) -> str:
    dims = f"[{', '.join(scope.dims)}]" if scope.dims else ""
    return f"{scope.kind or ''}{dims}" + ("" if scope.glob is None else f"@{scope.glob}")


def _rule(rule: DimRule) -> str:
    dims = rule.dims[0] if len(rule.dims) == 1 else f"({', '.join(rule.dims)})"
    return f"{dims} -> {print_place(rule.place)}"


def _factor(factor: str, axes: Axes, uneven: bool) -> str:
    return f"{factor} -> {print_axes(axes)}" + (" pad" if uneven else "")


def _term(term: Term) -> str:
    if isinstance(term, NotSplit):
        return "none"
    if isinstance(term, Hole):
        return f"?{{{', '.join(map(print_axes, term.candidates))}}}" if term.candidates else "?"
    return print_axes(term.axes) + ("?" if term.extends else "") + (" pad" if term.pad else "")


def _block(block: Block) -> str:
    scopes = ", ".join(map(print_scope, block.scopes))
    rules = [_rule(rule) for rule in block.rules]
    line = f"{scopes} {{ {', '.join(rules)} }}"
    return line if len(line) <= WIDTH else "\n".join([f"{scopes} {{", *(f"  {rule}" for rule in rules), "}"])


def _amount(limit: Limit) -> str:
    if limit.size_bytes is not None:
        return format_size(limit.size_bytes)
    assert limit.percent is not None, "a limit is a size or a percentage"
    return format_percent(limit.percent)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
