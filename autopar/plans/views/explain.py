"""Reasons for the sharding of a tensor or op: lines of the plan, rule, collectives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from autopar.errors import AutoparError
from autopar.ir.values import NamedNode, NamedTensor
from autopar.names import did_you_mean, nearest
from autopar.plans.format import bytes_text, layout_text, seconds_text
from autopar.plans.record import PlanRecord, PricedCollective
from autopar.plans.views.stages import stage_of
from autopar.sharding.layout.language import parse_layout
from autopar.sharding.layout.matching import Precedence, glob_matches, matches, specificity
from autopar.sharding.layout.syntax import Block, DimRule, GatherStatement, OpPin, Pin, Scope

__all__ = ["Explanation", "Line", "OpFacts", "TensorFacts", "explain_name"]

# Number and text of a line of the plan.
Line = tuple[int, str]


@dataclass(frozen=True)
class TensorFacts:
    """Sharding of a tensor and the lines that set it."""

    tensor: NamedTensor
    layout: str
    # Sharding in which ops use a parameter.
    used: str | None
    # How long a parameter stays gathered.
    gather: str | None
    lines: tuple[Line, ...]
    # Dtypes of a parameter as it is stored, and of its gradient while it is summed over ranks, if it has one.
    stored_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    # The stages of a pipeline that have it.
    stage: str | None = None


@dataclass(frozen=True)
class OpFacts:
    """Rule, choice, operands and collectives of an op."""

    node: NamedNode
    choice: str
    pinned: tuple[Line, ...]
    # Operands with their shardings.
    takes: tuple[tuple[str, str], ...]
    sends: tuple[PricedCollective, ...]


@dataclass(frozen=True)
class Explanation:
    """Explanation of a name; its text is the result of `Plan.explain`."""

    tensor: TensorFacts | None
    ops: tuple[OpFacts, ...]
    # Ops that take the tensor, with its sharding there.
    used_by: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [] if self.tensor is None else list(_tensor_lines(self.tensor))
        lines += [line for op in self.ops for line in _op_lines(op)]
        return "\n".join([*lines, *(f"used by {op} as {layout}" for op, layout in self.used_by)])


def explain_name(plan: PlanRecord, name: str) -> Explanation:
    """Return the explanation of a tensor or op, named as in the summary and `autopar trace`."""
    nodes = {node.name: node for node in plan.graph.nodes}
    tensor = plan.graph.tensors.get(name)
    if tensor is None and name not in nodes:
        known = dict.fromkeys([*plan.graph.tensors, *nodes])
        listed = ", ".join(nearest(name, known, 5))
        raise AutoparError(
            f"no tensor or op of the model is named '{name}'{did_you_mean(name, known)}\nfix: similar names: {listed}"
        )
    about = [node for node in plan.graph.nodes if node.name == name or (tensor is not None and name in node.outputs)]
    return Explanation(
        None if tensor is None else _tensor(plan, tensor),
        tuple(_op(plan, node) for node in about),
        () if tensor is None else tuple(_users(plan, tensor)),
    )


# -- a tensor


def _tensor(plan: PlanRecord, tensor: NamedTensor) -> TensorFacts:
    assignment = plan.decided.assignment
    layout = layout_text(tensor, plan.layout_of(tensor.name))
    used = gather = None
    if tensor.kind == "param":
        used = layout_text(tensor, assignment.values[tensor.name])
        gather_policy = assignment.gather_policies.get(tensor.name)
        if gather_policy is not None and gather_policy.regather:
            gather = "regathered for the backward"
        elif gather_policy is not None and gather_policy.keep_gathered:
            gather = "gathered once per step"
    stored = reduced = None
    if tensor.kind == "param":
        precision = plan.decided.options.precision
        stored = tensor.stored_dtype(precision)
        reduced = None if tensor.frozen else precision.reduced(tensor.dtype)
    stage = stage_of(plan, tensor)
    return TensorFacts(tensor, layout, used, gather, tuple(_lines(plan, tensor)), stored, reduced, stage)


def _tensor_lines(facts: TensorFacts) -> Iterator[str]:
    tensor = facts.tensor
    frozen = ", frozen" if tensor.frozen else ""
    yield f"{tensor}  {_short(tensor.dtype)} {list(tensor.shape)}, {tensor.kind}{frozen}"
    yield f"  layout  {facts.layout}"
    if facts.used is not None:
        yield f"  used    {facts.used}"
    if facts.gather is not None:
        yield f"  gather  {facts.gather}"
    if facts.stage is not None:
        yield f"  stage   {facts.stage}"
    if tensor.frozen:
        yield f"  dtypes  stored in {_short(facts.stored_dtype)}; no gradient, no states of the optimizer"
    elif facts.stored_dtype not in (None, tensor.dtype) or facts.reduce_dtype not in (None, tensor.dtype):
        yield f"  dtypes  stored in {_short(facts.stored_dtype)}, gradient summed in {_short(facts.reduce_dtype)}"
    for i, (number, line) in enumerate(facts.lines):
        yield f"  {'' if i else 'line':7} {number}: {line}"


def _short(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _lines(plan: PlanRecord, tensor: NamedTensor) -> list[Line]:
    """Return the lines of the plan's text that set the splits of a tensor."""
    text = plan.text.splitlines()
    found: dict[int, str] = {}
    for statement in parse_layout(plan.text, "<plan>"):
        if isinstance(statement, GatherStatement):
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
        # No rule names the dims of the tensor: the last rule, for all dims, decides.
        found = {number: line for number, line in enumerate(text, start=1) if line == "* -> none"}
    return sorted(found.items())


