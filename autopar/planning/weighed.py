"""A model at fixed prices: one number for each state and each pair, and the least of their sum by elimination."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.planning.model import Model
from autopar.planning.tables import weigh
from autopar.planning.totals import Sum
from autopar.search.folded import Folded, TooWide, fixed, folded
from autopar.search.problem import Floats
from autopar.tracing.graph import NamedGraph

__all__ = ["Elimination"]

LARGEST_TABLE = 2**21
MOST_SETTLING = 4


@dataclass(frozen=True, eq=False)
class Elimination:
    """The order in which the variables of a model go, and those that are cut."""

    model: Model
    scopes: tuple[tuple[int, ...], ...]
    cut: tuple[int, ...]
    plan: Folded
    inner: _Inner | None = None
    """What is cut, and all that has no gradient: settled together where that is narrow."""

    @staticmethod
    def of(model: Model) -> Elimination:
        """Cut variables until the rest can be eliminated: first values without a gradient, which are small or sent one
        way only; then those with most neighbours."""
        scopes = tuple(factor.scope for factor in model.factors)
        degree = [0] * len(model.variables)
        for scope in scopes:
            for node in scope:
                degree[node] += 1
        tensors = model.setting.graph.tensors
        light = [
            node
            for node, variable in enumerate(model.variables)
            if variable.kind in ("held", "value") and not tensors[variable.name].requires_grad and degree[node] > 1
        ]
        heavy = sorted(set(range(len(degree))).difference(light), key=lambda node: (-degree[node], node))
        for count in (-1, 0, *(2**i - 1 for i in range(1, len(heavy).bit_length() + 1))):
            cut = () if count < 0 else (*light, *heavy[:count])
            try:
                return Elimination(model, scopes, cut, _folded(model, scopes, cut), _Inner.of(model, scopes, cut))
            except TooWide:
                continue
        raise AssertionError("with everything cut, nothing is wide")

    def least(self, weights: Floats) -> tuple[float, Floats]:
        """A lower bound on the weighted sum of all assignments, and the sums of what has it."""
        weighed = _Weighed(self.model, weights, self.scopes)
        value, chosen = self._solved(weighed, dict.fromkeys(self.cut))
        return value, weighed.relaxed_sums(chosen, set(self.cut)) if self.cut else self.model.sums(chosen)

    def weighed(self, weights: Floats) -> tuple[list[Floats], list[Floats]]:
        """The costs of all states and pairs, where nothing is cut."""
        assert not self.cut, "what is cut has no costs of its own"
        found = _Weighed(self.model, weights, self.scopes)
        return found.costs, found.tables

    def candidate(self, weights: Floats) -> list[int]:
        """An assignment whose weighed sum is most likely low."""
        weighed = _Weighed(self.model, weights, self.scopes)
        _, chosen = self._solved(weighed, dict.fromkeys(self.cut))
        for _ in range(MOST_SETTLING if self.cut else 0):
            if self.inner is not None:
                states: dict[int, int | None] = dict(self.inner.settled(weighed, chosen))
            else:
                states = {node: weighed.best_state(node, chosen) for node in self.cut}
            _, better = self._solved(weighed, states)
            if better == chosen:
                break
            chosen = better
        return chosen

    def _solved(self, weighed: _Weighed, cut: Mapping[int, int | None]) -> tuple[float, list[int]]:
        costs, tables, constant = weighed.without(cut)
        value, chosen = self.plan.solve(costs, tables)
        for node, state in cut.items():
            chosen[node] = 0 if state is None else state
        return value + constant, chosen


@dataclass(frozen=True, eq=False)
class _Inner:
    """The variables that are cut, and all that has no gradient: the least of them, the others fixed."""

    cut: tuple[int, ...]
    nodes: tuple[int, ...]
    factors: tuple[int, ...]
    plan: Folded

    @staticmethod
    def of(model: Model, scopes: Sequence[tuple[int, ...]], cut: Sequence[int]) -> _Inner | None:
        graph = model.setting.graph
        ops = {node.name for node in graph.nodes if not any(_trained(graph, name) for name in node.outputs)}
        light = (
            place
            for place, variable in enumerate(model.variables)
            if variable.kind != "recompute"
            and (variable.name in ops if variable.kind == "op" else not _trained(graph, variable.name))
        )
        nodes = tuple(sorted({*cut, *light})) if cut else ()
        place = {node: i for i, node in enumerate(nodes)}
        factors = tuple(i for i, scope in enumerate(scopes) if not place.keys().isdisjoint(scope))
        inside = [tuple(place[node] for node in scopes[i] if node in place) for i in factors]
        try:
            plan = folded([len(model.variables[node].states) for node in nodes], inside, LARGEST_TABLE)
        except TooWide:
            return None
        return _Inner(tuple(cut), nodes, factors, plan)

    def settled(self, weighed: _Weighed, chosen: Sequence[int]) -> dict[int, int]:
        """The states of what is cut, where the others are as chosen."""
        own = set(self.nodes)
        tables = []
        for i in self.factors:
            scope = weighed.scopes[i]
            tables.append(fixed(weighed.tables[i], scope, {node: chosen[node] for node in scope if node not in own}))
        _, states = self.plan.solve([weighed.costs[node] for node in self.nodes], tables)
        found = dict(zip(self.nodes, states, strict=True))
        return {node: found[node] for node in self.cut}


def _trained(graph: NamedGraph, name: str | None) -> bool:
    return name is not None and graph.tensors[name].requires_grad


def _folded(model: Model, scopes: Sequence[tuple[int, ...]], cut: Sequence[int]) -> Folded:
    gone = set(cut)
    sizes = [1 if node in gone else len(variable.states) for node, variable in enumerate(model.variables)]
    left = [tuple(node for node in scope if node not in gone) for scope in scopes]
    return folded(sizes, [scope for scope in left if scope], LARGEST_TABLE)


class _Weighed:
    """Equal costs and tables are one object."""

    def __init__(self, model: Model, weights: Floats, scopes: Sequence[tuple[int, ...]]) -> None:
        self.model = model
        self.scopes = scopes
        known: dict[Any, Floats] = {}

        def once(key: Any, made: Callable[[], Floats]) -> Floats:
            if key not in known:
                known[key] = made()
            return known[key]

        self.costs = [
            once(
                tuple(map(id, variable.parts)),
                lambda variable=variable: sum((weigh(parts, weights) for parts in variable.parts), np.zeros(1)),  # type: ignore[misc]
            )
            for variable in model.variables
        ]
        self.tables = [
            once(id(factor.table), lambda factor=factor: factor.table.weighed(weights))  # type: ignore[misc]
            for factor in model.factors
        ]
        self.incident: dict[int, list[int]] = {}
        for i, scope in enumerate(scopes):
            for node in scope:
                self.incident.setdefault(node, []).append(i)
        self.sliced: dict[Any, Floats] = {}

    def without(self, cut: Mapping[int, int | None]) -> tuple[list[Floats], list[Floats], float]:
        """Costs and tables without the variables that are cut, and what these cost by themselves."""
        costs = list(self.costs)
        constant = 0.0
        for node, state in cut.items():
            constant += float(self.costs[node].min() if state is None else self.costs[node][state])
            costs[node] = _NOTHING
        tables: list[Floats] = []
        for scope, table in zip(self.scopes, self.tables, strict=True):
            gone = [node for node in scope if node in cut]
            if not gone:
                tables.append(table)
                continue
            key = id(table), tuple((scope.index(node), cut[node]) for node in gone)
            if key not in self.sliced:
                self.sliced[key] = fixed(table, scope, cut)
            if len(gone) == len(scope):
                constant += float(self.sliced[key])
            else:
                tables.append(self.sliced[key])
        return costs, tables, constant

    def best_state(self, node: int, chosen: Sequence[int]) -> int:
        """The state of a cut variable that fits the others best."""
        total = self.costs[node].copy()
        for i in self.incident.get(node, ()):
            scope = self.scopes[i]
            total += self.tables[i][tuple(slice(None) if each == node else chosen[each] for each in scope)]
        return int(np.argmin(total))

    def relaxed_sums(self, chosen: Sequence[int], gone: set[int]) -> Floats:
        """The sums of an answer in which every table has chosen the states of cut variables for itself."""
        total = np.zeros(len(Sum))
        for place, variable in enumerate(self.model.variables):
            total += variable.at(int(np.argmin(self.costs[place])) if place in gone else chosen[place])
        for factor, table in zip(self.model.factors, self.tables, strict=True):
            left = table[tuple(slice(None) if node in gone else chosen[node] for node in factor.scope)]
            own = iter(np.unravel_index(int(left.argmin()), left.shape))
            total += factor.table.at(*(int(next(own)) if node in gone else chosen[node] for node in factor.scope))
        return total


_NOTHING = np.zeros(1)
