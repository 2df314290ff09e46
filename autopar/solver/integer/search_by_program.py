"""Plan one mesh by its integer program, or prove the plan of a search by the linear relaxation."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.errors import AutoparError
from autopar.solver import relative_gap
from autopar.solver.infeasible import OutOfTime
from autopar.solver.integer.choice import LINEAR_SOLVERS, SolverChoice
from autopar.solver.integer.formulate import count_entries, formulate
from autopar.solver.integer.formulation import FormulatedModel
from autopar.solver.integer.solve_formulated import solve_formulated, solve_relaxation
from autopar.solver.model.build import plan_of
from autopar.solver.model.model import Model
from autopar.solver.model.objective import peak_gib
from autopar.solver.search.phases import SearchPhases, SearchResult
from autopar.solver.search.prove_small import SMALL

__all__ = ["formulate_request", "proved_by_relaxation", "solved_by_program", "unsolved_error"]

# Programs under a limit on memory are solved again while `evaluate` finds another peak than the model, so often.
MOST_AIMS = 4
# Limits closer than this share are one.
SAME_LIMIT = 1e-4
# Plans of small models that are priced one after another until the gap is this small, at most so many.
GAP = 1e-4
MOST_EXCLUDED = 100


def formulate_request(work: SearchPhases) -> FormulatedModel:
    """Return the whole program of a request: memory limit, storage, recomputation and all."""
    return formulate(work.model(is_limited=True), work.incumbent.limit / 2**30)


def solved_by_program(work: SearchPhases, solver: SolverChoice) -> SearchResult:
    """Offer the plans of the integer program to the incumbent; return the bound that the program proves.

    First without a limit on memory, if a plan without recomputation can fit: this program is smaller.
    """
    work = replace(work, origin=solver.title)
    incumbent, bound, model, is_cut = work.incumbent, 0.0, None, False
    try:
        if work.least_bytes <= incumbent.limit:
            model = work.model()
            solved = _Solved(work, model, solver)
            bound, is_cut = _free(solved), solved.is_cut
        if model is None or not incumbent.is_free:
            model = work.model(is_limited=True)
            solved = _Solved(work, model, solver)
            bound, is_cut = max(bound, _under_limit(solved)), solved.is_cut
    except OutOfTime:
        return SearchResult(None, bound, is_cut=True, bound_by=solver.title, model=model)
    return SearchResult(None, bound, is_cut=is_cut, bound_by=solver.title, model=model)


def unsolved_error(work: SearchPhases, solver: SolverChoice, ended: SearchResult) -> AutoparError:
    """Return the error for a program that no plan came from in time."""
    size = "" if ended.model is None else f" with {count_entries(ended.model):,} pairs of shardings"
    seconds = work.deadline - work.incumbent.began
    return AutoparError(
        f"the {solver.title}{size} had no solution after {seconds:.0f} s\n"
        "fix: a longer time limit; or leave the plan to the search, --solver search"
    )


@dataclass
class _Solved:
    """Programs of one model that are solved so far: their limits and bounds, and the errors of the model's memory."""

    work: SearchPhases
    model: Model
    solver: SolverChoice
    tried: list[tuple[float, float]] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    chosen: list[list[int]] = field(default_factory=list)
    known: dict[tuple[float, bool], FormulatedModel] = field(default_factory=dict)
    # The last program was neither solved nor infeasible when the time ended.
    is_cut: bool = False

    def solve(self, limit_gib: float, of_memory: bool = False) -> bool:
        """Solve a program without the assignments that were found before; offer its plan. Return whether it has one."""
        made = self.formulated(limit_gib, of_memory)
        for number, chosen in enumerate(self.chosen):
            columns = np.concatenate([ids[:, state] for ids, state in zip(made.states, chosen, strict=True)])
            program = made.program.with_row(f"without.{number}", columns, len(chosen) - 1.0)
            made = replace(made, program=program)
        linear = self.solver.library if self.solver.library in LINEAR_SOLVERS else next(iter(LINEAR_SOLVERS))
        found = solve_formulated(made, self.solver.library, linear, self.work.deadline)
        if not of_memory:
            # Plans that were found before are priced, so the bound is that of the incumbent at most.
            bound = max(0.0, found.bound * made.unit_seconds)
            self.tried.append((limit_gib, min(bound, self.work.incumbent.seconds)))
        if found.point is None:
            self.is_cut = not found.is_infeasible
            return False
        chosen = made.chosen(found.point)
        costs = self.work.offer(plan_of(self.model, chosen))
        self.chosen.append(chosen)
        self.errors.append(costs.limited_bytes / 2**30 - peak_gib(self.model.sums(chosen)))
        self.work.incumbent.tell(self.work.origin, self.bound(limit_gib))
        return True

    def formulated(self, limit_gib: float, of_memory: bool) -> FormulatedModel:
        key = limit_gib, of_memory
        if key not in self.known:
            self.known[key] = formulate(self.model, limit_gib, of_memory=of_memory)
        return self.known[key]

    def bound(self, limit_gib: float) -> float:
        """Return the bound: no plan is taken to need less memory than the model counts, or than a priced plan does."""
        aim = limit_gib - min([0.0, *self.errors]) if np.isfinite(limit_gib) else limit_gib
        bounds = [bound for limit, bound in self.tried if limit >= aim and np.isfinite(bound)]
        return min(max(bounds, default=0.0), self.work.incumbent.seconds)

    @property
    def is_small(self) -> bool:
        """Return whether one op matters so much that `evaluate` and the model order plans in different ways."""
        return sum(variable.kind != "recompute" for variable in self.model.variables) <= SMALL

    def refine(self, limit_gib: float, most: int) -> None:
        """Price the next best plans of a program, until they cannot be better than the incumbent."""
        incumbent = self.work.incumbent
        for _ in range(most):
            is_closed = incumbent.plan is not None and relative_gap(incumbent.seconds, self.bound(limit_gib)) <= GAP
            if is_closed or time.monotonic() > self.work.deadline or not self.solve(limit_gib):
                return