def _is_about(statement: Pin | Block, tensor: NamedTensor) -> bool:
    if isinstance(statement, Pin):
        return glob_matches(statement.glob, tensor.name)
    kinds = {"param": {"param", "use", "grad", "opt"}, "activation": {"act", "output"}, "input": {"input"}}
    dims = {name for atom in tensor.atoms for name in atom.names}
    return any(_scope_fits(scope, tensor, kinds.get(tensor.kind, {"buffer"}), dims) for scope in statement.scopes)


def _scope_fits(scope: Scope, tensor: NamedTensor, kinds: set[str], dims: set[str]) -> bool:
    assert specificity(scope, "*").level > Precedence.BARE
    return (
        (scope.kind is None or scope.kind in kinds)
        and (scope.glob is None or glob_matches(scope.glob, tensor.name))
        and set(scope.dims) <= dims
    )


def _users(plan: PlanRecord, tensor: NamedTensor) -> Iterator[tuple[str, str]]:
    for node in plan.graph.nodes:
        for name, layout in zip(node.operands, plan.decided.assignment.ops[node.name].operands, strict=True):
            if name == tensor.name and layout is not None:
                yield node.name, layout_text(tensor, layout)


# -- an op


def _op(plan: PlanRecord, node: NamedNode) -> OpFacts:
    op_assignment = plan.decided.assignment.ops[node.name]
    pins = (pin for pin in parse_layout(plan.text, "<plan>") if isinstance(pin, OpPin))
    operands = zip(node.operands, op_assignment.operands, strict=True)
    return OpFacts(
        node,
        str(op_assignment.choice),
        tuple((pin.span.line, pin.span.text) for pin in pins if pin.span and glob_matches(pin.glob, node.name)),
        tuple((name, layout_text(plan.graph.tensors[name], layout)) for name, layout in operands if name and layout),
        tuple(one for one in plan.collectives if one.op == node.name),
    )


def _op_lines(facts: OpFacts) -> Iterator[str]:
    node = facts.node
    yield f"op {node.name} ({node.op})"
    yield f"  rule    {node.rule}  ({node.source})"
    yield f"  factors {', '.join(f'{factor} = {dim}' for factor, dim in node.factors.items()) or 'none'}"
    yield f"  choice  {facts.choice or 'nothing is split'}"
    if node.origin.source:
        yield f"  model   {node.origin.source}: {node.origin.source_code}"
    yield from (f"  pinned  {number}: {text}" for number, text in facts.pinned)
    yield from (f"  operand {name}: {layout}" for name, layout in facts.takes)
    for one in facts.sends:
        price = f"{bytes_text(one.bytes)}, {seconds_text(one.seconds)} alone"
        yield f"  sends   {one.direction} {one.label} of {one.tensor}: {price}"
    if not facts.sends:
        yield "  sends   nothing"
