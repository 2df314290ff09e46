"""Why a tensor or an op of a plan is as it is: the lines that say so, the rule of the op, what is sent for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from autopar.errors import AutoparError
from autopar.layout.language import parse_layout
from autopar.layout.precedence import Level, glob_matches, matches, specificity
from autopar.layout.syntax import Block, DimRule, Hold, OpPin, Pin, Scope
from autopar.tracing.graph import NamedNode, NamedTensor
from autopar.words import did_you_mean, nearest
from autopar.written.units import bytes_text, layout_text, seconds_text

if TYPE_CHECKING:
    from autopar.written.plan import Plan

__all__ = ["explain"]


def explain(plan: Plan, name: str) -> str:
    """In words; the name is that of a tensor or op, as the summary and `autopar trace` show them."""
    nodes = {node.name: node for node in plan.graph.nodes}
    tensor = plan.graph.tensors.get(name)
    if tensor is None and name not in nodes:
        known = [*plan.graph.tensors, *nodes]
        listed = ", ".join(nearest(name, known, 5))
        raise AutoparError(
            f"the model has no tensor and no op '{name}'{did_you_mean(name, known)}\nfix: the nearest are {listed}"
        )
    lines: list[str] = []
    if tensor is not None:
        lines += _tensor(plan, tensor)
    for node in plan.graph.nodes:
        if node.name == name or (tensor is not None and name in node.outputs):
            lines += _op(plan, node)
    if tensor is not None:
        lines += _users(plan, tensor)
    return "\n".join(lines)


def _tensor(plan: Plan, tensor: NamedTensor) -> Iterator[str]:
    decisions = plan.decided.decisions
    shape = list(tensor.shape)
    yield f"{tensor}  {str(tensor.dtype).removeprefix('torch.')} {shape}, {tensor.kind}"
    layout = plan.layout_of(tensor.name)
    yield f"  layout  {layout_text(tensor, layout)}"
    if tensor.kind == "param":
        yield f"  used    {layout_text(tensor, decisions.values[tensor.name])}"
        holding = decisions.holdings.get(tensor.name)
        if holding is not None and holding.again:
            yield "  held    gathered again for the backward"
        elif holding is not None and holding.lasting:
            yield "  held    gathered once in a step"
    yield from (f"  {where:7} {line}" for where, line in _lines(plan, tensor))


def _lines(plan: Plan, tensor: NamedTensor) -> Iterator[tuple[str, str]]:
    """The lines of the plan's text that say where the tensor's dims go."""
    text = plan.text.splitlines()
    found: dict[int, str] = {}
    for statement in parse_layout(plan.text, "<plan>"):
        if isinstance(statement, Hold):
            if glob_matches(statement.glob, tensor.name) and statement.span is not None:
                found[statement.span.line] = text[statement.span.line - 1]
            continue
        if not isinstance(statement, DimRule | Pin | Block):
            continue
        rules = (statement,) if isinstance(statement, DimRule) else statement.rules
        if not isinstance(statement, DimRule) and not _is_about(statement, tensor):
            continue
        dims = [name for atom in tensor.atoms for name in atom.names]
        for rule in rules:
            named = any(matches(pattern, dim) for pattern in rule.dims for dim in dims if pattern != "*")
            if (named or isinstance(statement, Pin | Block)) and statement.span is not None:
                found[statement.span.line] = text[statement.span.line - 1]
    if not found:
        found = {number: line for number, line in enumerate(text, start=1) if line == "* -> none"}
    return (("line" if i == 0 else "", f"{number}: {line}") for i, (number, line) in enumerate(sorted(found.items())))


def _is_about(statement: Pin | Block, tensor: NamedTensor) -> bool:
    if isinstance(statement, Pin):
        return glob_matches(statement.glob, tensor.name)
    kinds = {"param": {"param", "use", "grad", "opt"}, "activation": {"act", "output"}, "input": {"input"}}
    dims = {name for atom in tensor.atoms for name in atom.names}
    return any(_scope_fits(scope, tensor, kinds.get(tensor.kind, {"buffer"}), dims) for scope in statement.scopes)


def _scope_fits(scope: Scope, tensor: NamedTensor, kinds: set[str], dims: set[str]) -> bool:
    assert specificity(scope, "*").level > Level.BARE
    return (
        (scope.kind is None or scope.kind in kinds)
        and (scope.glob is None or glob_matches(scope.glob, tensor.name))
        and set(scope.dims) <= dims
    )


def _op(plan: Plan, node: NamedNode) -> Iterator[str]:
    decision = plan.decided.decisions.ops[node.name]
    yield f"made by {node.name} ({node.op})"
    yield f"  rule    {node.rule}  ({node.source})"
    dims = ", ".join(f"{factor} = {dim}" for factor, dim in node.factors.items())
    yield f"  factors {dims or 'none'}"
    yield f"  choice  {str(decision.choice) or 'nothing is split'}"
    if node.origin.source:
        yield f"  model   {node.origin.source}: {node.origin.source_code}"
    for pin in parse_layout(plan.text, "<plan>"):
        if isinstance(pin, OpPin) and glob_matches(pin.glob, node.name) and pin.span is not None:
            yield f"  pinned  {pin.span.line}: {pin.span.text}"
    for name, layout in zip(node.operands, decision.operands, strict=True):
        if name is not None and layout is not None:
            yield f"  takes   {name}: {layout_text(plan.graph.tensors[name], layout)}"
    sent = [one for one in plan.collectives if one.op == node.name]
    for one in sent:
        yield f"  sends   {one.direction} {one.kind}({'*'.join(one.axes)}) of {one.tensor}: {_price(one)}"
    if not sent:
        yield "  sends   nothing"


def _price(one: object) -> str:
    return f"{bytes_text(one.bytes)}, {seconds_text(one.seconds)} by itself"  # type: ignore[attr-defined]


def _users(plan: Plan, tensor: NamedTensor) -> Iterator[str]:
    for node in plan.graph.nodes:
        for name, layout in zip(node.operands, plan.decided.decisions.ops[node.name].operands, strict=True):
            if name == tensor.name and layout is not None:
                yield f"used by {node.name} as {layout_text(tensor, layout)}"
