"""Exact answers without limits by elimination, where parts that are equal are worked out once.

Nodes go one by one; each is replaced by a table over its neighbours that holds its best response. What a node's costs
and tables come to depends on these alone: nodes whose costs and tables are the same objects share one result. So a
model of a hundred equal layers costs little more than one layer, whatever its width.

A node that many others depend on can be `cut`: given a strategy, it leaves; without one, each of its tables takes its
own least, which makes the answer a lower bound.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import numpy as np

from autopar.solver.arrays import Floats

__all__ = ["SharedTableElimination", "TooWide", "folded"]

LARGEST_TABLE = 2**24


class TooWide(Exception):
    """No order of elimination was found whose tables are small enough."""


class _EliminationStep(NamedTuple):
    """A node that goes, the nodes that its table is over, and which tables it takes in: given ones, and made ones."""

    node: int
    others: tuple[int, ...]
    given: tuple[tuple[int, tuple[int, ...]], ...]
    made: tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True, eq=False)
class SharedTableElimination:
    """The order in which nodes go."""

    sizes: tuple[int, ...]
    buckets: tuple[_EliminationStep, ...]
    shapes: tuple[tuple[int, ...], ...] = ()
    """Of the tables, without the nodes that have one strategy."""
    firsts: dict[object, list[int]] = field(default_factory=dict)
    """By pattern: for each bucket the first one that is equal to it."""

    def solve(
        self, costs: Sequence[Floats], tables: Sequence[Floats], pattern: object = None
    ) -> tuple[float, list[int]]:
        """The least total, and a strategy for every node; tables stand in the order of their scopes.

        With one `pattern`, the same costs and tables are the same objects every time: what is equal is found once.
        """
        tables = self._narrow(tables)
        firsts = self.firsts.get(pattern)
        if firsts is None:
            firsts = self._firsts(costs, tables)
            if pattern is not None:
                self.firsts[pattern] = firsts
        results: list[Floats] = []
        total = 0.0

        def parts(bucket: _EliminationStep) -> list[_Part]:
            found = [(tables[i], places) for i, places in bucket.given]
            return found + [(results[i], places) for i, places in bucket.made]

        for place, (bucket, first) in enumerate(zip(self.buckets, firsts, strict=True)):
            if first < place:
                results.append(results[first])
            else:
                results.append(_least(len(bucket.others) + 1, costs[bucket.node], parts(bucket)))
            if not bucket.others:
                total += float(results[-1])
        chosen = [0] * len(self.sizes)
        known: dict[tuple[int, tuple[int, ...]], int] = {}
        for bucket, first in zip(reversed(self.buckets), reversed(firsts), strict=True):
            at = tuple(chosen[other] for other in bucket.others)
            state = known.get((first, at))
            if state is None:
                state = known[first, at] = _best(costs[bucket.node], parts(bucket), at)
            chosen[bucket.node] = state
        return total, chosen

    def _narrow(self, tables: Sequence[Floats]) -> list[Floats]:
        """What is one object stays one object."""
        known: dict[object, Floats] = {}
        return [
            table if table.shape == shape else known.setdefault((id(table), shape), table.reshape(shape))
            for table, shape in zip(tables, self.shapes, strict=True)
        ]

    def _firsts(self, costs: Sequence[Floats], tables: Sequence[Floats]) -> list[int]:
        known: dict[object, int] = {}
        found: list[int] = []
        for place, bucket in enumerate(self.buckets):
            given = tuple((id(tables[i]), places) for i, places in bucket.given)
            made = tuple((found[i], places) for i, places in bucket.made)
            found.append(known.setdefault((id(costs[bucket.node]), given, made), place))
        return found


_Part = tuple[Floats, tuple[int, ...]]
"""A table, and for each of its axes the place in a bucket: the node that goes is the first, then the others."""


def _least(count: int, own: Floats, parts: Sequence[_Part]) -> Floats:
    """The least over the strategies of a node, for all of the others."""
    table = own.reshape(-1, *(1,) * (count - 1))
    for part, places in sorted(parts, key=lambda part: part[0].size):
        moved = part.transpose(sorted(range(len(places)), key=places.__getitem__))
        shape = [1] * count
        for axis, place in enumerate(sorted(places)):
            shape[place] = moved.shape[axis]
        table = table + moved.reshape(shape)
    return np.asarray(table.min(axis=0))


def _best(own: Floats, parts: Sequence[_Part], at: tuple[int, ...]) -> int:
    """The strategy of a node that is least where the others have theirs. Which is least is not kept for all of these:
    that takes many times longer to find than how much it is."""
    total = own
    for part, places in sorted(parts, key=lambda part: part[0].size):
        total = total + part[tuple(at[place - 1] if place else slice(None) for place in places)]
    return int(total.argmin())


def folded(
    sizes: Sequence[int], scopes: Sequence[tuple[int, ...]], largest: int = LARGEST_TABLE
) -> SharedTableElimination:
    """An order in which the smallest table is made next."""
    neighbours: list[set[int]] = [set() for _ in sizes]
    # Who has one strategy is nobody's neighbour: arrays have few axes, and a shared value may have many users.
    scopes = [tuple(node for node in scope if sizes[node] > 1) or scope[:1] for scope in scopes]
    for scope in scopes:
        for node in scope:
            neighbours[node].update(other for other in scope if other != node)
    order = _order(sizes, neighbours, largest)
    rank = {node: place for place, (node, _) in enumerate(order)}
    given: list[list[int]] = [[] for _ in order]
    for i, scope in enumerate(scopes):
        given[min(rank[node] for node in scope)].append(i)
    made: list[list[int]] = [[] for _ in order]
    arranged: list[tuple[int, ...]] = []
    for place, (_, around) in enumerate(order):
        others = tuple(sorted(around))  # as the nodes stand, so that the order is one in equal parts
        arranged.append(others)
        if others:
            made[min(map(rank.__getitem__, others))].append(place)
    buckets = []
    for place, (node, _) in enumerate(order):
        at = {other: axis for axis, other in enumerate((node, *arranged[place]))}
        buckets.append(
            _EliminationStep(
                node,
                arranged[place],
                tuple((i, tuple(at[other] for other in scopes[i])) for i in given[place]),
                tuple((i, tuple(at[other] for other in arranged[i])) for i in made[place]),
            )
        )
    return SharedTableElimination(
        tuple(sizes), tuple(buckets), tuple(tuple(sizes[node] for node in scope) for scope in scopes)
    )


def _order(sizes: Sequence[int], neighbours: list[set[int]], largest: int) -> list[tuple[int, set[int]]]:
    """Next are all nodes whose tables are the smallest, before any that become small by that: equal parts of a problem
    go side by side, and share their results, where one after the other would hang on what was left of the one before.
    """

    def weight(node: int) -> int:
        return prod([sizes[other] for other in neighbours[node]], start=sizes[node])

    weights = [weight(node) for node in range(len(sizes))]
    waiting: dict[int, list[int]] = {}
    for node, size in enumerate(weights):
        waiting.setdefault(size, []).append(node)
    heap = list(waiting)
    heapq.heapify(heap)
    done: set[int] = set()
    order: list[tuple[int, set[int]]] = []
    while heap:
        least = heapq.heappop(heap)
        for node in sorted(waiting.pop(least)):
            if node in done or weights[node] != least:
                continue
            if least > largest:
                raise TooWide
            done.add(node)
            around = neighbours[node]
            order.append((node, around))
            for other in around:
                neighbours[other] |= around
                neighbours[other] -= {node, other}
            for other in around:
                size = weight(other)
                if size != weights[other]:
                    weights[other] = size
                    if size not in waiting:
                        waiting[size] = []
                        heapq.heappush(heap, size)
                    waiting[size].append(other)
    return order


def fixed(table: Floats, scope: tuple[int, ...], cut: Mapping[int, int | None]) -> Floats:
    """A table without the nodes that are cut: at their strategies, or at its own least over them."""
    for axis in range(len(scope) - 1, -1, -1):
        if scope[axis] in cut:
            at = cut[scope[axis]]
            table = np.asarray(table.min(axis=axis) if at is None else table.take(at, axis=axis))
    return table
