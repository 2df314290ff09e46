"""Bind a rule to every op; the factors of the rules tie the dims of the graph together.

Activations are tied first, in the order of the graph, then parameters. A square weight between two parts of a residual
stream would need one class twice. With this order the stream stays one class, and the weight gets a second one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch.fx import Node

from autopar.errors import RuleError
from autopar.ir.exported import Exported
from autopar.ir.values import Source
from autopar.rules.bind_call import factor_sizes, fresh_names
from autopar.rules.call import Call, arguments_by_name, describe_call, flat_results, operands_of
from autopar.rules.notation import Operand, Rule, Term
from autopar.rules.proof.discover import no_rule_message
from autopar.rules.table import RuleTable
from autopar.tracing.naming.dim_classes import DimSpace

# Name of the fx node of a value: the `getitem` for ops with several results.
ValueKey = str

Discover = Callable[[torch._ops.OpOverload, Call, tuple[tuple[int, ...] | None, ...]], Rule | None]


@dataclass(frozen=True)
class BoundNode:
    """Op of the graph with its rule, operands, results and the class of each factor."""

    node: Node
    call: Call
    rule: Rule
    source: Source
    # Reason for a rule outside of the table; else empty.
    reason: str
    operands: tuple[ValueKey | None, ...]
    outputs: tuple[ValueKey | None, ...]
    # Factor -> class of dims.
    factors: dict[str, int]


@dataclass(frozen=True)
class DimTie:
    """Two classes that a rule relates and that stay apart: other extents, or both on one tensor."""

    first: int
    second: int
    reason: Literal["halo", "apart"]
    node: str


@dataclass
class BoundGraph:
    """Bound graph: classes of dims, the dims of each value, the nodes with their rules."""

    space: DimSpace = field(default_factory=DimSpace)
    dims: dict[ValueKey, tuple[int, ...]] = field(default_factory=dict)
    numbers: dict[int, ValueKey] = field(default_factory=dict)
    nodes: list[BoundNode] = field(default_factory=list)
    ties: list[DimTie] = field(default_factory=list)
    # Parameters, buffers, constants, and values computed from them alone (a cast or transposed weight).
    stored: set[ValueKey] = field(default_factory=set)

    def add_value(self, key: ValueKey, shape: Sequence[int]) -> None:
        self.set_dims(key, [self.space.new(size) for size in shape])

    def set_dims(self, key: ValueKey, dims: Sequence[int]) -> None:
        """Set the dims of a value; a class that the value has already is replaced by a new one."""
        number = len(self.numbers)
        self.numbers[number] = key
        own = []
        for dim in dims:
            if not self.space.attach(dim, number):
                apart = self.space.new(self.space.size(dim))
                self.ties.append(DimTie(dim, apart, "apart", key))
                self.space.attach(apart, number)
                dim = apart
            own.append(dim)
        self.dims[key] = tuple(own)


def bind_graph(exported: Exported, table: RuleTable, discover: Discover | None = None) -> BoundGraph:
    """Return the graph with a rule for every op and all dims tied."""
    binding = BoundGraph()
    placeholders = {node.name: node for node in exported.graph_module.graph.find_nodes(op="placeholder")}
    for placeholder in exported.placeholders:
        node = placeholders[placeholder.node]
        binding.add_value(node.name, node.meta["val"].shape)
        if placeholder.kind != "input":
            binding.stored.add(node.name)
    # Repeated layers make equal calls: each rule is worked out once.
    rules: dict[Call, tuple[Rule, Source, str]] = {}
    for node in exported.graph_module.graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            _bind_node(binding, node, table, discover, rules)
    for bound in binding.nodes:
        _tie_stored(binding, bound)
    binding.space.unite_compounds()
    return binding


def _bind_node(
    binding: BoundGraph,
    node: Node,
    table: RuleTable,
    discover: Discover | None,
    rules: dict[Call, tuple[Rule, Source, str]],
) -> None:
    op = node.target
    assert isinstance(op, torch._ops.OpOverload), f"{node.name} calls {op}, which is no ATen op"
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    call = describe_call(op, args, kwargs, node.meta["val"])
    operands = tuple(
        value.name if isinstance(value, Node) else None
        for value in operands_of(op, arguments_by_name(op, node.args, node.kwargs))
    )
    if call in rules:
        rule, source, reason = rules[call]
    else:
        labels = tuple(None if key is None else tuple(map(binding.space.find, binding.dims[key])) for key in operands)
        rule, source, reason = _rule_of(op, call, labels, table, discover)
        # A discovery depends on which dims are known to be equal, not on the call alone.
        if source == "table":
            rules[call] = rule, source, reason
    outputs = tuple(_output_keys(node, len(flat_results(node.meta["val"]))))
    bound = BoundNode(node, call, rule, source, reason, operands, outputs, {})
    binding.nodes.append(bound)
    _tie_activations(binding, bound)
    present = [key for key in operands if key is not None]
    if present and binding.stored.issuperset(present) and not rule.random:
        binding.stored.update(key for key in outputs if key is not None)


def _rule_of(
    op: torch._ops.OpOverload,
    call: Call,
    labels: tuple[tuple[int, ...] | None, ...],
    table: RuleTable,
    discover: Discover | None,
) -> tuple[Rule, Source, str]:
    """Return the rule of a call, its source, and the reason for a rule outside of the table."""
    reason = f"the table has no rule for {op}"
    if str(op) in table:
        try:
            rule = table[str(op)].rule(call)
            factor_sizes(rule, call)
        except RuleError as error:
            reason = str(error)
        else:
            return rule, "table", ""
    found = discover(op, call, labels) if discover else None
    if found is not None:
        return found, "discovered", reason
    if str(op) not in table:
        reason = no_rule_message(op, call, labels)
    return replicated_rule(call), "replicated", reason


def replicated_rule(call: Call) -> Rule:
    """Return the rule of an unknown op: no dim may be split."""
    ranks = [None if spec is None else spec.rank for spec in (*call.operands, *call.outputs)]
    names = iter(fresh_names(sum(rank or 0 for rank in ranks), set()))
    sides = [None if rank is None else Operand(tuple((next(names),) for _ in range(rank))) for rank in ranks]
    operands, outputs = tuple(sides[: len(call.operands)]), tuple(sides[len(call.operands) :])
    whole = frozenset(name for side in sides if side for name in side.factors)
    return Rule(operands, outputs, whole=whole)


def _output_keys(node: Node, count: int) -> Iterator[ValueKey | None]:
    """Yield the node name of each result; None for a result without a getitem."""
    if isinstance(node.meta["val"], torch.Tensor):
        yield node.name
        return
    items = {user.args[1]: user.name for user in node.users if user.target is operator.getitem}
    yield from (items.get(i) for i in range(count))


# -- ties -------------------------------------------------------------------------------------------------------------


def _tie_activations(binding: BoundGraph, bound: BoundNode) -> None:
    """Tie the activation operands by common factors, then set the dims of the results."""
    space = binding.space
    compounds: list[tuple[int, Term]] = []
    for operand, key in zip(bound.rule.operands, bound.operands, strict=False):
        if operand is None or key is None or key in binding.stored:
            continue
        for dim, term in zip(binding.dims[key], operand.terms, strict=True):
            if len(term) == 1:
                _tie(binding, bound, term[0], dim)
            elif term:
                compounds.append((dim, term))
    sizes = factor_sizes(bound.rule, bound.call)
    for name, size in sizes.items():
        bound.factors.setdefault(name, space.new(size))
    # Compounds need the classes of all their factors, so they come after the plain terms.
    for dim, term in compounds:
        if not space.merge(dim, space.compound(bound.factors[name] for name in term)):
            binding.ties.append(
                DimTie(dim, space.compound(bound.factors[name] for name in term), "apart", bound.node.name)
            )
    for i, (operand, spec) in enumerate(zip(bound.rule.outputs, bound.call.outputs, strict=True)):
        key = bound.outputs[i]
        if operand is None or spec is None or key is None:
            continue
        dims = []
        for term, size in zip(operand.terms, spec.shape, strict=True):
            dim = space.compound(bound.factors[name] for name in term) if term else space.new(size)
            # A window makes the result of a halo factor shorter than the operand.
            if space.size(dim) != size:
                outside = space.new(size)
                binding.ties.append(DimTie(dim, outside, "halo", bound.node.name))
                dim = outside
            dims.append(dim)
        binding.set_dims(key, dims)


def _tie(binding: BoundGraph, bound: BoundNode, factor: str, dim: int) -> None:
    known = bound.factors.setdefault(factor, dim)
    if not binding.space.merge(known, dim):
        same_size = binding.space.size(known) == binding.space.size(dim)
        binding.ties.append(DimTie(known, dim, "apart" if same_size else "halo", bound.node.name))


def _tie_stored(binding: BoundGraph, bound: BoundNode) -> None:
    """Tie the dims of parameters and buffers to the factors of their ops."""
    space = binding.space
    for operand, key in zip(bound.rule.operands, bound.operands, strict=False):
        if operand is None or key is None or key not in binding.stored:
            continue
        for dim, term in zip(binding.dims[key], operand.terms, strict=True):
            if len(term) == 1:
                _tie(binding, bound, term[0], dim)
            elif term:
                compound = space.compound(bound.factors[name] for name in term)
                if not space.merge(dim, compound):
                    binding.ties.append(DimTie(compound, dim, "apart", bound.node.name))
