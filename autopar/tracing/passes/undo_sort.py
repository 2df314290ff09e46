"""Compute in the original order rows that a model sorts by expert and puts back.

Each value between the sort and its inverse is a permutation of rows. An op that treats rows one by one gives the same
rows in the original order, and a grouped product is `expert_rows` there. Without the sort all of it splits by batch.
Values on random experts show which indices undo the sort, and that the groups end where the experts' rows do.

Input::

    experts, order = sort(chosen)
    rows = grouped_mm(x[order], w, ends)
    y = rows[argsort(order)]
Output::

    y = expert_rows(x, w, chosen)
"""

from __future__ import annotations

import operator
from math import isqrt
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from autopar.rules.call import describe_call, operands_of
from autopar.rules.notation import FactorKind, Rule
from autopar.rules.ops.matmul import GROUPED
from autopar.rules.registry import rule_table
from autopar.tracing.passes.edit import arguments_of, insert, replace, value_of

__all__ = ["keeps_rows_apart", "undo_sort"]

aten = torch.ops.aten
SORTS = (aten.sort.default, aten.sort.stable)
ARGSORTS = (aten.argsort.default, aten.argsort.stable)
LOOKUPS = (aten.index.Tensor, aten.index_select.default)
# Most rows to draw and sort in a check, 64 MiB of int64; of more rows a part is taken that has between these.
MOST_ROWS = 2**23
PART = 2**12, 2**20
# Most experts of a token. Whole numbers that are the rows over so many at most are numbers of rows or tokens.
MOST_CHOSEN = 64


def undo_sort(graph: Graph) -> None:
    """Rewrite, in place, the values that are put back into the original order."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in (*SORTS, *ARGSORTS) and node.args[0].meta["val"].dim() == 1:
            _SortedRows(node).undo()


class _SortedRows:
    """One sort of a vector, with the values in its order and their twins in the original order."""

    def __init__(self, sort: Node) -> None:
        assert isinstance(sort.args[0], Node), sort
        self.graph = sort.graph
        self.keys: Node = sort.args[0]
        self.count: int = self.keys.meta["val"].shape[0]
        # Rows of a check: many of them are checked on a part.
        least, most = PART
        share = _least_divisor(self.count, -(-self.count // most)) if self.count > most else 1
        self.share = share if self.count // share >= least else 1
        self.checked = self.count // self.share
        parts = {user.args[1]: user for user in sort.users} if sort.target in SORTS else {1: sort}
        self.ordered, self.order = parts.get(0), parts.get(1)
        # Value in the sorted order -> the same rows in the original order; None for a value that is not sorted.
        self.twins: dict[Node, Node | None] = {}
        if self.ordered is not None:
            self.twins[self.ordered] = self.keys
        # Number of experts -> values for a check.
        self.drawn: dict[int, dict[Node, Tensor]] = {}

    def undo(self) -> None:
        """Replace each value that is put back by its twin."""
        if self.order is None or not 1 < self.checked <= MOST_ROWS:
            return
        depending = {self.order} if self.ordered is None else {self.order, self.ordered}
        for node in list(self.graph.nodes):
            if not depending.isdisjoint(node.all_input_nodes):
                depending.add(node)
                made = self._put_back(node, depending)
                if made is not None:
                    depending.discard(node)
                    replace(node, made)

    # -- values of indices

    def _known(self, experts: int) -> dict[Node, Tensor]:
        """Return random keys below `experts`, with the results of the sort on them."""
        if experts in self.drawn:
            return self.drawn[experts]
        # A fixed seed, so that a model is traced alike each time.
        keys = torch.randint(0, experts, (self.checked,), generator=torch.Generator().manual_seed(experts))
        keys = keys.to(self.keys.meta["val"].dtype)
        ordered, order = keys.sort(stable=True)
        known = {self.keys: keys}
        # Counts of rows per expert are often computed from the keys before they are flattened.
        source = self.keys.args[0] if self.keys.target is aten.reshape.default else None
        if isinstance(source, Node):
            known[source] = keys.reshape([self._resize(size) for size in source.meta["val"].shape])
        if self.ordered is not None:
            known[self.ordered] = ordered
        if self.order is not None:
            known[self.order] = order
        self.drawn[experts] = known
        return known

    def _resize(self, number: int) -> int:
        """Return a number of rows or tokens in a check; other numbers as they are."""
        if number <= 0 or self.count % number or self.count // number > MOST_CHOSEN or number % self.share:
            return number
        return number // self.share

    def _value(self, node: Node, experts: int) -> Tensor | None:
        """Return the value that an index has in a check; None if it depends on other values."""
        resize = self._resize if self.share > 1 else None
        return value_of(node, self._known(experts), MOST_ROWS * self.share, resize)

    def _index(self, index: Node) -> tuple[Tensor, Tensor] | None:
        """Return the values of an index and of the order; None if the index depends on other values."""
        # Two experts are enough to see where rows move.
        value = self._value(index, 2)
        assert self.order is not None, "undo() returns early without an order"
        return None if value is None or value.dim() != 1 else (value, self._known(2)[self.order])

    def _divisor(self, index: Node, rows: int) -> int | None:
        """Return `k` for an index `order // k`, with `k` chosen experts for each of `rows`; else None."""
        times, rest = divmod(self.count, rows)
        found = None if rest else self._index(index)
        return times if found is not None and torch.equal(found[0], found[1] // times) else None

    # -- where values leave the order

    def _put_back(self, node: Node, depending: set[Node]) -> Node | None:
        """Return the result of a node that puts sorted rows back, from their twins; None for other nodes."""
        if node.target in LOOKUPS:
            source, index = _lookup(node)
            if source in depending and index in depending:
                found = self._index(index)
                # The inverse permutation, applied to the order, counts 0, 1, 2 ...
                if found is not None and torch.equal(found[0][found[1]], torch.arange(self.checked)):
                    return self._twin(source, node)
        elif node.target is aten.index_add.default:
            base, dim, index, source, alpha = arguments_of(node).values()
            rows = base.meta["val"].shape[0]
            if dim == 0 and alpha == 1 and source in depending and index in depending:
                times, twin = self._divisor(index, rows), self._twin(source, node)
                if times is not None and twin is not None:
                    if times > 1:
                        shape = [rows, times, *twin.meta["val"].shape[1:]]
                        twin = insert(node, aten.sum.dim_IntList, insert(node, aten.reshape.default, twin, shape), [1])
                    return insert(node, aten.add.Tensor, base, twin)
        return None

    # -- values in the original order

    def _twin(self, value: Node, before: Node) -> Node | None:
        """Return a sorted value in the original order, made before a node; None for one that is not sorted."""
        if value not in self.twins:
            # Set before the recursion, so that a value without twin is tried once.
            self.twins[value] = None
            if value.op == "call_function":
                self.twins[value] = self._make_twin(value, before)
        return self.twins[value]

    def _make_twin(self, value: Node, before: Node) -> Node | None:
        if value.target is operator.getitem:
            twin = self._twin(value.args[0], before)  # type: ignore[arg-type]
            return None if twin is None else insert(value, operator.getitem, twin, value.args[1], before=before)
        if not isinstance(value.target, torch._ops.OpOverload):
            return None
        if value.target in LOOKUPS:
            source, index = _lookup(value)
            if source is not None and index is not None and source.meta["val"].dim() > 0:
                times = self._divisor(index, source.meta["val"].shape[0])
                if times == 1:
                    return source  # type: ignore[no-any-return]
                if times is not None:
                    # Each row as often as it was looked up: once for each of its experts.
                    rows, *rest = source.meta["val"].shape
                    added = insert(value, aten.unsqueeze.default, source, 1, before=before)
                    wide = insert(value, aten.expand.default, added, [rows, times, *rest], before=before)
                    return insert(value, aten.reshape.default, wide, [rows * times, *rest], before=before)
        if str(value.target) in GROUPED:
            return self._product(value, before)
        return self._row_by_row(value, before)

    def _product(self, value: Node, before: Node) -> Node | None:
        """Return a grouped product as `expert_rows`; None if its groups are not the experts' rows."""
        rows, matrices, ends, *rest = arguments_of(value).values()
        if matrices.meta["val"].dim() != 3 or any(value is not None for value in rest):
            return None
        experts = matrices.meta["val"].shape[0]
        known = self._known(experts)
        found = self._value(ends, experts)
        wanted = torch.bincount(known[self.keys].long(), minlength=experts).cumsum(0)
        twin = self._twin(rows, before)
        if twin is None or found is None or not torch.equal(found.long(), wanted):
            return None
        op = torch.ops.autopar.expert_rows.default
        return insert(value, op, twin, matrices, self.keys, str(value.target), before=before)

    def _row_by_row(self, value: Node, before: Node) -> Node | None:
        """Return the same op on the twins of its operands; None if its rule mixes rows."""
        twins = {source: self._twin(source, before) for source in value.all_input_nodes}
        ours = {source: twin for source, twin in twins.items() if twin is not None}
        entry = rule_table().get(str(value.target))
        if not ours or entry is None:
            return None
        values = torch.fx.node.map_arg((value.args, dict(value.kwargs)), lambda node: node.meta["val"])
        rule = entry.rule(describe_call(value.target, *values, value.meta["val"]))  # type: ignore[arg-type]
        operands = [
            operand if isinstance(operand, Node) else None
            for operand in operands_of(value.target, arguments_of(value))  # type: ignore[arg-type]
        ]
        # A random op draws its numbers in the order of the rows.
        if rule.random or not keeps_rows_apart(rule, operands, set(ours)):
            return None
        args, kwargs = torch.fx.node.map_arg((value.args, dict(value.kwargs)), lambda node: ours.get(node, node))
        return insert(value, value.target, *args, before=before, **kwargs)