def _free(solved: _Solved) -> float:
    """Solve the program without a limit; return the bound on all plans, with recomputation too.

    A plan that does not fit may fit with recomputation, in no less time. So the bound is at most its time.
    """
    solved.solve(np.inf)
    if solved.is_small:
        solved.refine(np.inf, MOST_EXCLUDED)
    return min(solved.bound(np.inf), solved.work.incumbent.passed_seconds)


def _under_limit(solved: _Solved) -> float:
    """Solve the program under limits that the errors of the model's memory suggest; return the bound.

    In a small model the error may be anything. There the bound is that of the time alone.
    """
    limit, incumbent = solved.work.incumbent.limit / 2**30, solved.work.incumbent
    aims = [limit]
    for _ in range(MOST_AIMS):
        if not solved.solve(aims[-1]):
            is_first = len(aims) == 1 and not solved.is_cut
            if not (is_first and solved.solve(np.inf, of_memory=True)):
                break
        aim = limit - solved.errors[-1]
        if any(abs(aim - other) <= SAME_LIMIT * limit for other in aims) or time.monotonic() > solved.work.deadline:
            break
        aims.append(aim)
    if not solved.is_small:
        return solved.bound(limit)
    for _ in range(MOST_EXCLUDED if incumbent.plan is None else 0):
        if incumbent.plan is not None or not solved.solve(np.inf, of_memory=True):
            break
    solved.refine(max(aims), MOST_EXCLUDED // 4)
    solved.refine(np.inf, MOST_EXCLUDED)
    return solved.bound(np.inf)


def proved_by_relaxation(work: SearchPhases, ended: SearchResult, solver: SolverChoice) -> SearchResult:
    """Return the result of a search with the bound of the linear relaxation, where it is higher."""
    search, limit = ended.search, np.inf
    if search is not None and search.is_limited:
        limit = work.incumbent.limit / 2**30 - min(0.0, search.least_error_gib)
    is_limited = bool(np.isfinite(limit))
    try:
        made = formulate(work.model(is_limited), limit)
    except OutOfTime:
        return ended
    _, certificate, is_infeasible = solve_relaxation(made.program, solver.library, work.deadline - time.monotonic())
    if certificate is None or is_infeasible:
        return ended
    bound = certificate.bound * made.unit_seconds
    return replace(ended, bound=bound, bound_by=solver.title) if bound > ended.bound else ended
