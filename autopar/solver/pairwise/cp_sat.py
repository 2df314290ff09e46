"""The whole problem as one CP-SAT model: the oracle for everything else, and the end of small problems.

A literal per node and strategy, exactly one per node; a literal per edge and pair of strategies, whose sums over rows
and columns are the nodes' literals; every limit as it stands. Costs are scaled to whole numbers where they are not:
`EXACT_STEPS` over their spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.solver.arrays import Floats
from autopar.solver.pairwise.problem import Problem, cost_of

__all__ = ["ExactAnswer", "model_size", "solve_exactly"]

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
