"""Bind a rule to every op; the factors of the rules tie the dims of the graph together in classes.

A class is a set of physical dims of equal extent that the rules tie together. A class may have parts:
`(heads head_dim)` is one physical dim that a view splits. A merge of two classes with parts merges the parts, split
further where they are cut differently. A merge is refused, as a whole, if it would put one class on one tensor twice
(the two `seq` of attention scores), or if the parts do not fit.

Activations are tied first, in the order of the graph, then parameters. A square weight between two parts of a residual
stream would need one class twice. With this order the stream stays one class, and the weight gets a second one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
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

# -- classes of dims ---------------------------------------------------------------------------------------------------


class DimSpace:
    """All classes of one graph, as numbers; `find` returns the representative of a merged class."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._size: list[int] = []
        self._parts: list[tuple[int, ...]] = []
        self._tensors: list[set[int]] = []
        self._trail: list[Callable[[], None]] = []

    def new(self, size: int) -> int:
        """Return a new class without tensors."""
        self._parent.append(len(self._parent))
        self._size.append(size)
        self._parts.append(())
        self._tensors.append(set())
        return len(self._parent) - 1

    def compound(self, parts: Iterable[int]) -> int:
        """Return the class of a dim made of these parts, major first; parts of size 1 do not count."""
        roots = tuple(self.find(part) for part in parts)
        kept = roots if len(roots) == 1 else tuple(part for part in roots if self._size[part] > 1)
        if len(kept) == 1:
            return kept[0]
        dim = self.new(prod(self._size[part] for part in kept))
        self._parts[dim] = kept
        return dim

    def find(self, dim: int) -> int:
        # No path compression: an undo of a merge restores one parent only.
        root = dim
        while self._parent[root] != root:
            root = self._parent[root]
        return root

    def size(self, dim: int) -> int:
        return self._size[self.find(dim)]

    def parts(self, dim: int) -> tuple[int, ...]:
        """Return the classes that this one consists of, major first; empty if nothing splits it."""
        return tuple(self.find(part) for part in self._parts[self.find(dim)])

    def atoms(self, dim: int) -> Iterator[int]:
        """Yield the smallest classes that this one consists of, major first."""
        parts = self.parts(dim)
        if not parts:
            yield self.find(dim)
        for part in parts:
            yield from self.atoms(part)

    def within(self, dim: int) -> Iterator[int]:
        """Yield the class and its parts, at every level."""
        yield self.find(dim)
        for part in self.parts(dim):
            yield from self.within(part)

    def tensors(self, dim: int) -> frozenset[int]:
        """Return the tensors that have this class, as a dim or inside a compound."""
        return frozenset(self._tensors[self.find(dim)])

    def attach(self, dim: int, tensor: int) -> bool:
        """Add a class as a dim of a tensor; False, and no change, if the tensor has it already."""
        return self._all_or_nothing(lambda: self._touch(dim, {tensor}))

    def merge(self, first: int, second: int) -> bool:
        """Merge two classes; False, and no change, if that is refused."""
        if self.find(first) == self.find(second):
            return True
        return self._all_or_nothing(lambda: self._merge(first, second))

    def unite_compounds(self) -> None:
        """Merge the compounds that have the same parts."""
        # A merge of two compounds can make those around them equal.
        again = True
        while again:
            again = False
            first: dict[tuple[int, ...], int] = {}
            for dim in range(len(self._parent)):
                parts = self.parts(dim) if self._parent[dim] == dim else ()
                if parts and self.find(first.setdefault(parts, dim)) != dim:
                    again |= self.merge(first[parts], dim)

    # A merge changes many classes before it can fail, and copies of all classes are slow. So each change below appends
    # its inverse to the trail, and a refusal runs the trail backwards.

    def _all_or_nothing(self, change: Callable[[], bool]) -> bool:
        done = change()
        if not done:
            for undo in reversed(self._trail):
                undo()
        self._trail.clear()
        return done

    def _touch(self, dim: int, tensors: set[int]) -> bool:
        root = self.find(dim)
        carried = self._tensors[root]
        if not carried.isdisjoint(tensors):
            return False
        carried |= tensors
        self._trail.append(lambda: carried.difference_update(tensors))
        return all(self._touch(part, tensors) for part in self._parts[root])

    def _merge(self, first: int, second: int) -> bool:
        keep, drop = self.find(first), self.find(second)
        if keep == drop:
            return True
        # The smaller set is copied into the larger one: each entry moves at most log(n) times.
        if len(self._tensors[keep]) < len(self._tensors[drop]):
            keep, drop = drop, keep
        added = set(self._tensors[drop])
        if self._size[keep] != self._size[drop] or not self._tensors[keep].isdisjoint(added):
            return False
        kept_parts, dropped_parts = self._parts[keep], self._parts[drop]
        kept_tensors = set(self._tensors[keep]) if dropped_parts and not kept_parts else set()
        self._set_parent(drop, keep)
        carried = self._tensors[keep]
        carried |= added
        self._trail.append(lambda: carried.difference_update(added))
        if kept_parts and dropped_parts:
            return self._merge_parts(list(kept_parts), list(dropped_parts))
        if kept_parts:
            return all(self._touch(part, added) for part in kept_parts)
        self._set_parts(keep, dropped_parts)
        return all(self._touch(part, kept_tensors) for part in dropped_parts)

    def _merge_parts(self, left: list[int], right: list[int]) -> bool:
        """Merge two partitions of one dim, major first; split further where one is coarser."""
        while left and right:
            first, second = self.find(left[0]), self.find(right[0])
            if self._size[first] == self._size[second]:
                if not self._merge(first, second):
                    return False
                del left[0], right[0]
                continue
            coarse, side = (first, left) if self._size[first] > self._size[second] else (second, right)
            fine = second if coarse == first else first
            if not self._parts[coarse] and not self._cut(coarse, self._size[fine]):
                return False
            side[:1] = self._parts[coarse]
        return not left and not right

    def _cut(self, dim: int, major: int) -> bool:
        """Split a class into a major part of this size and the rest."""
        if self._size[dim] % major:
            return False
        parts = (self.new(major), self.new(self._size[dim] // major))
        self._set_parts(dim, parts)
        return all(self._touch(part, set(self._tensors[dim])) for part in parts)

    def _set_parent(self, dim: int, parent: int) -> None:
        self._parent[dim] = parent
        self._trail.append(lambda: self._parent.__setitem__(dim, dim))

    def _set_parts(self, dim: int, parts: tuple[int, ...]) -> None:
        before = self._parts[dim]
        self._parts[dim] = parts
        self._trail.append(lambda: self._parts.__setitem__(dim, before))


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
