"""Sorting that is undone: rows sorted by expert, multiplied group by group, and put back where they were.

Every value in between is one of the original order with its rows moved. Ops that treat rows one by one do the same in
the original order, and products by group are `expert_rows` there; so the sort is left out, and what is computed can be
split by batch. Which indices undo the sort, and that the groups end where the experts' rows do, is found by their
values on numbers drawn at random.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from autopar.rules.call import describe_call, operands_of
from autopar.rules.notation import FactorKind, Rule
from autopar.rules.ops.matmul import GROUPED
from autopar.rules.registry import rule_table
from autopar.tracing.passes.edit import arguments_of, insert, replaced
from autopar.tracing.passes.paired_index import value_of

__all__ = ["undo_sorting"]

aten = torch.ops.aten
SORTS = (aten.sort.default, aten.sort.stable)
ARGSORTS = (aten.argsort.default, aten.argsort.stable)
LOOKUPS = (aten.index.Tensor, aten.index_select.default)
# More are not drawn and sorted to see what an index does.
MOST_ROWS = 2**23


def undo_sorting(graph: Graph) -> None:
    """Compute in the original order what is put back into it, in place."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in (*SORTS, *ARGSORTS) and node.args[0].meta["val"].dim() == 1:
            _SortedRows(node).undo()