def _least_divisor(number: int, least: int) -> int:
    """Return the least divisor from `least` up of a number."""
    small = [one for one in range(1, isqrt(number) + 1) if number % one == 0]
    return min(one for divisor in small for one in (divisor, number // divisor) if one >= least)


def _lookup(node: Node) -> tuple[Any, Any]:
    """Return source and index of a lookup along dim 0; twice None for another lookup."""
    if node.target is aten.index.Tensor:
        source, indices = node.args[:2]
        single = isinstance(indices, list | tuple) and len(indices) == 1
        return (source, indices[0]) if single else (None, None)  # type: ignore[index]
    arguments = arguments_of(node)
    return (arguments["self"], arguments["index"]) if arguments["dim"] == 0 else (None, None)


def keeps_rows_apart(rule: Rule, operands: list[Node | None], ours: set[Node]) -> bool:
    """Return True if the first dim of `ours` is one parallel factor, first in all results and in no other operand."""
    firsts = {
        operand.terms[0] if operand is not None and operand.terms else None
        for operand, node in zip(rule.operands, operands, strict=False)
        if node in ours
    }
    first = firsts.pop() if len(firsts) == 1 else None
    if first is None or len(first) != 1 or rule.kinds.get(first[0]) is not FactorKind.PARALLEL:
        return False
    others = [operand for operand, node in zip(rule.operands, operands, strict=False) if node not in ours and operand]
    results = [operand for operand in rule.outputs if operand is not None]
    return all(first[0] not in operand.factors for operand in others) and all(
        operand.terms[:1] == (first,) for operand in results
    )
