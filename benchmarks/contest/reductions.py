"""Exact reductions: a smaller problem with the same optimum, and the way back.

    impossible strategies   a strategy without a possible partner at some neighbour goes
    functional merge        each strategy of v allows one of u: u becomes part of v
    separable edges         a cost that is a sum of two parts moves into the nodes
    elimination             a node without usage and with at most two neighbours is replaced by its best response
    leaf merge              one option of a leaf is best in cost and in usage whatever its neighbour does
    dominance               a strategy never better than another in cost nor in usage goes
    capacity                a strategy that cannot fit when all others use least goes; so do limits that can never bind,
                            and limits below which another one always stands

`shrink` applies them until none applies. `Shrunk.lift` takes a solution of the small problem back.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.solver import Floats, Ints
from benchmarks.contest.edge_matrix import Matrices, Matrix
from benchmarks.contest.limits import Capacities, LimitRow
from benchmarks.contest.problem import Edge, Problem, Usage

__all__ = ["Infeasible", "Shrunk", "shrink"]

# An elimination may not make a matrix larger than this, unless it replaces one at least as large.
LARGEST_MADE = 4_096


class Infeasible(Exception):
    """No solution exists: raised when the reductions prove it."""


@dataclass(frozen=True, eq=False)
class Response:
    """The strategy of `node` given those of up to two others, which are listed in ascending order."""

    node: int
    others: tuple[int, ...]
    names: tuple[Ints, ...]
    table: Ints


@dataclass(frozen=True, eq=False)
class Shrunk:
    """A smaller problem; its cost plus `constant` is the original's."""

    problem: Problem
    constant: float
    original_count: int
    nodes: tuple[int, ...]
    names: tuple[Ints, ...]
    limits: Ints  # which of the original's limits are left
    replaced: tuple[tuple[int, dict[int, int]], ...]  # per node, in order: strategies dropped, and a better one of each
    responses: tuple[Response, ...]
    finished: bool

    def lift(self, strategies: Sequence[int]) -> list[int]:
        """Return the original's strategies for those of the small problem."""
        lifted = [0] * self.original_count
        for node, names, strategy in zip(self.nodes, self.names, strategies, strict=True):
            lifted[node] = int(names[strategy])
        for response in reversed(self.responses):
            place = tuple(
                int(np.searchsorted(names, lifted[other]))
                for other, names in zip(response.others, response.names, strict=True)
            )
            lifted[response.node] = int(response.table[place])
        return lifted

    def lower(self, strategies: Sequence[int]) -> list[int] | None:
        """Return the small problem's strategies for the original's, or better ones; None if they are infeasible."""
        better = list(strategies)
        for node, instead in self.replaced:
            better[node] = instead.get(better[node], better[node])
        lowered = []
        for node, names in zip(self.nodes, self.names, strict=True):
            place = int(np.searchsorted(names, better[node]))
            if place == len(names) or names[place] != better[node]:
                return None
            lowered.append(place)
        return lowered


def shrink(problem: Problem, deadline: float | None = None) -> Shrunk:
    """Reduce until nothing applies or the clock (`time.monotonic`) passes the deadline; raises `Infeasible` when
    proved."""
    work = _ShrinkingProblem(problem, deadline)
    work.run()
    return work.result()