class _SortedRows:
    """One sort of numbers in a row, with the values that stand in its order."""

    def __init__(self, sort: Node) -> None:
        assert isinstance(sort.args[0], Node), sort
        self.graph = sort.graph
        self.keys: Node = sort.args[0]
        self.count: int = self.keys.meta["val"].shape[0]
        parts = {user.args[1]: user for user in sort.users} if sort.target in SORTS else {1: sort}
        self.ordered, self.order = parts.get(0), parts.get(1)
        self.twins: dict[Node, Node | None] = {}
        """Values in the sorted order, and the same in the original one; None for other values."""
        if self.ordered is not None:
            self.twins[self.ordered] = self.keys
        self.drawn: dict[int, dict[Node, Tensor]] = {}

    def undo(self) -> None:
        if self.order is None or not 1 < self.count <= MOST_ROWS:
            return
        depending = {self.order} if self.ordered is None else {self.order, self.ordered}
        for node in list(self.graph.nodes):
            if not depending.isdisjoint(node.all_input_nodes):
                depending.add(node)
                made = self._put_back(node, depending)
                if made is not None:
                    depending.discard(node)
                    replaced(node, made)

    # -- values of indices

    def _known(self, experts: int) -> dict[Node, Tensor]:
        """Numbers drawn for what is sorted, and what the sort makes of them."""
        if experts not in self.drawn:
            self.drawn[experts] = self._draw(experts)
        return self.drawn[experts]

    def _draw(self, experts: int) -> dict[Node, Tensor]:
        drawn = torch.randint(0, experts, (self.count,), generator=torch.Generator().manual_seed(experts))
        drawn = drawn.to(self.keys.meta["val"].dtype)
        ordered, order = drawn.sort(stable=True)
        known = {self.keys: drawn}
        source = self.keys.args[0] if self.keys.target is aten.reshape.default else None
        if isinstance(source, Node):
            known[source] = drawn.reshape(source.meta["val"].shape)
        if self.ordered is not None:
            known[self.ordered] = ordered
        if self.order is not None:
            known[self.order] = order
        return known

    def _index(self, index: Node) -> tuple[Tensor, Tensor] | None:
        """The value of an index, and of the sort's order, where it depends on nothing else."""
        known = self._known(2)
        value = value_of(index, known, MOST_ROWS)
        assert self.order is not None, "there is an order"
        return None if value is None or value.dim() != 1 else (value, known[self.order])

    def _divisor(self, index: Node, rows: int) -> int | None:
        """`k` where an index is the order itself divided by `k`, with `rows * k` in all."""
        times, rest = divmod(self.count, rows)
        found = None if rest else self._index(index)
        return times if found is not None and torch.equal(found[0], found[1] // times) else None

    def _undoes(self, index: Node) -> bool:
        found = self._index(index)
        return found is not None and torch.equal(found[0][found[1]], torch.arange(self.count))

    # -- where values leave the order

    def _put_back(self, node: Node, depending: set[Node]) -> Node | None:
        """Return the result, in the original order, of a node that puts a sorted value back."""
        if node.target in LOOKUPS:
            source, index = _lookup(node)
            if source in depending and index in depending and self._undoes(index):
                return self._twin(source, node)
        elif node.target is aten.index_add.default:
            base, dim, index, source = (arguments_of(node)[name] for name in ("self", "dim", "index", "source"))
            rows = base.meta["val"].shape[0]
            if dim == 0 and arguments_of(node)["alpha"] == 1 and source in depending and index in depending:
                times, twin = self._divisor(index, rows), self._twin(source, node)
                if times is not None and twin is not None:
                    return insert(node, aten.add.Tensor, base, self._summed(node, twin, rows, times))
        return None

    def _summed(self, node: Node, twin: Node, rows: int, times: int) -> Node:
        if times == 1:
            return twin
        shape = [rows, times, *twin.meta["val"].shape[1:]]
        return insert(node, aten.sum.dim_IntList, insert(node, aten.reshape.default, twin, shape), [1])

    # -- values in the original order

    def _twin(self, value: Node, before: Node) -> Node | None:
        """A sorted value in the original order, made before a node; None for a value that is not sorted."""
        if value not in self.twins:
            self.twins[value] = None
            if value.op == "call_function":
                self.twins[value] = self._made(value, before)
        return self.twins[value]

    def _made(self, value: Node, before: Node) -> Node | None:
        if value.target is operator.getitem:
            twin = self._twin(value.args[0], before)  # type: ignore[arg-type]
            return None if twin is None else insert(value, operator.getitem, twin, value.args[1], before=before)
        if not isinstance(value.target, torch._ops.OpOverload):
            return None
        if value.target in LOOKUPS:
            source, index = _lookup(value)
            if source is not None and index is not None and source.meta["val"].dim() > 0:
                times = self._divisor(index, source.meta["val"].shape[0])
                if times is not None:
                    return self._repeated(value, source, times, before)
        if str(value.target) in GROUPED:
            return self._product(value, before)
        return self._row_by_row(value, before)

    def _repeated(self, value: Node, source: Node, times: int, before: Node) -> Node:
        """Each row of a value as often as it was looked up."""
        if times == 1:
            return source
        rows, *rest = source.meta["val"].shape
        added = insert(value, aten.unsqueeze.default, source, 1, before=before)
        wide = insert(value, aten.expand.default, added, [rows, times, *rest], before=before)
        return insert(value, aten.reshape.default, wide, [rows * times, *rest], before=before)

    def _product(self, value: Node, before: Node) -> Node | None:
        rows, matrices, ends, *rest = arguments_of(value).values()
        if matrices.meta["val"].dim() != 3 or any(value is not None for value in rest):
            return None
        experts = matrices.meta["val"].shape[0]
        known = self._known(experts)
        found = value_of(ends, known, MOST_ROWS)
        wanted = torch.bincount(known[self.keys].long(), minlength=experts).cumsum(0)
        twin = self._twin(rows, before)
        if twin is None or found is None or not torch.equal(found.long(), wanted):
            return None
        op = torch.ops.autopar.expert_rows.default
        return insert(value, op, twin, matrices, self.keys, str(value.target), before=before)

    def _row_by_row(self, value: Node, before: Node) -> Node | None:
        """The same op in the original order, where its rule says that rows do not meet."""
        twins = {source: self._twin(source, before) for source in value.all_input_nodes}
        ours = {source: twin for source, twin in twins.items() if twin is not None}
        entry = rule_table().get(str(value.target))
        if not ours or entry is None:
            return None
        values = torch.fx.node.map_arg((value.args, dict(value.kwargs)), lambda node: node.meta["val"])
        rule = entry.rule(describe_call(value.target, *values, value.meta["val"]))  # type: ignore[arg-type]
        if rule.random or not _keeps_rows_apart(rule, list(_operands(value)), set(ours)):
            return None
        args, kwargs = torch.fx.node.map_arg((value.args, dict(value.kwargs)), lambda node: ours.get(node, node))
        return insert(value, value.target, *args, before=before, **kwargs)


def _lookup(node: Node) -> tuple[Any, Any]:
    """Return the source of rows and their index, where nothing else is indexed."""
    if node.target is aten.index.Tensor:
        source, indices = node.args[:2]
        single = isinstance(indices, list | tuple) and len(indices) == 1
        return (source, indices[0]) if single else (None, None)  # type: ignore[index]
    arguments = arguments_of(node)
    return (arguments["self"], arguments["index"]) if arguments["dim"] == 0 else (None, None)


def _operands(node: Node) -> Iterator[Node | None]:
    """The operands of a rule, in their order."""
    assert isinstance(node.target, torch._ops.OpOverload), node
    for operand in operands_of(node.target, arguments_of(node)):
        yield operand if isinstance(operand, Node) else None


def _keeps_rows_apart(rule: Rule, operands: list[Node | None], ours: set[Node]) -> bool:
    """Return whether the first dim of our operands is a parallel factor that leads every result and others lack."""
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
