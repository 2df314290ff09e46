"""`solve`: the abstract problem, from an exact answer in milliseconds where there is one to a search that takes the
time it is given.

    shrink        exact reductions                                                          shrink.py
    eliminate     no limits are left and tables are narrow: solved                          elimination.py
    exact         small: one CP-SAT model                                                   exact.py
    dual          prices for the limits, message passing: a bound, first solutions;         dual.py
                  what the bound rules out goes, and the rest shrinks again
    search        annealing with moves of whole forests, until the time is up               lns.py

Every answer is checked against the problem as it was given.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.solver import Floats, Progress, relative_gap
from benchmarks.contest.elimination import eliminate
from benchmarks.contest.phases import SharedState
from benchmarks.contest.problem import Problem, cost_of
from benchmarks.contest.reductions import Infeasible

__all__ = ["ExactAnswer", "Progress", "Solution", "model_size", "solve", "solve_exactly"]


# Models up to this size go to CP-SAT at once; up to the larger one, when the dual has not closed the gap.
SMALL_MODEL = 3_000
LARGE_MODEL = 100_000
# Kept back from the time limit for lifting and checking the last answer.
RESERVE = 0.03


@dataclass(frozen=True)
class Solution:
    """The best strategies found (None: none was found), their cost, and a proved lower bound.

    infeasible: proved that no solution exists; seconds: from the call to the answer.
    """

    strategies: tuple[int, ...] | None
    cost: float
    bound: float
    infeasible: bool
    seconds: float

    @property
    def gap(self) -> float:
        """(cost - bound) / cost; 0 when proved optimal."""
        return relative_gap(self.cost, self.bound)


def solve(
    problem: Problem,
    time_limit: float = 30.0,
    seed: int = 0,
    start: Sequence[int] | None = None,
    progress: Callable[[Progress], None] | None = None,
    gap: float = 0.0,
) -> Solution:
    """Search until the gap is at most `gap` or the time is up; `start` is a solution to begin from, if one is known."""
    work = SharedState(problem, max(0.0, time_limit) * (1 - RESERVE), seed, progress, gap)
    if start is not None:
        work.offer(start)
    try:
        if work.shrink():
            _solve_core(work)
    except Infeasible:
        work.prove()
    seconds = time.monotonic() - work.began
    if work.strategies is None:
        return Solution(None, math.inf, work.bound, work.bound == math.inf, seconds)
    return Solution(tuple(work.strategies), work.cost, min(work.bound, work.cost), False, seconds)


def _solve_core(work: SharedState) -> None:
    if not len(work.core.limits):
        strategies = eliminate(work.core)
        if strategies is not None:
            work.offer_core(strategies)
            work.prove()
            work.tell("eliminate")
            return
    if model_size(work.core) <= SMALL_MODEL and _exact(work, work.seconds_left):
        return
    from benchmarks.contest.phases import (
        dual_stage,
        search_stage,  # late: compiled loops take a while to import
    )

    if not dual_stage(work) or work.finished:
        return
    if model_size(work.core) <= LARGE_MODEL and (_exact(work, work.seconds_left / 3) or work.finished):
        return
    search_stage(work)


def _exact(work: SharedState, time_limit: float) -> bool:
    """CP-SAT on the core; whether it ended with a proof."""
    answer = solve_exactly(work.core, time_limit, work.seed, work.lowered())
    if answer.infeasible:
        work.prove()
        return True
    if answer.strategies is not None:
        work.offer_core(answer.strategies)
    work.lift_bound(answer.bound)
    work.tell("exact")
    return relative_gap(work.cost, work.bound) == 0.0


# -- the exact model ---------------------------------------------------------------------------------------------------


EXACT_STEPS = 2**46
# Sums of scaled costs must stay within the 64 bits of CP-SAT, with room.
LARGEST_SUM = 2.0**53


@dataclass(frozen=True)
class ExactAnswer:
    """strategies: None when none was found; infeasible: proved; bound: no solution costs less."""

    strategies: list[int] | None
    cost: float
    bound: float
    infeasible: bool


def model_size(problem: Problem) -> int:
    """How many literals and terms the model has."""
    pairs = sum(edge.costs.size for edge in problem.edges)
    terms = sum((usage.end - usage.start) * len(usage.amounts) for usage in problem.usages)
    return sum(problem.strategy_counts) + pairs + terms


def solve_exactly(
    problem: Problem, time_limit: float, seed: int = 0, start: Sequence[int] | None = None, workers: int = 1
) -> ExactAnswer:
    """Solve the model; proved unless the time is up."""
    from ortools.sat.python import cp_model  # late: it takes a while to import

    model = cp_model.CpModel()
    chosen: list[list[Any]] = []
    objective: list[tuple[Any, float]] = []
    for costs in problem.costs:
        literals = [model.new_bool_var("") for _ in costs]
        model.add_exactly_one(literals)
        chosen.append(literals)
        objective += _priced(model, literals, costs)
    for edge in problem.edges:
        objective += _add_edge(model, chosen[edge.first], chosen[edge.second], edge.costs)
    _add_limits(model, problem, chosen)
    scale = _scale(objective)
    model.minimize(sum(round(cost * scale) * literal for literal, cost in objective))
    if start is not None:
        for literals, strategy in zip(chosen, start, strict=True):
            for place, literal in enumerate(literals):
                model.add_hint(literal, place == strategy)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(0.01, time_limit)
    solver.parameters.random_seed = seed % 2**31
    solver.parameters.num_workers = workers
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return ExactAnswer(None, np.inf, np.inf, True)
    # Every term was rounded by at most a half.
    rounding = 0.0 if scale == 1.0 else (problem.node_count + len(problem.edges)) / 2
    bound = (solver.best_objective_bound - rounding) / scale
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return ExactAnswer(None, np.inf, bound if np.isfinite(bound) else -np.inf, False)
    strategies = [next(i for i, literal in enumerate(node) if solver.boolean_value(literal)) for node in chosen]
    cost = cost_of(problem, strategies)
    return ExactAnswer(strategies, cost, cost if status == cp_model.OPTIMAL else min(cost, bound), False)


def _priced(model: Any, literals: list[Any], costs: Floats) -> list[tuple[Any, float]]:
    for literal, cost in zip(literals, costs.tolist(), strict=True):
        if cost == np.inf:
            model.add(literal == 0)
    return [(literal, cost) for literal, cost in zip(literals, costs.tolist(), strict=True) if 0 != cost != np.inf]


def _add_edge(model: Any, rows: list[Any], columns: list[Any], costs: Floats) -> list[tuple[Any, float]]:
    possible = np.isfinite(costs)
    if not costs[possible].any():
        for s, t in np.argwhere(~possible).tolist():
            model.add_bool_or([rows[s].negated(), columns[t].negated()])
        return []
    pairs = {(s, t): model.new_bool_var("") for s, t in np.argwhere(possible).tolist()}
    for s, row in enumerate(rows):
        model.add(sum(pairs[s, t] for t in range(len(columns)) if (s, t) in pairs) == row)
    for t, column in enumerate(columns):
        model.add(sum(pairs[s, t] for s in range(len(rows)) if (s, t) in pairs) == column)
    return [(pair, float(costs[s, t])) for (s, t), pair in pairs.items() if costs[s, t]]


def _add_limits(model: Any, problem: Problem, chosen: list[list[Any]]) -> None:
    terms: list[list[Any]] = [[] for _ in problem.limits]
    for usage in problem.usages:
        used = [
            int(amount) * literal for amount, literal in zip(usage.amounts, chosen[usage.node], strict=True) if amount
        ]
        for limit in range(usage.start, usage.end):
            terms[limit] += used
    for limit, used in zip(problem.limits.tolist(), terms, strict=True):
        if used:
            model.add(sum(used) <= limit)
        elif limit < 0:
            model.add_bool_or([])


def _scale(objective: list[tuple[Any, float]]) -> float:
    total = sum(abs(cost) for _, cost in objective)
    if all(cost.is_integer() for _, cost in objective) and total < LARGEST_SUM:
        return 1.0
    return EXACT_STEPS / max(total, 1e-300)