class _ShrinkingProblem:
    """The problem while it shrinks: nodes leave, edges merge."""

    def __init__(self, problem: Problem, deadline: float | None) -> None:
        self.problem = problem
        self.deadline = deadline
        self.finished = True
        self.constant = 0.0
        self.matrices = Matrices()
        self.costs: list[Floats] = list(problem.costs)
        self.names: list[Ints] = [np.arange(len(costs)) for costs in problem.costs]
        self.alive = [True] * problem.node_count
        self.edges: list[dict[int, Matrix]] = [{} for _ in problem.costs]
        self.responses: list[Response] = []
        self.replaced: list[tuple[int, dict[int, int]]] = []
        self.queue: list[int] = []
        self.queued = [False] * problem.node_count
        self.capacities = Capacities(problem.limits, [len(costs) for costs in problem.costs])
        for usage in problem.usages:
            self.capacities.add(usage.node, usage.start, usage.end, usage.amounts)
        for edge in problem.edges:
            self.join(edge.first, edge.second, self.matrices.of(edge.costs))

    # The loop.

    def run(self) -> None:
        for node in range(len(self.costs)):
            self.touch(node)
        while self.queue and self.finished:
            self.settle()
            if not self.finished:
                break
            nodes = [node for node, alive in enumerate(self.alive) if alive]
            before = [len(self.capacities.rows[node]) for node in nodes]
            kept = self.capacities.tighten(nodes)
            if kept is None:
                raise Infeasible("the strategies that use least already pass a limit")
            for node, keep in kept.items():
                self.keep(node, keep)
            for node, rows in zip(nodes, before, strict=True):
                if len(self.capacities.rows[node]) < rows:
                    self.touch(node)

    def settle(self) -> None:
        """Apply all reductions but those of the capacities until none applies; in rounds, few neighbours first."""
        while self.queue:
            batch = sorted(self.queue, key=lambda node: (len(self.edges[node]), node))
            self.queue = []
            for position, node in enumerate(batch):
                if position % 64 == 0 and self.deadline is not None and time.monotonic() > self.deadline:
                    self.finished = False
                    return
                self.queued[node] = False
                if self.alive[node]:
                    self.reduce(node)

    def touch(self, node: int) -> None:
        if not self.queued[node] and self.alive[node]:
            self.queued[node] = True
            self.queue.append(node)

    def reduce(self, node: int) -> None:
        self.drop_impossible(node)
        self.drop_separable(node)
        if self.merge(node) or self.eliminate(node) or self.merge_leaf(node):
            return
        self.drop_dominated(node)

    # Changes.

    def join(self, first: int, second: int, matrix: Matrix) -> None:
        """Add an edge; parallel edges become one."""
        if second in self.edges[first]:
            matrix = self.matrices.sum(self.edges[first][second], matrix)
        self.edges[first][second] = matrix
        self.edges[second][first] = matrix.flipped
        self.touch(first)
        self.touch(second)

    def part(self, first: int, second: int) -> None:
        del self.edges[first][second]
        del self.edges[second][first]
        self.touch(first)
        self.touch(second)

    def keep(self, node: int, rows: Ints) -> None:
        """Keep only these strategies of a node."""
        if not len(rows):
            raise Infeasible(f"no strategy of node {node} is possible")
        self.costs[node] = self.costs[node][rows]
        self.names[node] = self.names[node][rows]
        self.capacities.select(node, rows)
        for other, matrix in self.edges[node].items():
            selected = matrix.select(rows)
            self.edges[node][other] = selected
            self.edges[other][node] = selected.flipped
            self.touch(other)
        self.touch(node)

    def remove(self, node: int) -> None:
        for other in list(self.edges[node]):
            self.part(node, other)
        self.capacities.remove(node)
        self.alive[node] = False

    # Reductions.

    def drop_impossible(self, node: int) -> None:
        possible = np.isfinite(self.costs[node])
        for matrix in self.edges[node].values():
            if matrix.dead_rows is not None:
                possible &= ~matrix.dead_rows
        if not possible.all():
            self.keep(node, np.flatnonzero(possible))

    def drop_separable(self, node: int) -> None:
        for other, matrix in list(self.edges[node].items()):
            if matrix.parts is not None:
                self.costs[node] = self.costs[node] + matrix.parts[0]
                self.costs[other] = self.costs[other] + matrix.parts[1]
                self.part(node, other)

    def merge(self, node: int) -> bool:
        """Make this node part of a neighbour, each of whose strategies allows one of this node's."""
        for other, matrix in self.edges[node].items():
            if matrix.function is not None:
                if self.edges[node][other].flipped.function is not None and len(self.edges[other]) < len(
                    self.edges[node]
                ):
                    self.absorb(other, node, matrix.flipped.function)  # one to one: the one with fewer neighbours goes
                else:
                    self.absorb(node, other, matrix.function)
                return True
        return False

    def absorb(self, node: int, other: int, function: Ints | None) -> None:
        """`node` takes strategy function[s] when `other` takes s."""
        assert function is not None, (node, other)
        costs = self.costs[node][function]
        matrix = self.edges[node].get(other)
        if matrix is not None:
            costs = costs + matrix.values[function, np.arange(len(function))]
        self.costs[other] = self.costs[other] + costs
        self.responses.append(Response(node, (other,), (self.names[other],), self.names[node][function]))
        self.capacities.move(node, other, function)
        for third, edge in list(self.edges[node].items()):
            if third != other:
                self.join(other, third, edge.select(function))
        self.remove(node)
        self.touch(other)

    def eliminate(self, node: int) -> bool:
        """Replace a node without usage by its best response to at most two neighbours."""
        others = list(self.edges[node])
        if len(others) > 2 or self.capacities.rows[node]:
            return False
        if not others:
            best = int(np.argmin(self.costs[node]))
            self.constant += float(self.costs[node][best])
            self.responses.append(Response(node, (), (), self.names[node][best]))
        elif len(others) == 1:
            function = np.argmin(self.costs[node][:, None] + self.edges[node][others[0]].values, axis=0)
            self.absorb(node, others[0], function)
            return True
        elif not self.eliminate_between(node, others[0], others[1]):
            return False
        self.remove(node)
        return True

    def eliminate_between(self, node: int, one: int, other: int) -> bool:
        to_one, to_other = self.edges[node][one].values, self.edges[node][other].values
        size = to_one.shape[1] * to_other.shape[1]
        if size > max(LARGEST_MADE, to_one.size, to_other.size) and other not in self.edges[one]:
            return False
        best = np.full((to_one.shape[1], to_other.shape[1]), np.inf)
        table = np.zeros(best.shape, dtype=np.int64)
        for strategy, cost in enumerate(self.costs[node]):
            here = cost + to_one[strategy][:, None] + to_other[strategy][None, :]
            better = here < best
            best[better] = here[better]
            table[better] = strategy
        self.responses.append(
            Response(node, (one, other), (self.names[one], self.names[other]), self.names[node][table])
        )
        self.join(one, other, self.matrices.of(best))
        return True

    def merge_leaf(self, node: int) -> bool:
        """Return a leaf whose best option, whatever the neighbour does, is also the one that uses least."""
        if len(self.edges[node]) > 1:
            return False
        rows = self.capacities.rows_of(node)
        if not self.edges[node]:
            best = self.best_in_all(self.costs[node][:, None], rows)
            if best is None:
                return False
            if len(self.costs[node]) > 1:
                self.keep(node, best)
            self.constant += float(self.costs[node][0])
            self.responses.append(Response(node, (), (), self.names[node][0]))
            self.remove(node)
            return True
        other, matrix = next(iter(self.edges[node].items()))
        function = self.best_in_all(self.costs[node][:, None] + matrix.values, rows)
        if function is None:
            return False
        self.absorb(node, other, function)
        return True

    @staticmethod
    def best_in_all(costs: Floats, rows: Sequence[LimitRow]) -> Ints | None:
        """Per column, the cheapest row, provided it is also among those that use least; None when it is not."""
        cheapest = costs.min(axis=0)
        if not np.all(np.isfinite(cheapest)):
            return None  # impossible strategies are dropped first
        possible = np.isfinite(costs)
        good = costs == cheapest
        for row in rows:
            amounts = np.where(possible, row.amounts[:, None], np.iinfo(np.int64).max)
            good &= amounts == amounts.min(axis=0)
        if not np.all(good.any(axis=0)):
            return None
        return np.asarray(np.argmax(good, axis=0).astype(np.int64))

    def drop_dominated(self, node: int) -> None:
        count = len(self.costs[node])
        if count == 1 or count * count > 1_000_000:
            return
        excess = self.costs[node][:, None] - self.costs[node][None, :]
        for matrix in self.edges[node].values():
            if matrix.regret is None or matrix.dead_rows is not None:
                return
            excess = excess + matrix.regret
        better = excess <= 0
        for row in self.capacities.rows_of(node):
            better &= row.amounts[:, None] <= row.amounts[None, :]
        np.fill_diagonal(better, False)
        if not better.any():
            return
        kept = np.ones(count, dtype=bool)
        instead: dict[int, int] = {}
        for strategy in np.flatnonzero(better.any(axis=0)):
            by = better[:, strategy] & kept
            if by.any():
                kept[strategy] = False
                instead[int(self.names[node][strategy])] = int(self.names[node][np.argmax(by)])
        self.replaced.append((node, instead))
        self.keep(node, np.flatnonzero(kept))

    # The result.

    def result(self) -> Shrunk:
        nodes = tuple(node for node, alive in enumerate(self.alive) if alive)
        places = {node: place for place, node in enumerate(nodes)}
        edges = tuple(
            Edge(places[node], places[other], matrix.values)
            for node in nodes
            for other, matrix in self.edges[node].items()
            if node < other
        )
        usages = tuple(
            Usage(places[node], row.start, row.end, row.amounts)
            for node in nodes
            for row in self.capacities.rows_of(node)
        )
        problem = Problem(
            tuple(self.costs[node] for node in nodes), edges, usages, self.capacities.limits(), self.problem.name
        )
        names = tuple(self.names[node] for node in nodes)
        return Shrunk(
            problem,
            self.constant,
            len(self.costs),
            nodes,
            names,
            self.capacities.places,
            tuple(self.replaced),
            tuple(self.responses),
            self.finished,
        )
