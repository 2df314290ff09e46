"""An assignment while its sums and broadcasts move from op to op."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode
from autopar.sharding.assignment import Assignment, OpAssignment
from autopar.sharding.choices import Passing, shardings_of
from autopar.sharding.sharding import Sharding

__all__ = ["EditedAssignment", "names_axis", "only_result", "with_broadcast"]


class EditedAssignment:
    """Ops and values of an assignment that change, and the makers and users of its values."""

    def __init__(self, graph: NamedGraph, assignment: Assignment, pinned: Collection[str]) -> None:
        self.graph = graph
        self.axes = assignment.axes
        # Ops whose choice stays.
        self.pinned = pinned
        self._given = assignment
        self.ops = dict(assignment.ops)
        self.values = dict(assignment.values)
        self.makers = {name: node for node in graph.nodes for name in node.outputs if name is not None}
        self.users: dict[str, list[NamedNode]] = {}
        for node in graph.nodes:
            for name in dict.fromkeys(node.operands):
                if name is not None:
                    self.users.setdefault(name, []).append(node)

    @property
    def assignment(self) -> Assignment:
        return replace(self._given, ops=self.ops, values=self.values)

    def passed(self, node: NamedNode, axis: str, group: Passing) -> OpAssignment | None:
        """Return an op's assignment with an axis passed through it, before its results change; None if infeasible."""
        given, order = self.ops[node.name], list(self.axes)
        passes = sorted((*given.choice.passes, (axis, group)), key=lambda one: order.index(one[0]))
        choice = replace(given.choice, passes=tuple(passes))
        found = shardings_of(self.graph, node, choice)
        return None if found is None else replace(given, choice=choice, operands=found[0], produced=found[1])

    def takes_broadcast(
        self, user: NamedNode, name: str, axis: str, others: Mapping[str, OpAssignment] | None = None
    ) -> bool:
        """Return whether an op takes a value broadcast at each place; `others`: assignments to come, by result."""
        operands = (others or {}).get(only_result(user), self.ops[user.name]).operands
        uses = (use for operand, use in zip(user.operands, operands, strict=True) if operand == name)
        return all(use is not None and axis in use.broadcast for use in uses)


def with_broadcast(given: OpAssignment, axis: str) -> OpAssignment:
    """Return an op's assignment with broadcast results."""
    results = (one and replace(one, broadcast=one.broadcast | {axis}) for one in given.results)
    return replace(given, results=tuple(results))


def names_axis(given: OpAssignment, axis: str) -> bool:
    """Return whether an axis splits or passes anything of an op."""
    shardings: Sequence[Sharding | None] = (*given.operands, *given.produced, *given.results)
    used = any(sharding is not None and axis in sharding.axes for sharding in shardings)
    return used or any(axis == passed for passed, _ in given.choice.passes)


def only_result(node: NamedNode) -> str:
    """Return the name of the only result of an op, or ''."""
    return node.outputs[0] or "" if len(node.outputs) == 1 else ""
