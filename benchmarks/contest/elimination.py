"""Exact solution of a problem without limits, node by node (bucket elimination), where its tables stay small enough.

Eliminating a node adds up all tables that mention it and keeps, per strategies of the other nodes in them, the least
over its own; the order takes the node whose table would be smallest. Chains of layers have narrow tables however long
they are. What does not depend on the node costs is added up once, so that the same problem with other node costs is
solved quickly: the dual does that many times.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.solver import Floats
from benchmarks.contest.problem import Problem

__all__ = ["PairwiseElimination", "eliminate", "plan_elimination"]

LARGEST_TABLE = 1 << 21
# Tables with more axes are not made, however small: arrays have no more.
MOST_NEIGHBOURS = 30


@dataclass(frozen=True, eq=False)
class EliminationStep:
    """One step: `node` goes, its best response depends on `others`.

    fixed: the sum of the edges that are added here, one axis for each of `others` and a last one for the node;
    received: which earlier steps' results are added here, and the shapes in which they fit.
    """

    node: int
    others: tuple[int, ...]
    fixed: Floats
    received: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class PairwiseElimination:
    """The steps for one set of edges."""

    sizes: tuple[int, ...]
    buckets: tuple[EliminationStep, ...]

    def tables(self, costs: Sequence[Floats]) -> list[Floats]:
        """Per step, the least cost of all that is gone with it, by the strategies of the others and of the node."""
        totals: list[Floats] = []
        for bucket in self.buckets:
            total = bucket.fixed + costs[bucket.node]
            for step, shape in bucket.received:
                total += totals[step].min(axis=-1).reshape(shape)
            totals.append(total)
        return totals

    def backtrack(self, totals: Sequence[Floats], pick: Callable[[int, Floats], int]) -> list[int]:
        """Strategies, last step first; `pick` chooses a node's by what each costs below the choices made before."""
        strategies = [0] * len(self.sizes)
        for bucket, total in zip(reversed(self.buckets), reversed(totals), strict=True):
            here = total[tuple(strategies[other] for other in bucket.others)]
            strategies[bucket.node] = pick(bucket.node, here)
        return strategies

    def value(self, totals: Sequence[Floats]) -> float:
        """Return the least cost of all."""
        return sum(float(total.min()) for bucket, total in zip(self.buckets, totals, strict=True) if not bucket.others)

    def solve(self, costs: Sequence[Floats]) -> tuple[float, list[int]]:
        """Return the least cost with these node costs, and strategies that have it."""
        totals = self.tables(costs)
        return self.value(totals), self.backtrack(totals, lambda _node, here: int(here.argmin()))

    def lifts(self, costs: Sequence[Floats]) -> list[Floats]:
        """Per node, how much more than the least cost of all each strategy costs at least."""
        totals = self.tables(costs)
        lifts: list[Floats] = [np.zeros(0)] * len(self.sizes)
        for step in range(len(self.buckets) - 1, -1, -1):
            # The table now holds the least cost of everything, by the strategies of its nodes.
            bucket, whole = self.buckets[step], totals[step]
            least = whole.min(axis=tuple(range(whole.ndim - 1)))
            lifts[bucket.node] = least - least.min()
            for sender, shape in bucket.received:
                sent = totals[sender].min(axis=-1)
                spread = tuple(axis for axis in range(len(shape)) if axis not in self.axes(step, sender))
                beyond = (whole - sent.reshape(shape)).min(axis=spread)
                totals[sender] = totals[sender] + beyond[..., None]
        return lifts

    def axes(self, step: int, sender: int) -> tuple[int, ...]:
        """Where the nodes of a result stand in the table of the step that receives it."""
        nodes = (*self.buckets[step].others, self.buckets[step].node)
        return tuple(nodes.index(other) for other in self.buckets[sender].others)


def eliminate(problem: Problem, largest_table: int = LARGEST_TABLE) -> list[int] | None:
    """Return an optimal choice when nothing limits usage; None when some table would pass the size."""
    plan = plan_elimination(problem, largest_table)
    return None if plan is None else plan.solve(problem.costs)[1]


def plan_elimination(
    problem: Problem, largest_table: int, largest_sum: float = np.inf, ceiling: float = np.inf
) -> PairwiseElimination | None:
    """Return the steps; None if a table, or all together, would pass the sizes. Edges cost `ceiling` at most."""
    sizes = problem.strategy_counts
    order = _order(problem, sizes, largest_table, largest_sum)
    if order is None:
        return None
    rank = [0] * len(sizes)
    for step, (node, _) in enumerate(order):
        rank[node] = step
    buckets = []
    for node, others in order:
        fixed = np.zeros([sizes[other] for other in (*others, node)])
        buckets.append(EliminationStep(node, others, fixed))
    for edge in problem.edges:
        first_goes = rank[edge.first] < rank[edge.second]
        node, other = (edge.first, edge.second) if first_goes else (edge.second, edge.first)
        bucket = buckets[rank[node]]
        shape = _shape(bucket, (other, node), sizes)
        bucket.fixed[...] += np.minimum(edge.costs.T if first_goes else edge.costs, ceiling).reshape(shape)
    for step, bucket in enumerate(buckets):
        if bucket.others:
            receiver = buckets[min(rank[other] for other in bucket.others)]
            # Axes stand in the order in which their nodes go, the last first, so a result fits by its shape alone.
            receiver.received.append((step, _shape(receiver, bucket.others, sizes)))
    return PairwiseElimination(tuple(sizes), tuple(buckets))


def _shape(bucket: EliminationStep, nodes: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the shape in which a table over these nodes is added to a bucket's."""
    return tuple(sizes[axis] if axis in nodes else 1 for axis in (*bucket.others, bucket.node))


def _order(
    problem: Problem, sizes: Sequence[int], largest: int, largest_sum: float
) -> list[tuple[int, tuple[int, ...]]] | None:
    """Greedy: next the node whose table is smallest; with each, the nodes that its table mentions, the last to go
    first."""
    neighbours: list[set[int]] = [set() for _ in sizes]
    for edge in problem.edges:
        neighbours[edge.first].add(edge.second)
        neighbours[edge.second].add(edge.first)

    def weight(node: int) -> float:
        if len(neighbours[node]) > MOST_NEIGHBOURS:
            return np.inf
        return float(math.prod(sizes[other] for other in neighbours[node]) * sizes[node])

    heap = [(weight(node), node) for node in range(len(sizes))]
    heapq.heapify(heap)
    rank: dict[int, int] = {}
    order: list[tuple[int, set[int]]] = []
    total = 0.0
    while heap:
        size, node = heapq.heappop(heap)
        if node in rank or size != weight(node):
            continue
        total += size
        if size > largest or total > largest_sum:
            return None
        rank[node] = len(order)
        around = neighbours[node]
        order.append((node, around))
        for other in around:
            neighbours[other] |= around - {other}
            neighbours[other].discard(node)
        for other in around:
            heapq.heappush(heap, (weight(other), other))
        neighbours[node] = set()
    return [(node, tuple(sorted(around, key=lambda other: -rank[other]))) for node, around in order]
