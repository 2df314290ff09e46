"""Solve an integer program: its relaxation first, then what reduced costs leave of it by an integer solver."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from autopar.solver import Floats
from autopar.solver.integer.certificate import Certificate, certify
from autopar.solver.integer.formulation import FormulatedModel
from autopar.solver.integer.mathopt_solver import relaxed, solve_program
from autopar.solver.integer.program import IntegerProgram

__all__ = ["Optimum", "solve_formulated", "solve_relaxation"]

# Columns are whole if they are this close to a whole number.
WHOLE = 1e-6
# Distances above the bound within which the optimum is sought, as shares of the bound; then everywhere.
DISTANCES = (1e-3, 1e-2, 1e-1)


@dataclass(frozen=True, eq=False)
class Optimum:
    """Best point that was found, in units of the program, and a bound on all points."""

    point: Floats | None
    objective: float
    bound: float
    is_infeasible: bool = False


def solve_relaxation(
    program: IntegerProgram, solver: str, time_limit: float = np.inf
) -> tuple[Floats | None, Certificate | None, bool]:
    """Return the point of the linear relaxation and the certificate of its duals; True if no point is feasible."""
    answer = solve_program(relaxed(program), solver, time_limit)
    certificate = None if answer.duals is None else certify(program, answer.duals)
    return answer.point, certificate, answer.is_infeasible


def solve_formulated(
    made: FormulatedModel, solver: str, linear_solver: str, deadline: float = np.inf, gap: float = 1e-6
) -> Optimum:
    """Return the optimum of a program.

    Where the relaxation is whole, it is the optimum. Else the columns are dropped whose reduced costs lead beyond some
    distance of the bound, and the solver ends the rest. An optimum within this distance is that of the whole program.
    """
    program = made.program
    point, certificate, is_infeasible = solve_relaxation(program, linear_solver, deadline - time.monotonic())
    if is_infeasible:
        return Optimum(None, np.inf, np.inf, is_infeasible=True)
    bound = -np.inf if certificate is None else certificate.bound
    if point is not None and _is_whole(program, point):
        return Optimum(point, _objective(program, point), bound)
    for distance in (*(DISTANCES if certificate is not None else ()), np.inf):
        farthest = bound + distance * abs(bound)
        left = program if certificate is None else _without(program, certificate, farthest)
        answer = solve_program(left, solver, deadline - time.monotonic(), gap)
        if answer.point is not None:
            objective = _objective(program, answer.point)
            if objective <= farthest or time.monotonic() > deadline:
                return Optimum(answer.point, objective, max(bound, min(answer.bound, farthest)))
        elif answer.is_infeasible and not np.isfinite(farthest):
            return Optimum(None, np.inf, np.inf, is_infeasible=True)
        if answer.is_exact and (answer.is_infeasible or answer.bound >= farthest):
            bound = max(bound, farthest)
        if time.monotonic() > deadline:
            break
    return Optimum(None, np.inf, bound)


def _is_whole(program: IntegerProgram, point: Floats) -> bool:
    whole = point[program.is_integer]
    return bool(np.abs(whole - np.round(whole)).max(initial=0.0) <= WHOLE)


def _objective(program: IntegerProgram, point: Floats) -> float:
    return float(program.costs @ point + program.constant)


def _without(program: IntegerProgram, certificate: Certificate, farthest: float) -> IntegerProgram:
    """Return the program without the columns that no point of at most this objective has."""
    gone = certificate.beyond(farthest) & (program.groups >= 0)
    return replace(program, upper=np.where(gone, 0.0, program.upper))
