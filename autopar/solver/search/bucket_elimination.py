"""Exact min-plus elimination without limits, in which equal parts are computed once.

Variables are eliminated one by one: a table over the neighbours holds the best response. The response depends on a
variable's costs and tables alone, so variables whose costs and tables are the same objects share one result. A model
of a hundred equal layers then costs little more than one layer, whatever its width.

A variable with many neighbours can be `cut`. With a given state it leaves. Without one each of its tables takes its
own least, and the answer is a lower bound.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np

from autopar.solver import Floats

__all__ = ["SharedTableElimination", "TooWide", "elimination_order"]

LARGEST_TABLE = 2**24


class TooWide(Exception):
    """No elimination order was found whose tables are small enough."""


class _EliminationStep(NamedTuple):
    """Elimination of one variable: the neighbours of its table, and the given and earlier tables that it adds."""

    node: int
    others: tuple[int, ...]
    given: tuple[tuple[int, tuple[int, ...]], ...]
    made: tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True, eq=False)
class SharedTableElimination:
    """Elimination order of one model, with its shared results."""

    sizes: tuple[int, ...]
    # Variables in order, each with the others that its table has.
    order: Sequence[tuple[int, Collection[int]]]
    # Scopes of the tables, without nodes of one strategy.
    scopes: Sequence[tuple[int, ...]]
    # For each pattern and bucket, the first equal bucket.
    firsts: dict[object, list[int]] = field(default_factory=dict)

    # What rounding may take off the least total, as a share of it.
    rounding = 0.0

    @cached_property
    def largest(self) -> int:
        """Return the number of entries of the largest table that is made, before its variable is minimised."""
        return max((_entries(self.sizes, node, around) for node, around in self.order), default=0)

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(self.sizes[node] for node in scope) for scope in self.scopes)

    @cached_property
    def buckets(self) -> tuple[_EliminationStep, ...]:
        rank = {node: place for place, (node, _) in enumerate(self.order)}
        given: list[list[int]] = [[] for _ in self.order]
        for i, scope in enumerate(self.scopes):
            given[min(rank[node] for node in scope)].append(i)
        made: list[list[int]] = [[] for _ in self.order]
        arranged: list[tuple[int, ...]] = []
        for place, (_, around) in enumerate(self.order):
            others = tuple(sorted(around))  # as the nodes stand, so that the order is one in equal parts
            arranged.append(others)
            if others:
                made[min(map(rank.__getitem__, others))].append(place)
        found = []
        for place, (node, _) in enumerate(self.order):
            at = {other: axis for axis, other in enumerate((node, *arranged[place]))}
            found.append(
                _EliminationStep(
                    node,
                    arranged[place],
                    tuple((i, tuple(at[other] for other in self.scopes[i])) for i in given[place]),
                    tuple((i, tuple(at[other] for other in arranged[i])) for i in made[place]),
                )
            )
        return tuple(found)

    def nodes_of_large(self, entries: int, degree: Mapping[int, int]) -> list[int]:
        """Return variables that are in most of the tables of more than these entries, in parts that share none.

        Variables without a degree are left. Of equals the one of the highest degree. One variable changes the tables
        of its own part only, so that those of all parts can be cut at once.
        """
        large = [
            frozenset(each for each in (node, *around) if self.sizes[each] > 1 and each in degree)
            for node, around in self.order
            if _entries(self.sizes, node, around) > entries
        ]
        found = []
        while large:
            often = Counter(node for each in large for node in each)
            found.append(max(often, key=lambda node: (often[node], degree[node], -node)))
            part = frozenset[int]().union(*(each for each in large if found[-1] in each))
            large = [each for each in large if part.isdisjoint(each)]
        return found

    def solve(
        self, costs: Sequence[Floats], tables: Sequence[Floats], pattern: object = None
    ) -> tuple[float, list[int]]:
        """Return the least total and a state for every variable; tables stand in the order of their scopes.

        `pattern` names calls in which the same entries are the same objects: equal steps are searched once.
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
        """Drop axes of one state; the same table object gives the same result object."""
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


# A table, and the place of each axis in the bucket: first the eliminated node, then the others.
_Part = tuple[Floats, tuple[int, ...]]


def _least(count: int, own: Floats, parts: Sequence[_Part]) -> Floats:
    """Return the least over the states of a variable, for all states of the others."""
    table = own.reshape(-1, *(1,) * (count - 1))
    for part, places in sorted(parts, key=lambda part: part[0].size):
        moved = part.transpose(sorted(range(len(places)), key=places.__getitem__))
        shape = [1] * count
        for axis, place in enumerate(sorted(places)):
            shape[place] = moved.shape[axis]
        table = table + moved.reshape(shape)
    return np.asarray(table.min(axis=0))


def _best(own: Floats, parts: Sequence[_Part], at: tuple[int, ...]) -> int:
    """Return the best state of a variable where the others have theirs.

    Best states are not stored for all combinations: finding them takes many times longer than finding the least.
    """
    total = own
    for part, places in sorted(parts, key=lambda part: part[0].size):
        total = total + part[tuple(at[place - 1] if place else slice(None) for place in places)]
    return int(total.argmin())


def elimination_order(
    sizes: Sequence[int], scopes: Sequence[tuple[int, ...]], largest: float = LARGEST_TABLE
) -> SharedTableElimination:
    """Return an elimination order that makes the smallest table next, unless a table is too large."""
    neighbours: list[set[int]] = [set() for _ in sizes]
    # A node of one strategy is no neighbour: arrays have at most 64 axes, and a shared value may have more users.
    scopes = [tuple(node for node in scope if sizes[node] > 1) or scope[:1] for scope in scopes]
    for scope in scopes:
        for node in scope:
            neighbours[node].update(other for other in scope if other != node)
    return SharedTableElimination(tuple(sizes), _order(sizes, neighbours, largest), scopes)


def _entries(sizes: Sequence[int], node: int, others: Iterable[int]) -> int:
    """Return the number of entries of the table over a variable and its neighbours."""
    return prod([sizes[other] for other in others], start=sizes[node])


def _order(sizes: Sequence[int], neighbours: list[set[int]], largest: float) -> list[tuple[int, set[int]]]:
    """Yield the next variables: all whose tables are smallest, before any that become small by their elimination.

    Equal parts of a model are so eliminated side by side and share results.
    """

    weights = [_entries(sizes, node, neighbours[node]) for node in range(len(sizes))]
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
                size = _entries(sizes, other, neighbours[other])
                if size != weights[other]:
                    weights[other] = size
                    if size not in waiting:
                        waiting[size] = []
                        heapq.heappush(heap, size)
                    waiting[size].append(other)
    return order


def fixed(table: Floats, scope: tuple[int, ...], cut: Mapping[int, int | None]) -> Floats:
    """Return a table without its cut variables: at their states, or at its own least over them."""
    for axis in range(len(scope) - 1, -1, -1):
        if scope[axis] in cut:
            at = cut[scope[axis]]
            table = np.asarray(table.min(axis=axis) if at is None else table.take(at, axis=axis))
    return table
