"""Give the experts of a traced model a fixed capacity: rows in slots of each sample, in place of routed rows.

Routed rows have sizes that depend on data, which the host reads for each exchange. Rows in slots have none. An expert
takes its first rows of each sample, up to the capacity; others are dropped, and add nothing to their token. The ops
between the products stay; they work on slots.

Input::

    y = combine(grouped(relu(grouped(dispatch(x, key), up)), down), key)
Output::

    slots = reshape(take_slots(x, key, groups=8, slots=40))
    y = put_slots(reshape(grouped(relu(grouped(slots, up)), down)), key)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, prod
from typing import Any

import torch
from torch.fx import Graph, Node

from autopar.errors import AutoparError
from autopar.ir.fx_graphs import remove_dead
from autopar.ir.graph import NamedGraph
from autopar.ir.values import ROUTED, SLOTTED
from autopar.rules.ops.routed import COMBINE, DISPATCH
from autopar.rules.ops.slots import PUT_SLOTS, TAKE_SLOTS
from autopar.tracing.name_again import name_again
from autopar.tracing.passes.edit import insert
from autopar.tracing.passes.edit import replace as replace_node

__all__ = ["NoCapacity", "slots_of_capacity", "with_capacity"]

aten = torch.ops.aten


class NoCapacity(AutoparError):
    """A model whose experts cannot have a capacity; `fix` says what the user can do."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what}\nfix: {fix}")
        self.what, self.fix = what, fix


def slots_of_capacity(rows: int, groups: int, factor: float) -> int:
    """Return the slots of a group for the rows of a sample: `factor` times the mean, rounded up."""
    # A factor such as 1.1 is not exact, and its product with the mean may lie just above a whole number.
    return min(rows, max(1, ceil(factor * rows / groups - 1e-9)))


def with_capacity(graph: NamedGraph, factor: float) -> NamedGraph:
    """Return the graph with routed rows in slots; the graph itself if they are already. Raises NoCapacity."""
    if graph.capacity == factor:
        return graph
    if graph.capacity is not None or graph.loss_pieces is not None or graph.fold is not None:
        raise NoCapacity("the graph was changed by a plan already", "give the graph of the trace")
    known: dict[float, NamedGraph] = graph.__dict__.setdefault("_with_capacity", {})
    if factor not in known:
        known[factor] = _Slotting(graph, factor).run()
    return known[factor]


@dataclass
class _Slotting:
    graph: NamedGraph
    factor: float
    # Nodes on slots, by the node on routed rows that they replace.
    made: dict[Node, Node] = field(default_factory=dict)
    # Keys as `[sample, row]` and their groups, by the node of the keys.
    keys: dict[Node, tuple[Node, int]] = field(default_factory=dict)

    def run(self) -> NamedGraph:
        copied, copies = Graph(), dict[Node, Node]()
        for node in self.graph.exported.graph_module.graph.nodes:
            copies[node] = copied.node_copy(node, copies.__getitem__)
        for node in list(copied.nodes):
            if node.target is DISPATCH:
                self.made[node] = self._take(node)
            elif node.target is COMBINE:
                replace_node(node, self._put(node))
            elif ROUTED in node.meta:
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda one: self.made.get(one, one))
                self.made[node] = self._insert(node, node.target, *args, slotted=node.meta[ROUTED], **kwargs)
        if not self.made:
            raise NoCapacity("the model has no rows that go to experts", "leave 'capacity' out")
        remove_dead(copied)
        return name_again(self.graph, copied, capacity=self.factor)

    def _insert(self, origin: Node, op: object, *args: Any, slotted: int = 0, **kwargs: Any) -> Node:
        """Insert a call on plain tensors, or one whose result has rows in slots of so many groups."""
        made = insert(origin, op, *args, **kwargs)
        made.meta.pop(ROUTED, None)
        if slotted:
            made.meta[SLOTTED] = slotted
        return made

    def _take(self, node: Node) -> Node:
        rows, key, groups = node.args
        assert isinstance(rows, Node), node
        assert isinstance(key, Node), node
        assert isinstance(groups, int), node
        keys = self._keys(key, node, groups)
        samples, each = keys.meta["val"].shape
        rows = self._insert(node, aten.reshape.default, rows, [samples, each, rows.meta["val"].shape[1]])
        slots = slots_of_capacity(each, groups, self.factor)
        taken = self._insert(node, TAKE_SLOTS, rows, keys, groups, slots, slotted=groups)
        shape = [groups * samples * slots, rows.meta["val"].shape[2]]
        return self._insert(node, aten.reshape.default, taken, shape, slotted=groups)

    def _put(self, node: Node) -> Node:
        rows, key = node.args
        assert isinstance(rows, Node), node
        assert isinstance(key, Node), node
        rows, (keys, groups) = self.made[rows], self.keys[key]
        every, width = rows.meta["val"].shape
        samples, each = keys.meta["val"].shape
        rows = self._insert(
            node, aten.reshape.default, rows, [groups, samples, every // groups // samples, width], slotted=groups
        )
        put = self._insert(node, PUT_SLOTS, rows, keys)
        return self._insert(node, aten.reshape.default, put, [samples * each, width])

    def _keys(self, key: Node, before: Node, groups: int) -> Node:
        """Return the keys with a dim of samples, of which each has slots of its own."""
        if key not in self.keys:
            atoms = self.graph.tensors[self._name(key)].atoms
            samples, each = atoms[0].size, prod(atom.size for atom in atoms[1:])
            if len(atoms) < 3:
                raise NoCapacity(
                    "the rows of the experts have no dim of samples, which share a capacity",
                    "give the model tokens as [batch, seq], or leave 'capacity' out",
                )
            self.keys[key] = self._insert(before, aten.reshape.default, key, [samples, each]), groups
        return self.keys[key][0]

    def _name(self, key: Node) -> str:
        return next(name for name, tensor in self.graph.tensors.items() if tensor.node == key.name)
