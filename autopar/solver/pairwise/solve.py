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

from autopar.solver.pairwise.cp_sat import model_size, solve_exactly
from autopar.solver.pairwise.elimination import eliminate
from autopar.solver.pairwise.problem import Problem
from autopar.solver.pairwise.reductions import Infeasible
from autopar.solver.pairwise.work import SharedState
from autopar.solver.progress import Progress, relative_gap

__all__ = ["Progress", "Solution", "solve"]

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
    from autopar.solver.pairwise.phases import (
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
