"""Lower bound on the time of a pipeline's schedule, however its model is cut into stages.

A path of tasks, each of which waits for the one before it, takes at most as long as the step. Its time is linear in the
times of the stages. So is the mean of several paths, and the best mean counts the work of all stages alike: it is a
multiple of the work of one micro-batch. Paths are found one at a time: the longest one for the stage times at which the
paths so far bound least. Stages share the work as they like, and forwards and backwards share that of a stage.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from autopar.cost.order_times import PartCosts, run_orders
from autopar.sharding.schedules import Schedule, StageOrders, Work, orders
from autopar.solver import Floats

__all__ = ["OrderBound", "order_bound"]

# Longer orders, in tasks of all stages, have no bound of their own: waiting is a small share of their time.
MOST_TURNS = 50_000
MOST_PATHS = 200
PRECISION = 1e-3
# Work of a stage by extreme case: all of it forward; all backward, of which the gradients of weights are nothing or
# half; half forward. A schedule puts off at most half of a stage's work.
EXTREMES = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 1.0, 0.5], [0.5, 0.5, 0.5]])


class OrderBound(NamedTuple):
    """A step takes at least `passes` of the work of one micro-batch, and `sends` messages."""

    passes: float
    sends: float


@dataclass(frozen=True)
class _Path:
    # By stage: forwards, whole backwards and put-off gradients on it; the last count less what is put off elsewhere.
    counts: Floats
    sends: int

    @property
    def extremes(self) -> Floats:
        """Return the multiple of each stage's work in each extreme case."""
        return np.asarray(self.counts @ EXTREMES.T)


@lru_cache(maxsize=256)
def order_bound(
    stages: int, count: int, schedule: Schedule, chunks: int, more: int, send_share: float = 0.0
) -> OrderBound | None:
    """Return the bound of a schedule of equal chunks; None for one of very many tasks.

    `send_share` is the least time of a message, as a share of the work of one micro-batch.
    """
    if 2 * stages * count * chunks > MOST_TURNS:
        return None
    plan = orders(stages, count, schedule, chunks, more, halves=True)
    times = np.full((stages, 3), [1 / 3, 2 / 3, 1 / 3 if schedule == "zero_bubble" else 0.0]) / stages
    paths, program = list[_Path](), _BestMean(stages, send_share)
    found = OrderBound(0.0, 0.0)
    for _ in range(MOST_PATHS):
        longest, path = _longest(plan, chunks, times, send_share)
        if longest <= (found.passes + send_share * found.sends) * (1 + PRECISION):
            break
        paths.append(path)
        program.add(path)
        solved = program.solve()
        if solved is None:  # the numbers of a warm start may be too far off
            program = _BestMean(stages, send_share, paths)
            solved = program.solve()
        if solved is None:
            break
        weights, times = solved
        mean = sum(weight * one.extremes for weight, one in zip(weights, paths, strict=True))
        found = OrderBound(float(np.min(mean)), sum(w * one.sends for w, one in zip(weights, paths, strict=True)))
    return found


def _longest(plan: StageOrders, chunks: int, times: Floats, send: float) -> tuple[float, _Path]:
    """Return the longest path of tasks and messages, and its time, for the times of the stages."""
    stages = len(plan)
    each = [PartCosts(forward, backward, send, late) for forward, backward, late in (times / chunks).tolist()]
    ran = run_orders(each * chunks, plan, [0.0] * stages, sends_wait=False)
    counts, sends = np.zeros((stages, 3)), 0
    before, last = [-1] * len(plan.turns), [-1] * stages
    for place, turn in enumerate(plan.turns):
        before[place], last[turn.stage] = last[turn.stage], place
    longest = max(ran.ends)
    place = ran.ends.index(longest)
    while place >= 0:
        turn = plan.turns[place]
        counts[turn.stage] += _COUNTED[turn.work]
        arrived = -1.0 if turn.source < 0 else ran.ends[turn.source] + (send if turn.sender >= 0 else 0.0)
        if arrived >= 0.0 and arrived >= (-1.0 if before[place] < 0 else ran.ends[before[place]]):
            sends += turn.sender >= 0
            place = turn.source
        else:
            place = before[place]
    return longest, _Path(counts / chunks, sends)


# What a task counts: forward, whole backward, put-off gradient.
_COUNTED = {
    Work.FORWARD: np.array([1.0, 0.0, 0.0]),
    Work.BACKWARD: np.array([0.0, 1.0, 0.0]),
    Work.INPUTS: np.array([0.0, 1.0, -1.0]),
    Work.WEIGHTS: np.array([0.0, 0.0, 1.0]),
}


class _BestMean:
    """Linear program of the weights of paths; one path is added at a time."""

    def __init__(self, stages: int, send: float, paths: Iterable[_Path] = ()) -> None:
        from ortools.linear_solver import pywraplp  # late: it takes a while to import

        self.optimal, self.send = pywraplp.Solver.OPTIMAL, send
        self.solver: Any = pywraplp.Solver.CreateSolver("GLOP")
        self.solver.SuppressOutput()
        self.weights: list[Any] = []
        passes = self.solver.NumVar(0.0, self.solver.infinity(), "")
        self.solver.Objective().SetMaximization()
        self.solver.Objective().SetCoefficient(passes, 1.0)
        self.whole = self.solver.Constraint(1.0, 1.0)
        # By stage and extreme case: the mean of the paths counts the work at least `passes` times.
        self.rows = [[self.solver.Constraint(0.0, self.solver.infinity()) for _ in EXTREMES] for _ in range(stages)]
        for row in chain.from_iterable(self.rows):
            row.SetCoefficient(passes, -1.0)
        for path in paths:
            self.add(path)

    def add(self, path: _Path) -> None:
        weight = self.solver.NumVar(0.0, 1.0, "")
        self.weights.append(weight)
        self.whole.SetCoefficient(weight, 1.0)
        self.solver.Objective().SetCoefficient(weight, self.send * path.sends)
        for cases, multiples in zip(self.rows, path.extremes.tolist(), strict=True):
            for row, multiple in zip(cases, multiples, strict=True):
                row.SetCoefficient(weight, multiple)

    def solve(self) -> tuple[list[float], Floats] | None:
        """Return the best weights, and the times of the stages at which their bound is reached; None on failure."""
        if self.solver.Solve() != self.optimal:
            return None
        shares = np.array([[abs(row.dual_value()) for row in cases] for cases in self.rows])
        found = [max(0.0, each.solution_value()) for each in self.weights]
        return [each / sum(found) for each in found], np.asarray(shares @ EXTREMES)
