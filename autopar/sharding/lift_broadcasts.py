"""Move broadcasts of values made of parameters alone up to the parameters, if these are no larger.

Propagation begins a broadcast at its use. The gradient of rows of a table, say, is then summed over the batch shards
before it becomes the gradient of the table. If the value is made of parameters alone, the sum may move to the gradient
of the parameters. There it shares a bucket with the others, and no op waits for it alone.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import prod

from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode
from autopar.sharding.assignment import Assignment, OpAssignment
from autopar.sharding.choices import BROADCAST, shardings_of


def lift_broadcasts(graph: NamedGraph, assignment: Assignment, pinned: Collection[str]) -> Assignment:
    """Return the assignment with broadcasts of all but `pinned` ops moved up."""
    return _Lifting(graph, assignment, pinned).run()


class _Lifting:
    def __init__(self, graph: NamedGraph, assignment: Assignment, pinned: Collection[str]) -> None:
        self.graph = graph
        self.assignment = assignment
        self.pinned = pinned
        self.ops = dict(assignment.ops)
        self.values = dict(assignment.values)
        self.makers = {name: node for node in graph.nodes for name in node.outputs if name is not None}
        self.users: dict[str, list[NamedNode]] = {}
        for node in graph.nodes:
            for name in dict.fromkeys(node.operands):
                if name is not None:
                    self.users.setdefault(name, []).append(node)

    def run(self) -> Assignment:
        for axis, size in self.assignment.axes.items():
            # From the end of the graph, so that a chain of ops moves as a whole before its parts are tried.
            for node in reversed(self.graph.nodes) if size > 1 else ():
                self._try(node, axis)
        return replace(self.assignment, ops=self.ops, values=self.values)

    def _try(self, node: NamedNode, axis: str) -> None:
        lifted: dict[str, OpAssignment] = {}
        parameters: set[str] = set()
        if not self._lift(node, axis, lifted, parameters):
            return
        size = sum(prod(self.graph.tensors[parameter].shape) for parameter in parameters)
        # The gradients of the parameters are then summed instead of that of the value: never sum more elements.
        if size > prod(self.graph.tensors[_only(node)].shape):
            return
        for name in lifted:
            self.ops[self.makers[name].name] = lifted[name]
            self.values[name] = replace(self.values[name], broadcast=self.values[name].broadcast | {axis})

    def _lift(self, node: NamedNode, axis: str, lifted: dict[str, OpAssignment], parameters: set[str]) -> bool:
        """Return whether an op and its makers can be broadcast along an axis.

        Add their assignments to `lifted` and the parameters that they read to `parameters`.
        """
        name, op_assignment = _only(node), self.ops[node.name]
        if not name or name in self.graph.outputs or node.name in self.pinned:
            return False
        if not self.graph.tensors[name].requires_grad:
            return False
        shardings = (*op_assignment.operands, *op_assignment.produced, *op_assignment.results)
        if any(sharding is not None and axis in sharding.axes for sharding in shardings):
            return False
        if any(axis == used for used, _ in op_assignment.choice.passes):
            return False
        if not all(self._takes_broadcast(user, name, axis, lifted) for user in self.users.get(name, ())):
            return False
        order = list(self.assignment.axes)
        passes = sorted((*op_assignment.choice.passes, (axis, BROADCAST)), key=lambda one: order.index(one[0]))
        choice = replace(op_assignment.choice, passes=tuple(passes))
        found = shardings_of(self.graph, node, choice)
        if found is None:
            return False
        results = tuple(
            None if result is None else replace(result, broadcast=result.broadcast | {axis})
            for result in op_assignment.results
        )
        lifted[name] = replace(op_assignment, choice=choice, operands=found[0], produced=found[1], results=results)
        for operand in dict.fromkeys(node.operands):
            if operand is None or not self.graph.tensors[operand].requires_grad:
                continue
            if self.graph.tensors[operand].kind == "param":
                if axis in self.values[operand].axes:
                    return False
                parameters.add(operand)
            elif operand not in self.makers or not self._lift(self.makers[operand], axis, lifted, parameters):
                return False
        return bool(parameters)

    def _takes_broadcast(self, user: NamedNode, name: str, axis: str, lifted: dict[str, OpAssignment]) -> bool:
        operands = lifted.get(_only(user), self.ops[user.name]).operands
        uses = (use for operand, use in zip(user.operands, operands, strict=True) if operand == name)
        return all(use is not None and axis in use.broadcast for use in uses)


def _only(node: NamedNode) -> str:
    """Return the name of the only result of an op, or ''."""
    return node.outputs[0] or "" if len(node.outputs) == 1 else ""
