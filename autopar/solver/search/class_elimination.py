"""Exact min-plus elimination over classes of options, for models with hundreds of options for each op.

A table of an op and a neighbour has a row for each sharding of one tensor, and many options of the op have the same
one. So an op has a port for each of its tensors: the class of its option. Tables join ports, and a result of an
elimination has an axis for each port or value beside it. One port of an op may be kept as a node of its own, so that a
sum of many axes becomes a min-plus product of two matrices.

Equal steps are computed once, as in `bucket_elimination`. Results have single precision, less their own least, so that
long models keep it; what rounding may add is taken off the answer.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from autopar.solver import Ints
from autopar.solver.search.bucket_elimination import TooWide

__all__ = ["ClassElimination", "ClassTable", "Single", "class_elimination"]

Single = NDArray[np.float32]

# Additions of one step at most.
LARGEST_STEP = 2**32
# Numbers that are added up at once, which a core keeps in its cache; fewer are added up for all states at once.
TILE, FEW = 2**17, 2**12
# Share of finite sums below which a min-plus product takes them alone.
SPARSE = 0.1
# What rounding may add to the answer, as a share of it.
ROUNDING = 1e-5


class ClassTable(NamedTuple):
    """Table of two variables, or of one: by axis the variable, and the class of each of its states."""

    nodes: tuple[int, ...]
    classes: tuple[Ints, ...]


class _Step(NamedTuple):
    """Elimination of a node with some of its ports: nodes of the result, the tables used, and the port that stays."""

    node: int
    absorbed: tuple[int, ...]
    kept: int | None
    others: tuple[int, ...]
    used: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ClassElimination:
    """Elimination order of one model: variables, and their ports behind them."""

    sizes: tuple[int, ...]
    # Of each port: its variable, and the class of each state.
    owners: Mapping[int, tuple[int, Ints]]
    # Nodes of the given tables, and of the results of the steps behind them.
    scopes: tuple[tuple[int, ...], ...]
    steps: tuple[_Step, ...]
    # Number of variables.
    count: int
    # By step: the tables of the latest call that it added up, its result, and the least that was taken off.
    latest: dict[int, tuple[tuple[Single, ...], Single, float]] = field(default_factory=dict)

    def solve(self, costs: Sequence[Single], tables: Sequence[Single]) -> tuple[float, list[int]]:
        """Return a lower bound on the least total, close to it, and a state for every variable.

        Equal costs and tables are one object each; those of the latest call are not added up again.
        """
        firsts = self._firsts(costs, tables)
        found: list[Single] = list(tables)
        least = [0.0] * len(self.steps)
        total = 0.0
        size = 0.0
        for place, (step, first) in enumerate(zip(self.steps, firsts, strict=True)):
            if first < place:
                found.append(found[len(tables) + first])
                least[place] = least[first]
            else:
                made, least[place] = self._known_result(place, step, costs, found)
                if not np.isfinite(least[place]):
                    return np.inf, [0] * self.count
                found.append(made)
            total += least[place]
            size += abs(least[place])
        return total - ROUNDING * size, self._chosen(costs, found, firsts)

    def _known_result(
        self, place: int, step: _Step, costs: Sequence[Single], found: Sequence[Single]
    ) -> tuple[Single, float]:
        """Return the result of a step less its least, and the least."""
        own = (costs[step.node],) if step.node < self.count else ()
        inputs = (*own, *(found[number] for number in step.used))
        known = self.latest.get(place)
        if known is None or not all(map(operator.is_, inputs, known[0])):
            result = self._result(step, costs, found)
            least = float(result.min())
            if np.isfinite(least):
                result -= np.float32(least)
            known = self.latest[place] = inputs, result, least
        return known[1:]

    def _firsts(self, costs: Sequence[Single], tables: Sequence[Single]) -> list[int]:
        """Return for each step the first step that computes the same."""
        keys: list[Hashable] = [("given", id(table)) for table in tables]
        known: dict[Hashable, int] = {}
        firsts = []
        for place, step in enumerate(self.steps):
            at = {other: i for i, other in enumerate(step.others)}
            own = tuple(step.absorbed) if step.kept is None else (*step.absorbed, step.kept)
            at.update({port: -2 - i for i, port in enumerate(own)})
            at[step.node] = -1
            key = (
                id(costs[step.node]) if step.node < self.count else ("port", self.sizes[step.node]),
                tuple((keys[number], tuple(at[node] for node in self.scopes[number])) for number in step.used),
                tuple(id(self.owners[port][1]) for port in own),
                step.kept is None or at[step.kept],
                tuple(self.sizes[other] for other in step.others),
            )
            firsts.append(known.setdefault(key, place))
            keys.append(("made", firsts[-1]))
        return firsts

    def _own(self, node: int, costs: Sequence[Single]) -> Single:
        return costs[node] if node < self.count else np.zeros(self.sizes[node], dtype=np.float32)

    def _result(self, step: _Step, costs: Sequence[Single], found: Sequence[Single]) -> Single:
        own = self._own(step.node, costs)
        around = [other for other in step.others if other != step.kept]
        terms = [self._term(step, number, found[number]) for number in step.used]
        halves = _halves(around, [nodes for nodes, _ in terms], self.sizes)
        if step.kept is None and len(halves) == 2:
            left = _summed(own, halves[0], [one for one in terms if not set(one[0]) & set(halves[1])], self.sizes)
            nothing = np.zeros(1, dtype=np.float32)
            right = _summed(nothing, halves[1], [one for one in terms if set(one[0]) & set(halves[1])], self.sizes)
            made = _min_plus(left.reshape(len(own), -1), right.reshape(len(own), -1))
            nodes = (*halves[0], *halves[1])
            return _arranged(made.reshape([self.sizes[node] for node in nodes]), nodes, step.others)
        if step.kept is None:
            return np.asarray(_least(own, around, terms, self.sizes, [np.arange(len(own))])[0])
        classes = self.owners[step.kept][1]
        order = np.argsort(classes, kind="stable")
        groups = np.split(order, np.flatnonzero(np.diff(classes[order])) + 1)
        return _arranged(_least(own, around, terms, self.sizes, groups), (step.kept, *around), step.others)

    def _term(self, step: _Step, number: int, table: Single) -> tuple[tuple[int, ...], Single]:
        """Return a table with the states of the eliminated node first, and its other nodes."""
        scope = self.scopes[number]
        axes = [i for i, node in enumerate(scope) if self._variable(step, node)]
        rest = tuple(i for i in range(len(scope)) if i not in axes)
        moved = table.transpose(*axes, *rest)
        if len(axes) > 1 or scope[axes[0]] != step.node:
            moved = moved[tuple(self._classes(step, scope[i]) for i in axes)]
        return tuple(scope[i] for i in rest), moved

    def _variable(self, step: _Step, node: int) -> bool:
        return node == step.node or node in step.absorbed or node == step.kept

    def _classes(self, step: _Step, node: int) -> Ints:
        return np.arange(self.sizes[node]) if node == step.node else self.owners[node][1]

    def _chosen(self, costs: Sequence[Single], found: Sequence[Single], firsts: Sequence[int]) -> list[int]:
        states = [0] * len(self.sizes)
        known: dict[Hashable, int] = {}
        for step, first in zip(reversed(self.steps), reversed(firsts), strict=True):
            key = first, tuple(states[other] for other in step.others)
            state = known.get(key)
            if state is None:
                total = self._own(step.node, costs)
                for number in step.used:
                    nodes, table = self._term(step, number, found[number])
                    at: Any = (slice(None), *(states[node] for node in nodes))
                    total = np.add(total, table[at])
                if step.kept is not None:
                    total = np.where(self.owners[step.kept][1] == states[step.kept], total, np.inf)
                state = known[key] = int(total.argmin())
            states[step.node] = state
            for port in step.absorbed:
                states[port] = int(self.owners[port][1][state])
        return states[: self.count]


def _summed(
    own: Single, around: Sequence[int], terms: Iterable[tuple[tuple[int, ...], Single]], sizes: Sequence[int]
) -> Single:
    """Return the sum over all states of the nodes around, with the states of the eliminated node first."""
    total = own.reshape(-1, *(1,) * len(around))
    for part in _spread(around, terms):
        total = total + part
    full = (len(total), *(sizes[node] for node in around))
    return np.broadcast_to(total, full)


def _spread(around: Sequence[int], terms: Iterable[tuple[tuple[int, ...], Single]]) -> list[Single]:
    """Return tables with an axis for each node around, of length 1 where they have none; the smallest first."""
    found = []
    for nodes, table in sorted(terms, key=lambda term: term[1].size):
        order = sorted(range(len(nodes)), key=lambda i: around.index(nodes[i]))
        size = dict(zip(nodes, table.shape[1:], strict=True))
        found.append(table.transpose(0, *(1 + i for i in order)).reshape(-1, *(size.get(node, 1) for node in around)))
    return found


def _least(
    own: Single,
    around: Sequence[int],
    terms: Sequence[tuple[tuple[int, ...], Single]],
    sizes: Sequence[int],
    groups: Sequence[Ints],
) -> Single:
    """Return for each group of states the least sum over it, for all states of the nodes around."""
    # Nodes of all tables come last: sums run along them.
    common = sorted(around, key=lambda node: sum(node in nodes for nodes, _ in terms))
    shape = [sizes[node] for node in common]
    if prod(shape) < FEW:
        order = np.concatenate(groups)
        starts = np.cumsum([0, *map(len, groups[:-1])])
        total = _summed(own[order], common, [(nodes, table[order]) for nodes, table in terms], sizes)
        made = np.minimum.reduceat(total, starts, axis=0)
    else:
        # Parts that all tiles read lie in order; of others each number is read once.
        whole = len(own) * prod(shape)
        parts = [part if part.size == whole else np.ascontiguousarray(part) for part in _spread(common, terms)]
        made = _least_of_tiles(own, parts, shape, groups)
    return made.transpose(0, *(1 + common.index(node) for node in around))


def _least_of_tiles(own: Single, parts: Sequence[Single], shape: Sequence[int], groups: Sequence[Ints]) -> Single:
    """Return the same for large tables, in parts that a core keeps in its cache, state by state."""
    made = np.full((len(groups), *shape), np.inf, dtype=np.float32)
    for tile in _tiles(shape):
        seen = [part[(slice(None), *map(_of_tile, tile, part.shape[1:]))] for part in parts]
        bests = made[(slice(None), *tile)]
        sums = np.empty_like(bests[0])
        for best, group in zip(bests, groups, strict=True):
            for state in group:
                total: Any = own[state]
                for part in seen[:-1]:
                    total = total + part[state]
                np.add(total, seen[-1][state], out=sums)
                np.minimum(best, sums, out=best)
    return made


def _tiles(shape: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """Yield parts of an array of this shape of at most `TILE` numbers."""
    whole = next(axis for axis in range(len(shape)) if prod(shape[axis + 1 :]) <= TILE)
    length = TILE // prod(shape[whole + 1 :])
    for at in np.ndindex(*shape[:whole]):
        lead = tuple(slice(one, one + 1) for one in at)
        for begin in range(0, shape[whole], length):
            yield (*lead, slice(begin, begin + length), *(slice(None) for _ in shape[whole + 1 :]))


def _of_tile(part: slice, length: int) -> slice:
    """Return a part of an axis, or all of an axis of length 1, which stands for all states."""
    return part if length > 1 else slice(None)


def _arranged(table: Single, nodes: Sequence[int], wanted: Sequence[int]) -> Single:
    return np.ascontiguousarray(table.transpose([list(nodes).index(node) for node in wanted]))


def _halves(around: Sequence[int], scopes: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> list[list[int]]:
    """Return the nodes around in two groups that share no table, the largest in one; one group where none are."""
    first = {node: node for node in around}

    def root(node: int) -> int:
        while first[node] != node:
            node = first[node]
        return node

    for scope in scopes:
        for node in scope[1:]:
            first[root(node)] = root(scope[0])
    groups: dict[int, list[int]] = {}
    for node in around:
        groups.setdefault(root(node), []).append(node)
    if len(groups) < 2:
        return [list(around)]
    largest, *others = sorted(groups.values(), key=lambda group: -prod(sizes[node] for node in group))
    return [largest, [node for group in others for node in group]]


def _min_plus(left: Single, right: Single) -> Single:
    """Return for each pair of columns the least sum over the rows."""
    finite = np.isfinite(left), np.isfinite(right)
    if finite[0].mean() * finite[1].mean() < SPARSE:
        return _sparse_min_plus(left, right, *finite)
    best = torch.full((left.shape[1], right.shape[1]), np.inf)
    height = max(1, TILE // right.shape[1])
    total = torch.empty(height, right.shape[1])
    columns = torch.from_numpy(right.copy()).unbind()  # it may be read-only
    for begin in range(0, len(best), height):
        tile = best[begin : begin + height]
        rows = torch.from_numpy(left[:, begin : begin + height].copy()).unsqueeze(2).unbind()
        sums = total[: len(tile)]
        for row, column in zip(rows, columns, strict=True):
            torch.add(row, column, out=sums)
            torch.minimum(tile, sums, out=tile)
    return best.numpy()


def _sparse_min_plus(left: Single, right: Single, is_left: NDArray[np.bool_], is_right: NDArray[np.bool_]) -> Single:
    """Return the same of tables that are infinite almost everywhere."""
    best = np.full((left.shape[1], right.shape[1]), np.inf, dtype=np.float32)
    for row, column, rows, columns in zip(left, right, is_left, is_right, strict=True):
        at = np.ix_(rows, columns)
        best[at] = np.minimum(best[at], row[rows][:, None] + column[columns])
    return best


# -- the order ---------------------------------------------------------------------------------------------------------


def class_elimination(
    sizes: Sequence[int], tables: Sequence[ClassTable], largest: int = LARGEST_STEP
) -> ClassElimination:
    """Return an elimination order of variables with these numbers of states; the cheapest step is next."""
    return _ClassOrder(sizes, tables).run(largest)


class _ClassOrder:
    """Nodes that are left, the tables between them, and the steps so far."""

    def __init__(self, sizes: Sequence[int], tables: Sequence[ClassTable]) -> None:
        self.sizes = list(sizes)
        self.count = len(sizes)
        self.owners: dict[int, tuple[int, Ints]] = {}
        self.ports: list[list[int]] = [[] for _ in sizes]
        known: dict[tuple[int, int], int] = {}
        self.scopes: list[tuple[int, ...]] = []
        for table in tables:
            scope = []
            for node, classes in zip(table.nodes, table.classes, strict=True):
                if len(classes) == int(classes.max()) + 1:
                    scope.append(node)
                    continue
                port = known.get((node, id(classes)))
                if port is None:
                    port = known[node, id(classes)] = len(self.sizes)
                    self.sizes.append(int(classes.max()) + 1)
                    self.owners[port] = node, classes
                    self.ports[node].append(port)
                scope.append(port)
            self.scopes.append(tuple(scope))
        self.tables: list[set[int]] = [set() for _ in self.sizes]
        for number, nodes in enumerate(self.scopes):
            for each in nodes:
                self.tables[each].add(number)
        self.is_left = [True] * len(self.sizes)
        # Ports that belong to no variable any more.
        self.is_free = [port not in self.owners for port in range(len(self.sizes))]
        self.steps: list[_Step] = []

    def run(self, largest: int) -> ClassElimination:
        weights: dict[int, int] = {}
        waiting: dict[int, list[int]] = {}
        heap: list[int] = []

        def put(node: int) -> None:
            weight = self._cheapest(node)[0]
            if weights.get(node) != weight:
                weights[node] = weight
                if weight not in waiting:
                    waiting[weight] = []
                    heapq.heappush(heap, weight)
                waiting[weight].append(node)

        for node in range(self.count):
            put(node)
        while heap:
            least = heapq.heappop(heap)
            for node in sorted(waiting.pop(least)):
                if not self.is_left[node] or weights[node] != least:
                    continue
                weight, kept = self._cheapest(node)
                if weight != least:
                    put(node)
                    continue
                if least > largest:
                    raise TooWide
                for other in self._eliminate(node, kept):
                    put(other)
        return ClassElimination(tuple(self.sizes), self.owners, tuple(self.scopes), tuple(self.steps), self.count)

    def _around(self, nodes: Iterable[int]) -> set[int]:
        return {other for node in nodes for number in self.tables[node] for other in self.scopes[number]}

    def _cheapest(self, node: int) -> tuple[int, int | None]:
        """Return the additions to eliminate a node, and the port to keep, if any."""
        ports = self.ports[node] if node < self.count else []
        own = {node, *ports}
        beside = {one: self._around([one]) - own for one in own}
        best: tuple[int, int | None] | None = None
        for kept in (None, *ports):
            around = set[int]().union(*(others for one, others in beside.items() if one != kept))
            made = prod([self.sizes[other] for other in around])
            work = self.sizes[node] * made
            if kept is not None:
                work += self.sizes[kept] * made * prod([self.sizes[other] for other in beside[kept] - around])
            if best is None or work < best[0]:
                best = work, kept
        assert best is not None
        return best

    def _eliminate(self, node: int, kept: int | None) -> set[int]:
        """Eliminate a node; return the nodes whose steps may have become cheaper or dearer."""
        ports = self.ports[node] if node < self.count else []
        absorbed = tuple(port for port in ports if port != kept)
        used = sorted({number for one in (node, *absorbed) for number in self.tables[one]})
        others = {other for number in used for other in self.scopes[number]} - {node, *ports}
        if kept is not None:
            others.add(kept)
        arranged = tuple(sorted(others))
        for number in used:
            for other in self.scopes[number]:
                self.tables[other].discard(number)
        for other in arranged:
            self.tables[other].add(len(self.scopes))
        self.scopes.append(arranged)
        self.steps.append(_Step(node, absorbed, kept, arranged, tuple(used)))
        self.is_left[node] = False
        for port in ports:
            self.is_left[port] = port == kept
            self.is_free[port] = True
        touched = {self._head(other) for other in others}
        return {other for other in touched if self.is_left[other]}

    def _head(self, node: int) -> int:
        """Return the node that is eliminated with a port: its variable, while that is left."""
        return node if self.is_free[node] else self.owners[node][0]
