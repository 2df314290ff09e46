"""The next multipliers of a search: those at which the least of all cutting planes is highest."""

from __future__ import annotations

from typing import Any

import numpy as np

from autopar.solver import Floats

__all__ = ["best_multipliers"]

# LP solvers and parameters. With its preprocessing, GLOP reports some small programs as abnormal.
WAYS = (("GLOP", "use_preprocessing:false"), ("GLOP", "use_dual_simplex:true"), ("CLP", ""))


def best_multipliers(bases: Floats, slopes: Floats, most: Floats) -> tuple[float, Floats]:
    """Return the maximum of min(bases + slopes @ multipliers), multipliers from 0 to `most`; a row for each plane."""
    from ortools.linear_solver import pywraplp  # late: it takes a while to import

    status = pywraplp.Solver.NOT_SOLVED
    for name, parameters in WAYS:
        solver: Any = pywraplp.Solver.CreateSolver(name)
        if solver is None:
            continue
        if parameters:
            solver.SetSolverSpecificParametersAsString(parameters)
        prices = [solver.NumVar(0.0, limit, "") for limit in most.tolist()]
        least = solver.NumVar(-solver.infinity(), solver.infinity(), "")
        for base, row in zip(bases.tolist(), slopes.tolist(), strict=True):
            solver.Add(least <= base + sum(slope * price for slope, price in zip(row, prices, strict=True)))
        solver.Maximize(least)
        status = solver.Solve()
        if status == pywraplp.Solver.OPTIMAL:
            return float(least.solution_value()), np.array([price.solution_value() for price in prices])
    raise AssertionError(f"a linear program that has a solution was not solved (status {status})")
