"""Move sums over ranks along chains of ops to where fewer elements are sent.

Propagation reduces a sum where it arises, and begins a broadcast where it is used: the gradient is then summed there.
Experts of a token, say, give a row each, whose weighted sum is one row; a parallel block gives two sums, which are
added. Where the ops between are linear, the sum moves down to the smaller tensor, and that of a gradient moves up::

    rows = all_reduce(product)              # [2 * T, d]
    out = (rows * weights).view(T, 2, d).sum(1)

becomes ``out = all_reduce((product * weights).view(T, 2, d).sum(1))``, with `weights` broadcast: the small sum of their
gradient is counted too. Pinned ops and tensors keep their sums, and so does a tie.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode
from autopar.sharding.assignment import Assignment, OpAssignment
from autopar.sharding.bound_layout import BoundLayout
from autopar.sharding.choices import BROADCAST, passings_of
from autopar.sharding.edited_assignment import EditedAssignment, names_axis, only_result, with_broadcast
from autopar.sharding.lift_broadcasts import lift_broadcasts_of
from autopar.sharding.sharding import GROUP, MICRO, atoms_of

__all__ = ["move_sums"]

# Ops between a sum and the op that joins it with another one: a dropout, a cast, a reshape.
MOST_ABOVE = 3


def move_sums(bound: BoundLayout, found: Assignment, pinned: Collection[str]) -> Assignment:
    """Return the assignment with sums and broadcasts where they send least; the choice of `pinned` ops stays."""
    stated = {name for name, tensor in bound.graph.tensors.items() if bound.states(tensor).span is not None}
    moves = _Moves(bound.graph, found, pinned, stated)
    moves.run()
    lift_broadcasts_of(moves)
    return moves.assignment


@dataclass(frozen=True)
class _MovedOver:
    """One op that a sum moves over."""

    node: NamedNode
    # As the op runs then; its results are those before the move.
    assignment: OpAssignment
    # Elements that are sent more than before if the sum stands after this op.
    more: float
    # Values whose own sums are joined with this one, each with the ops that its sum moves over to get there.
    joined: tuple[tuple[str, tuple[_MovedOver, ...]], ...] = ()


class _Moves(EditedAssignment):
    def __init__(
        self, graph: NamedGraph, assignment: Assignment, pinned: Collection[str], stated: Collection[str]
    ) -> None:
        super().__init__(graph, assignment, pinned)
        # Tensors that are pinned to be partial, broadcast, or neither.
        self.stated = stated

    def run(self) -> None:
        for axis, size in self.axes.items():
            if size == 1 or axis == MICRO:
                continue
            for node in self.graph.nodes:
                if only_result(node) and self._is_reduced(only_result(node), axis):
                    self._move_down(only_result(node), axis)
            for node in reversed(self.graph.nodes):
                if only_result(node) and self._is_summed_back(only_result(node), axis):
                    self._move_up(only_result(node), axis)

    # -- sums of values, which move down

    def _is_reduced(self, name: str, axis: str) -> bool:
        """Return whether a value is a sum over an axis that is reduced where it arises, and may move."""
        node = self.makers.get(name)
        if node is None or not self._is_free(name) or len(self.users.get(name, ())) != 1 or len(node.outputs) != 1:
            return False
        if not self.graph.tensors[name].shape:
            return False  # a term of a loss: all of these are sent together (`hoist_small_sums`)
        made, result = self.ops[node.name].produced[0], self.ops[node.name].results[0]
        if made is None or result is None or axis not in made.partial or axis in result.axes:
            return False
        return made.splits == result.splits

    def _move_down(self, name: str, axis: str) -> None:
        best, steps, sent = 0, list[_MovedOver](), 0.0
        for step in self._down(name, axis):
            steps.append(step)
            sent += step.more
            if sent < 0:
                best, sent = len(steps), 0.0
        self._run(name, steps[:best], axis)

    def _run(self, name: str, steps: Sequence[_MovedOver], axis: str) -> None:
        """Let the sum of a value move over ops."""
        for step in steps:
            for other, above in step.joined:
                self._run(other, above, axis)
                self._keep(only_result(above[-1].node) if above else other, axis)
            self._keep(name, axis)
            name = only_result(step.node)
            self.ops[step.node.name] = step.assignment

    def _keep(self, name: str, axis: str) -> None:
        """Leave the partial sums of a value as they are made."""
        maker = self.makers[name]
        (result,) = self.ops[maker.name].results
        assert result is not None, name
        self.values[name] = kept = replace(result, partial=result.partial | {axis})
        self.ops[maker.name] = replace(self.ops[maker.name], results=(kept,))

    def _down(self, name: str, axis: str) -> Iterator[_MovedOver]:
        while True:
            (user,) = self.users[name]
            step = self._over(user, name, axis)
            if step is None:
                return
            yield step
            name = only_result(user)
            if not self._is_free(name) or len(self.users.get(name, ())) != 1:
                return

    def _over(self, user: NamedNode, name: str, axis: str, depth: int = MOST_ABOVE) -> _MovedOver | None:
        """Return the step over the only user of a value; None if the sum cannot move over it."""
        given = self.ops[user.name]
        if not only_result(user) or not self.graph.tensors[only_result(user)].shape:
            return None
        if user.name in self.pinned or names_axis(given, axis):
            return None
        value = self.values[name]
        places = [i for i, operand in enumerate(user.operands) if operand == name]
        taken = [given.operands[i] for i in places]
        if any(one is None or (one.splits, one.partial) != (value.splits, value.partial) for one in taken):
            return None
        for group in sorted(passings_of(self.graph, user), key=len):
            if not group.issuperset(places):
                continue
            others = sorted({user.operands[i] or "" for i in group.difference(places)})
            above = [self._above(other, axis, depth) for other in others]
            joined = tuple((one[0], one[1]) for one in above if one is not None)
            if len(joined) < len(others):
                continue
            made = self.passed(user, axis, group)
            if made is None or made.produced[0] is None or axis not in made.produced[0].partial:
                continue
            if made.results[0] is None or made.results[0].splits != made.produced[0].splits:
                continue
            summed = {name, *others}
            begun = {each for each in user.operands if each is not None and each not in summed and self._learns(each)}
            more = self._numel(only_result(user)) + sum(map(self._numel, begun)) - sum(map(self._numel, summed))
            return _MovedOver(user, made, more + sum(step.more for _, steps in joined for step in steps), joined)
        return None

    def _above(self, name: str, axis: str, depth: int) -> tuple[str, tuple[_MovedOver, ...]] | None:
        """Return the value whose sum can stand at this one, and the ops between; None if there is none."""
        if self._is_reduced(name, axis):
            return name, ()
        maker = self.makers.get(name)
        if maker is None or not depth or not self._is_free(name) or len(self.users[name]) != 1:
            return None
        for operand in dict.fromkeys(maker.operands):
            found = None if operand is None else self._above(operand, axis, depth - 1)
            step = None if found is None or operand is None else self._over(maker, operand, axis, 0)
            if found is not None and step is not None:
                return found[0], (*found[1], step)
        return None

    # -- sums of gradients, which move up

    def _is_summed_back(self, name: str, axis: str) -> bool:
        """Return whether the gradient of a value is summed over an axis where the value is used."""
        if not self._is_free(name) or not self._learns(name) or axis in self.values[name].axes:
            return False
        users = self.users.get(name, ())
        return bool(users) and all(self.takes_broadcast(user, name, axis) for user in users)

    def _move_up(self, name: str, axis: str) -> None:
        best, steps, sent = 0, list[_MovedOver](), 0.0
        for step in self._up(name, axis):
            steps.append(step)
            sent += step.more
            # Once it moves, also to the other end of a view.
            if sent < 0 or (best == len(steps) - 1 > 0 and not sent and self._is_of_one_dtype(step.node)):
                best, sent = len(steps), 0.0
        for step in steps[:best]:
            self.ops[step.node.name] = made = with_broadcast(step.assignment, axis)
            (kept,) = made.results
            assert kept is not None, step.node.name
            self.values[only_result(step.node)] = kept

    def _up(self, name: str, axis: str) -> Iterator[_MovedOver]:
        while True:
            maker = self.makers.get(name)
            if (
                maker is None
                or not only_result(maker)
                or maker.name in self.pinned
                or names_axis(self.ops[maker.name], axis)
            ):
                return
            made = self.passed(maker, axis, BROADCAST)
            if made is None or made.produced[0] is None or made.results[0] is None:
                return
            if made.produced[0].splits != made.results[0].splits:
                return
            begun = [each for each in dict.fromkeys(maker.operands) if each is not None and self._learns(each)]
            if any(axis in self.values[each].axes for each in begun):
                return
            yield _MovedOver(maker, made, sum(map(self._numel, begun)) - self._numel(name))
            # Further up only where one operand leads.
            if len(begun) != 1:
                return
            (name,) = begun
            if not self._is_free(name) or len(self.users[name]) != 1:
                return

    # -- one op

    def _is_of_one_dtype(self, node: NamedNode) -> bool:
        names = [name for name in (*node.operands, *node.outputs) if name is not None]
        return len({self.graph.tensors[name].dtype for name in names}) == 1

    def _is_free(self, name: str) -> bool:
        return name not in self.graph.outputs and name not in self.stated

    def _learns(self, name: str) -> bool:
        return self.graph.tensors[name].requires_grad

    def _numel(self, name: str) -> float:
        """Return the elements of a shard; of routed rows, those that are stored."""
        tensor = self.graph.tensors[name]
        atoms = atoms_of(tensor)
        groups = prod(size for i, size in enumerate(atoms.sizes) if tensor.routed and atoms.role(i) == GROUP)
        return prod(self.values[name].largest_sizes(atoms, self.axes)) / max(groups, 1)
