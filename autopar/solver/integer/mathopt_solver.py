"""OR-Tools' MathOpt: hand an integer program to a solver by name, and take back its answer, its bound, its duals."""

from __future__ import annotations

import ctypes
import datetime
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar.solver import Floats
from autopar.solver.integer.choice import INTEGER_SOLVERS, LINEAR_SOLVERS
from autopar.solver.integer.program import IntegerProgram

__all__ = ["Answer", "relaxed", "solve_program", "to_proto"]

# Solvers whose number of threads can be set.
TAKES_THREADS = ("GSCIP", "CP_SAT", "GLOP", "PDLP")
# CP-SAT: steps of a continuous variable in one unit, and the largest variable in steps.
CP_SAT_STEPS = 1e4
CP_SAT_LARGEST = 1e12


@dataclass(frozen=True, eq=False)
class Answer:
    """Outcome of a solver: why it ended, its best point, its bound on the objective, the duals of the rows."""

    reason: str
    seconds: float
    # None where the solver found no feasible point.
    point: Floats | None
    bound: float
    # Of a linear program; None where the solver gives none.
    duals: Floats | None = None
    # False where the solver rounds the program, so that neither its bound nor its "infeasible" holds for the program.
    is_exact: bool = True

    @property
    def is_infeasible(self) -> bool:
        return self.reason in ("INFEASIBLE", "INFEASIBLE_OR_UNBOUNDED")


def relaxed(program: IntegerProgram) -> IntegerProgram:
    """Return the linear relaxation: every column may be fractional."""
    return replace(program, is_integer=np.zeros_like(program.is_integer))


def solve_program(
    program: IntegerProgram, solver: str, time_limit: float = np.inf, gap: float = 1e-6, threads: int | None = None
) -> Answer:
    """Solve a program by one of `INTEGER_SOLVERS`, or of `LINEAR_SOLVERS` if no column is integer.

    An answer is within a relative `gap` of its bound, or as good as the time allows.
    """
    from ortools.math_opt.core.python import solver as core
    from ortools.math_opt.python import mathopt
    from ortools.sat import sat_parameters_pb2

    is_integer = bool(program.is_integer.any())
    kind = (INTEGER_SOLVERS if is_integer else LINEAR_SOLVERS)[solver]
    parameters = mathopt.SolveParameters(relative_gap_tolerance=gap if is_integer else None)
    if threads is not None and kind in TAKES_THREADS:
        parameters.threads = threads
    if np.isfinite(time_limit):
        parameters.time_limit = datetime.timedelta(seconds=max(time_limit, 0.01))
    solved: IntegerProgram = program
    steps: Floats | float = 1.0
    if kind == "CP_SAT":
        solved, steps = _in_steps(program)
        parameters.cp_sat = sat_parameters_pb2.SatParameters(mip_max_bound=CP_SAT_LARGEST, mip_wanted_precision=1e-9)
    # MathOpt's objects for single variables take longer than a solver; arrays go in and out as they are.
    with _without_output():
        result = core.solve(
            to_proto(solved),
            mathopt.SolverType[kind].value,
            mathopt.StreamableSolverInitArguments().to_proto(),
            parameters.to_proto(),
            mathopt.ModelSolveParameters().to_proto(),
            None,
            mathopt.CallbackRegistration().to_proto(),
            None,
            None,
        )
    answer = _answer(program, result, steps)
    return _exact(program, answer) if kind == "CP_SAT" else answer


def _exact(program: IntegerProgram, answer: Answer) -> Answer:
    """Return an answer of CP-SAT with continuous columns that fit its whole ones, and without its bound.

    Its steps of continuous columns add up to more than the tolerance of a row, and its bound is that of the rounded
    program, which can be above the optimum.
    """
    point = answer.point
    if point is not None:
        whole = np.round(point[program.is_integer])
        lower, upper = program.lower.copy(), program.upper.copy()
        lower[program.is_integer] = upper[program.is_integer] = whole
        fixed = solve_program(relaxed(replace(program, lower=lower, upper=upper)), "highs")
        point = None if fixed.is_infeasible else fixed.point
    return replace(answer, point=point, bound=-np.inf, is_exact=False)


def _in_steps(program: IntegerProgram) -> tuple[IntegerProgram, Floats]:
    """Return a program in whole numbers, and how many of them are one of each column.

    CP-SAT rounds what is continuous to whole numbers. Sums are left out, as none would equal its terms.
    """
    found = program.inlined()
    steps = np.where(found.upper <= 1.0, 1.0, CP_SAT_STEPS)
    whole = np.ones_like(found.is_integer)
    values = found.values / steps[found.column_of]
    return replace(found, is_integer=whole, costs=found.costs / steps, values=values), steps


@contextmanager
def _without_output() -> Iterator[None]:
    """Discard what is written to the standard output.

    HiGHS prints a line there where it repairs a solution, whatever its parameters, and the output may be JSON.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            yield
    finally:
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)


def _answer(program: IntegerProgram, result: Any, steps: Floats | float) -> Answer:
    from ortools.math_opt.python import mathopt

    termination = mathopt.parse_termination(result.termination)
    point = duals = None
    for one in result.solutions[:1]:
        if one.primal_solution.feasibility_status == mathopt.SolutionStatus.FEASIBLE.value:
            values = _dense(one.primal_solution.variable_values, len(program.lower))
            point = program.with_totals(values / steps)
        if one.HasField("dual_solution"):
            duals = _dense(one.dual_solution.dual_values, len(program.row_lower))
    seconds = result.solve_stats.solve_time.ToTimedelta().total_seconds()
    return Answer(termination.reason.name, seconds, point, termination.objective_bounds.dual_bound, duals)


def _dense(sparse: Any, count: int) -> Floats:
    found = np.zeros(count)
    found[np.array(sparse.ids, dtype=np.int64)] = np.array(sparse.values)
    return found


def to_proto(program: IntegerProgram) -> Any:
    """Return the program as MathOpt stores one, without names."""
    from ortools.math_opt import model_pb2

    proto = model_pb2.ModelProto(name="plan")
    count, height = len(program.lower), len(program.row_lower)
    proto.variables.ids.extend(range(count))
    proto.variables.lower_bounds.extend(program.lower.tolist())
    proto.variables.upper_bounds.extend(program.upper.tolist())
    proto.variables.integers.extend(program.is_integer.tolist())
    priced = np.flatnonzero(program.costs)
    proto.objective.offset = program.constant
    proto.objective.linear_coefficients.ids.extend(priced.tolist())
    proto.objective.linear_coefficients.values.extend(program.costs[priced].tolist())
    proto.linear_constraints.ids.extend(range(height))
    proto.linear_constraints.lower_bounds.extend(program.row_lower.tolist())
    proto.linear_constraints.upper_bounds.extend(program.row_upper.tolist())
    proto.linear_constraint_matrix.row_ids.extend(program.row_of.tolist())
    proto.linear_constraint_matrix.column_ids.extend(program.column_of.tolist())
    proto.linear_constraint_matrix.coefficients.extend(program.values.tolist())
    return proto
