"""Dispatch the rows of experts once for a whole block: rows stand by expert from its first to its last product.

`undo_sort` leaves one `expert_rows` for each product of a block, with rows in the order of the tokens. Here the
products of one key and the row-wise ops between them work on routed rows (`autopar/rules/ops/routed.py`). A value that
enters is dispatched, one that leaves is combined. A bias of each expert that is added to a product is its operand.

Input::

    hidden = relu(expert_rows(x, up, key) + bias[key])
    y = expert_rows(hidden, down, key)
Output::

    hidden = relu(grouped(dispatch(x, key), up, bias))
    y = combine(grouped(hidden, down), key)
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from autopar.ir.values import ROUTED
from autopar.rules.call import describe_call, operands_of
from autopar.rules.ops.routed import COMBINE, DISPATCH, GROUPED_ROWS
from autopar.rules.registry import rule_table
from autopar.tracing.passes.edit import arguments_of, insert
from autopar.tracing.passes.undo_sort import keeps_rows_apart

__all__ = ["route_rows"]

aten = torch.ops.aten
# Arguments of row-wise ops that do not depend on the number of rows.
LENGTHS = frozenset(("split_size", "split_sizes", "start"))


def route_rows(graph: Graph) -> None:
    """Rewrite, in place, the products by expert and all row-wise ops between them."""
    products = [node for node in graph.nodes if node.target is torch.ops.autopar.expert_rows.default]
    for key in dict.fromkeys(node.args[2] for node in products):
        block = _Block(graph, [node for node in products if node.args[2] is key])
        if block.groups > 1:
            block.rewrite()


class _Block:
    """Products of one routing, with the ops between them."""

    def __init__(self, graph: Graph, products: list[Node]) -> None:
        self.graph = graph
        self.key: Node = products[0].args[2]  # type: ignore[assignment]
        self.groups: int = products[0].args[1].meta["val"].shape[0]  # type: ignore[union-attr]
        # A product, or the sum of it and its bias, with the arguments of the grouped product.
        self.products: dict[Node, tuple[Any, ...]] = {}
        for node in products:
            rows, matrices, _, product = node.args
            added = _bias(node, self.key)
            self.products[added[0] if added else node] = rows, matrices, added[1] if added else None, product
        self.made: dict[Node, Node] = {}
        self.dispatched: dict[Node, Node] = {}

    def rewrite(self) -> None:
        inside = self._inside()
        for node in [node for node in self.graph.nodes if node in inside]:
            if node in self.products:
                rows, matrices, bias, product = self.products[node]
                routed = self.made.get(rows) or self._dispatch(rows, node)
                made = insert(node, GROUPED_ROWS, routed, matrices, bias, product)
            else:
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda one: self.made.get(one, one))
                made = insert(node, node.target, *args, **kwargs)
            made.meta[ROUTED] = self.groups
            self.made[node] = made
            if any(user not in inside for user in node.users) and isinstance(node.meta["val"], torch.Tensor):
                back = insert(node, COMBINE, made, self.key, before=node.next)
                inner = {user for user in node.users if user in inside}
                node.replace_all_uses_with(back, delete_user_cb=lambda user, inner=inner: user not in inner)
                back.meta.update({name: value for name, value in node.meta.items() if name in ("named", "constrain")})

    def _dispatch(self, rows: Node, before: Node) -> Node:
        if rows not in self.dispatched:
            made = insert(before, DISPATCH, rows, self.key, self.groups)
            made.meta[ROUTED] = self.groups
            self.dispatched[rows] = made
        return self.dispatched[rows]

    def _inside(self) -> set[Node]:
        """Return the products, and the row-wise ops on whose results another product depends."""
        after = set(self.products)
        for node in self.graph.nodes:
            if node not in after and _is_row_wise(node, after):
                after.add(node)
        before: set[Node] = set()
        pending = [rows for rows, *_ in self.products.values()]
        while pending:
            node = pending.pop()
            if node in after and node not in before:
                before.add(node)
                pending += [] if node in self.products else node.all_input_nodes
        # Other results of an op of the block, such as the parts of a split, are taken out of its routed result.
        taken = {node for node in after if node.target is operator.getitem and node.args[0] in before}
        return before | taken | set(self.products)


def _bias(product: Node, key: Node) -> tuple[Node, Node] | None:
    """Return the sum of a product and its expert's bias, with the table of biases; None without one."""
    for user in product.users if len(product.users) == 1 else ():
        if user.target is not aten.add.Tensor or arguments_of(user)["alpha"] != 1:
            continue
        other = next((one for one in user.args if one is not product), None)
        if not isinstance(other, Node) or other.target is not aten.index.Tensor or list(other.args[1]) != [key]:  # type: ignore[arg-type]
            continue
        table: Node = other.args[0]  # type: ignore[assignment]
        if table.meta["val"].dim() == 2 and table.meta["val"].dtype == product.meta["val"].dtype:
            return user, table
    return None


def _is_row_wise(node: Node, ours: set[Node]) -> bool:
    """Return True for an op that treats its rows, all of this block, one by one."""
    if node.op != "call_function" or ours.isdisjoint(node.all_input_nodes):
        return False
    if node.target is operator.getitem:
        return True
    entry = rule_table().get(str(node.target))
    if entry is None or not isinstance(node.target, torch._ops.OpOverload):
        return False
    values = torch.fx.node.map_arg((node.args, dict(node.kwargs)), lambda one: one.meta["val"])
    rule = entry.rule(describe_call(node.target, *values, node.meta["val"]))
    words = {word.partition("=")[0] for word in rule.localise}
    if rule.random or rule.indices or rule.lowerings or not words <= LENGTHS:
        return False
    operands = [one if isinstance(one, Node) else None for one in operands_of(node.target, arguments_of(node))]
    return keeps_rows_apart(rule, operands, ours & set(node.all_input_nodes))
