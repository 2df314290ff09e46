"""The best answer so far, in the terms of the problem as it was given, while the problem that is worked on shrinks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autopar.solver.pairwise.problem import Problem, cost_of, excess_of
from autopar.solver.pairwise.reductions import Shrunk, shrink
from autopar.solver.progress import PROVED, Progress, relative_gap

__all__ = ["SharedState"]

# Shrinking may take this part of the time; a problem that is not shrunk to the end is still the same problem.
SHRINK_PART = 0.5


def _all_whole(problem: Problem) -> bool:
    """Whether all possible costs are whole numbers, so that the optimum is one."""
    arrays = {id(costs): costs for costs in (*problem.costs, *(edge.costs for edge in problem.edges))}
    return all(bool(np.all((costs == np.floor(costs)) | np.isinf(costs))) for costs in arrays.values())


class SharedState:
    """What the stages share. The core is the problem after all reductions so far."""

    def __init__(
        self, problem: Problem, time_limit: float, seed: int, progress: Callable[[Progress], None] | None, gap: float
    ) -> None:
        self.problem = problem
        self.began = time.monotonic()
        self.time_limit = time_limit
        self.reserve_seconds = 0.0
        self.seed = seed
        self.progress = progress
        self.wanted = gap
        self.layers: list[Shrunk] = []
        self.whole = _all_whole(problem)
        self.strategies: list[int] | None = None
        self.cost = math.inf
        self.bound = -math.inf

    @property
    def core(self) -> Problem:
        return self.layers[-1].problem

    @property
    def constant(self) -> float:
        return sum(layer.constant for layer in self.layers)

    @property
    def deadline(self) -> float:
        """When the search must end (`time.monotonic`), with time left to take the last solution back."""
        return self.began + max(self.time_limit / 2, self.time_limit - self.reserve_seconds)

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def finished(self) -> bool:
        return relative_gap(self.cost, self.bound) <= self.wanted or self.seconds_left <= 0

    def shrink(self, dead: NDArray[np.bool_] | None = None) -> bool:
        """Shrink the problem, or the core without the places marked dead; False when that solves it."""
        problem = self.core if self.layers else self.problem
        if dead is not None:
            marked = np.split(dead, np.cumsum(problem.strategy_counts)[:-1])
            costs = tuple(np.where(mark, np.inf, own) for mark, own in zip(marked, problem.costs, strict=True))
            problem = replace(problem, costs=costs)
        self.layers.append(shrink(problem, time.monotonic() + SHRINK_PART * self.seconds_left))
        if self.core.node_count:
            self.tell("shrink")
            return True
        self.offer_core([])
        self.bound = self.cost
        self.tell("shrink")
        return False

    def offer(self, strategies: Sequence[int]) -> None:
        """Take a solution of the problem as given, if it is one and the best so far."""
        cost = cost_of(self.problem, strategies)
        if cost < self.cost and excess_of(self.problem, strategies) == 0:
            self.cost, self.strategies = cost, list(strategies)

    def offer_core(self, strategies: Sequence[int]) -> None:
        """The same for a solution of the core."""
        began = time.monotonic()
        lifted = list(strategies)
        for layer in reversed(self.layers):
            lifted = layer.lift(lifted)
        self.offer(lifted)
        # The last solution has to be taken back, too, before the time is up.
        self.reserve_seconds = max(self.reserve_seconds, 2 * (time.monotonic() - began))

    def lowered(self) -> list[int] | None:
        """The best solution in terms of the core."""
        lowered: list[int] | None = self.strategies
        for layer in self.layers:
            lowered = None if lowered is None else layer.lower(lowered)
        return lowered

    def lift_bound(self, bound: float) -> None:
        """Take a bound on the core. Strategies that were ruled out cost at least what is known."""
        bound += self.constant
        if self.whole and math.isfinite(bound):
            bound = max(bound, float(math.ceil(bound - 1e-6 - PROVED * abs(bound))))
        self.bound = max(self.bound, min(bound, self.cost))

    def prove(self) -> None:
        """Nothing is better than what is known; with nothing known, nothing exists."""
        self.bound = self.cost

    def tell(self, stage: str) -> None:
        if self.progress is not None:
            self.progress(Progress(stage, time.monotonic() - self.began, self.cost, self.bound))
