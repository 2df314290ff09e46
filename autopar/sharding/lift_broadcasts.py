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
from autopar.sharding.choices import BROADCAST
from autopar.sharding.edited_assignment import EditedAssignment, names_axis, only_result, with_broadcast

__all__ = ["lift_broadcasts", "lift_broadcasts_of"]


def lift_broadcasts(graph: NamedGraph, assignment: Assignment, pinned: Collection[str]) -> Assignment:
    """Return the assignment with broadcasts of all but `pinned` ops moved up."""
    edited = EditedAssignment(graph, assignment, pinned)
    lift_broadcasts_of(edited)
    return edited.assignment


def lift_broadcasts_of(edited: EditedAssignment) -> None:
    """Move broadcasts up, in place."""
    for axis, size in edited.axes.items():
        # From the end of the graph, so that a chain of ops moves as a whole before its parts are tried.
        for node in reversed(edited.graph.nodes) if size > 1 else ():
            _try(edited, node, axis)


def _try(edited: EditedAssignment, node: NamedNode, axis: str) -> None:
    lifted: dict[str, OpAssignment] = {}
    parameters: set[str] = set()
    if not _lift(edited, node, axis, lifted, parameters):
        return
    tensors = edited.graph.tensors
    size = sum(prod(tensors[parameter].shape) for parameter in parameters)
    # The gradients of the parameters are then summed instead of that of the value: never sum more elements.
    if size > prod(tensors[only_result(node)].shape):
        return
    for name, op_assignment in lifted.items():
        edited.ops[edited.makers[name].name] = op_assignment
        value = edited.values[name]
        edited.values[name] = replace(value, broadcast=value.broadcast | {axis})


def _lift(
    edited: EditedAssignment, node: NamedNode, axis: str, lifted: dict[str, OpAssignment], parameters: set[str]
) -> bool:
    """Return whether an op and its makers can be broadcast along an axis.

    Add their assignments to `lifted` and the parameters that they read to `parameters`.
    """
    name, tensors = only_result(node), edited.graph.tensors
    if not name or name in edited.graph.outputs or node.name in edited.pinned:
        return False
    if not tensors[name].requires_grad or names_axis(edited.ops[node.name], axis):
        return False
    if not all(edited.takes_broadcast(user, name, axis, lifted) for user in edited.users.get(name, ())):
        return False
    passed = edited.passed(node, axis, BROADCAST)
    if passed is None:
        return False
    lifted[name] = with_broadcast(passed, axis)
    for operand in dict.fromkeys(node.operands):
        if operand is None or not tensors[operand].requires_grad:
            continue
        if tensors[operand].kind == "param":
            if axis in edited.values[operand].axes:
                return False
            parameters.add(operand)
        elif operand not in edited.makers or not _lift(edited, edited.makers[operand], axis, lifted, parameters):
            return False
    return bool(parameters)
