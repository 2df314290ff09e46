"""The least of the model's objective: prices for its hinges from outside, exact elimination inside.

At fixed prices λ the objective is a sum over variables and factors, whose least elimination finds: a lower bound on the
seconds of every plan. The sums of what it found bound the next prices from above, for all λ at once (a cutting plane);
the best λ under all planes is the next to try. What is found on the way are candidates, told to `report`.

Variables that too many others depend on are cut (`search.folded`): the bound lets each table choose for itself, and the
candidates fix them at the states that fit best, over and over until none changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autopar.planning.model import Model
from autopar.planning.tables import weigh
from autopar.planning.totals import Hinges
from autopar.search.folded import Folded, TooWide, fixed, folded
from autopar.search.problem import Floats

__all__ = ["Search"]

MOST_ROUNDS = 30
MOST_SETTLING = 4
LARGEST_TABLE = 2**21


@dataclass
class Search:
    """One model; `report` is told of every assignment and answers the seconds of its plan."""

    model: Model
    report: Callable[[Sequence[int]], float]
    deadline: float
    gap: float = 1e-4
    bound: float = 0.0
    best: float = np.inf
    planes: list[Floats] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hinges = Hinges.of(self.model.setting)
        self.sizes = [len(variable.states) for variable in self.model.variables]
        self.scopes = [(factor.first, factor.second) for factor in self.model.factors]
        self.cut: tuple[int, ...] = ()
        self.plan = self._planned()

    def _planned(self) -> Folded:
        """Cut variables until the rest can be eliminated: first values without a gradient, which are small or sent one
        way only; then those with most neighbours."""
        degree = [0] * len(self.sizes)
        for scope in self.scopes:
            for node in scope:
                degree[node] += 1
        tensors = self.model.setting.graph.tensors
        order = sorted(range(len(degree)), key=lambda node: (-degree[node], node))
        light = [
            node
            for node, variable in enumerate(self.model.variables)
            if variable.kind != "op" and not tensors[variable.name].requires_grad and degree[node] > 1
        ]
        heavy = [node for node in order if node not in set(light)]
        count = 1
        while True:
            try:
                return self._folded()
            except TooWide:
                if not self.cut and light:
                    self.cut = tuple(light)
                    continue
            self.cut = (*self.cut, *heavy[:count])
            heavy = heavy[count:]
            count *= 2

    def _folded(self) -> Folded:
        gone = set(self.cut)
        sizes = [1 if node in gone else size for node, size in enumerate(self.sizes)]
        scopes = [tuple(node for node in scope if node not in gone) for scope in self.scopes]
        return folded(sizes, [scope for scope in scopes if scope], LARGEST_TABLE)

    # -- the prices of the hinges

    def run(self, start: Sequence[int] | None = None) -> None:
        prices = np.zeros(len(self.hinges.offsets))
        if start is not None:
            sums = self.model.sums(start)
            self.planes.append(sums)
            prices = np.where(self.hinges.slopes @ sums + self.hinges.offsets > 0, 1.0, 0.0)
        for _ in range(MOST_ROUNDS):
            self._round(prices)
            if self.best - self.bound <= self.gap * self.best or time.monotonic() > self.deadline:
                return
            upper, prices = self._master()
            if upper - self.bound <= 0.1 * self.gap * abs(upper):
                return

    def _round(self, prices: Floats) -> None:
        weights, constant = self.hinges.weights(prices)
        weighed = _Weighed(self.model, weights, self.scopes)
        value, chosen = self._solved(weighed, dict.fromkeys(self.cut))
        self.bound = max(self.bound, value + constant)
        if not self.cut:
            self.planes.append(self.model.sums(chosen))
            self.best = min(self.best, self.report(chosen))
            return
        self.planes.append(self._relaxed_sums(weighed, chosen))
        for _ in range(MOST_SETTLING):
            states = {node: weighed.best_state(node, chosen) for node in self.cut}
            _, better = self._solved(weighed, states)
            done = better == chosen
            chosen = better
            if done:
                break
        self.best = min(self.best, self.report(chosen))

    def _solved(self, weighed: _Weighed, cut: Mapping[int, int | None]) -> tuple[float, list[int]]:
        costs, tables, constant = weighed.without(cut)
        value, chosen = self.plan.solve(costs, tables)
        for node, state in cut.items():
            chosen[node] = 0 if state is None else state
        return value + constant, chosen

    def _relaxed_sums(self, weighed: _Weighed, chosen: Sequence[int]) -> Floats:
        """The sums of an answer in which every table has chosen the states of cut variables for itself."""
        gone = set(self.cut)
        total = np.zeros(len(self.hinges.base))
        for place, variable in enumerate(self.model.variables):
            state = int(np.argmin(weighed.costs[place])) if place in gone else chosen[place]
            total += variable.at(state)
        for factor, table in zip(self.model.factors, weighed.tables, strict=True):
            row, column = chosen[factor.first], chosen[factor.second]
            if factor.first in gone and factor.second in gone:
                row, column = (int(i) for i in np.unravel_index(int(table.argmin()), table.shape))
            elif factor.first in gone:
                row = int(np.argmin(table[:, column]))
            elif factor.second in gone:
                column = int(np.argmin(table[row]))
            total += factor.table.at(row, column)
        return total

    def _master(self) -> tuple[float, Floats]:
        """The prices at which the least plane is highest."""
        from ortools.linear_solver import pywraplp  # late: it takes a while to import

        solver: Any = pywraplp.Solver.CreateSolver("GLOP")
        count = len(self.hinges.offsets)
        prices = [solver.NumVar(0.0, 1.0, "") for _ in range(count)]
        least = solver.NumVar(-solver.infinity(), solver.infinity(), "")
        for sums in self.planes:
            slopes = self.hinges.slopes @ sums + self.hinges.offsets
            fixed_part = float(self.hinges.base @ sums + self.hinges.constant)
            solver.Add(least <= fixed_part + sum(float(slopes[k]) * prices[k] for k in range(count)))
        solver.Maximize(least)
        status = solver.Solve()
        assert status == pywraplp.Solver.OPTIMAL, status
        return least.solution_value(), np.array([price.solution_value() for price in prices])


class _Weighed:
    """The model at fixed prices: one number for each state and each pair; equal ones are one object."""

    def __init__(self, model: Model, weights: Floats, scopes: Sequence[tuple[int, int]]) -> None:
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
        costs = list(self.costs)
        constant = 0.0
        for node, state in cut.items():
            constant += float(self.costs[node].min() if state is None else self.costs[node][state])
            costs[node] = np.zeros(1)
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
            first, second = self.scopes[i]
            total += self.tables[i][:, chosen[second]] if first == node else self.tables[i][chosen[first]]
        return int(np.argmin(total))
