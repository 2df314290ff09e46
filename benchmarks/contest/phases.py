"""Phases of `solve` that run compiled loops: the dual, and the local search."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autopar.solver import PROVED, Floats, Ints, Progress, relative_gap
from benchmarks.contest.annealing import AnnealingPlan, AnnealingResult, anneal, cost_in, repair, search
from benchmarks.contest.dual import Dual, MessageDual, NarrowDual, loads_at
from benchmarks.contest.elimination import plan_elimination
from benchmarks.contest.flat_arrays import Arrays, arrays_of, impossible_price, warn_if_slow
from benchmarks.contest.problem import Problem, cost_of, excess_of
from benchmarks.contest.reductions import Shrunk, shrink

__all__ = ["SharedState", "dual_stage", "search_stage"]


# -- shared state ------------------------------------------------------------------------------------------------------


# Shrinking may take this part of the time; a problem that is not shrunk to the end is still the same problem.
SHRINK_PART = 0.5


def _all_whole(problem: Problem) -> bool:
    """Return whether all possible costs are whole numbers, so that the optimum is one."""
    arrays = {id(costs): costs for costs in (*problem.costs, *(edge.costs for edge in problem.edges))}
    return all(bool(np.all((costs == np.floor(costs)) | np.isinf(costs))) for costs in arrays.values())


class SharedState:
    """State that the phases share. The core is the problem after all reductions so far."""

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
        """Return the best solution in terms of the core."""
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
        """Raise the bound to the cost of the incumbent; without one, the problem is infeasible."""
        self.bound = self.cost

    def tell(self, stage: str) -> None:
        if self.progress is not None:
            self.progress(Progress(stage, time.monotonic() - self.began, self.cost, self.bound))


# Part of the time for the dual, unless it stops moving earlier.
DUAL_PART = 0.35
# Rounds of the dual in a block; a guess that heeds the limits is made once in so many rounds.
BLOCK = 40
HEED_EVERY = 5
DISCOUNTS = (1.0, 0.99, 0.95, 0.8, 0.5)
# The dual has stopped moving when so many blocks have closed less than this part of the gap.
STILL_BLOCKS = 6
NEWS = 0.05
# Elimination answers for the dual when its tables have at most so many entries, one and all.
NARROW_TABLE = 200_000
NARROW_SUM = 3_000_000
# Moves of the local search beside a block, per node.
MOVES_BESIDE = 2
# Shrink again when the bound rules out this part of the strategies, between blocks and after the last one: the dual
# begins anew then.
WORTH_INTERRUPTING = 0.25
WORTH_SHRINKING = 0.02


def _dual_of(work: SharedState, arrays: Arrays) -> Dual:
    plan = plan_elimination(work.core, NARROW_TABLE, NARROW_SUM, impossible_price(work.core))
    return MessageDual(arrays) if plan is None else NarrowDual(arrays, plan)


class _Core:
    """The core as arrays, its dual, and the best solution in the core's terms."""

    def __init__(self, work: SharedState, prices: Floats | None) -> None:
        self.work = work
        self.arrays = arrays_of(work.core)
        self.impossible = impossible_price(work.core)
        self.dual = _dual_of(work, self.arrays)
        if prices is not None:
            self.dual.prices = prices
            self.dual.step = 0.3
        self.best: AnnealingResult | None = None
        lowered = work.lowered()
        if lowered is not None:
            strategies = np.array(lowered, dtype=np.int64)
            self.best = AnnealingResult(cost_in(self.arrays, strategies), strategies)
        self.offer(self.dual.base)

    def offer(self, strategies: Ints) -> None:
        cost = cost_in(self.arrays, strategies)
        if cost < self.impossible and (self.best is None or cost < self.best.cost):
            left = self.arrays.limits - loads_at(self.arrays, strategies)
            if not len(left) or left.min() >= 0:
                self.best = AnnealingResult(cost, strategies.copy())

    def rounds(self, deadline: float) -> None:
        """A block of rounds of the dual."""
        for turn in range(BLOCK):
            if time.monotonic() > deadline:
                return
            # A cost far above the bound says little about the optimum: steps are taken towards twice the bound at most.
            target = 2 * abs(self.dual.bound) if np.isfinite(self.dual.bound) else np.inf
            known = self.best.cost if self.best is not None else np.inf
            known = min(known, max(target, 1.0))
            if not np.isfinite(known):
                known = cost_in(self.arrays, self.dual.base)
            guess, left = self.dual.round(known)
            if not len(left) or left.min() >= 0:
                self.offer(guess)
            if turn % HEED_EVERY == 0 or self.dual.settled:
                self.heed(turn)
            if self.dual.settled:
                return

    def heed(self, turn: int) -> None:
        """Guesses that keep the limits: from the least usage, and from the best solution at some lower prices."""
        if isinstance(self.dual, MessageDual) or self.best is None:
            self.offer(self.dual.heeding(self.dual.base))
        if self.best is not None:
            discounts = DISCOUNTS if self.dual.settled else DISCOUNTS[turn // HEED_EVERY % len(DISCOUNTS) :][:1]
            for discount in discounts:
                self.offer(self.dual.heeding(self.best.strategies, discount))

    def report(self) -> None:
        if self.best is not None:
            self.work.offer_core(self.best.strategies.tolist())
        self.work.lift_bound(self.dual.bound)
        self.work.tell("dual")


def dual_stage(work: SharedState) -> bool:
    """Bound and first solutions; shrinks the core as the bound rules strategies out. False when that solves the
    problem."""
    warn_if_slow()
    block = _Core(work, None)
    block.report()
    deadline = time.monotonic() + DUAL_PART * work.seconds_left
    history: list[float] = []
    seed = work.seed
    with ThreadPoolExecutor(1) as pool:
        while True:
            beside: Future[tuple[AnnealingResult, float]] | None = None
            if block.best is not None and history:
                beside = pool.submit(_search_beside, block.arrays, block.best, block.dual.bound, seed, deadline)
            block.rounds(deadline)
            if beside is not None:
                block.offer(beside.result()[0].strategies)
            seed += 1
            block.report()
            history.append(relative_distance(work))
            if work.finished or time.monotonic() > deadline or stopped(history):
                break
            settled = block.dual.settled
            smaller = _shrunk_again(work, block, 0.0 if settled else WORTH_INTERRUPTING)
            if smaller is None:
                return False
            if smaller is not block:
                block = smaller
                history = history[-2:]
            elif settled:
                break
    if work.strategies is None and work.seconds_left > 0:
        _repair(work, block)
    return work.finished or _shrunk_again(work, block, WORTH_SHRINKING) is not None


def relative_distance(work: SharedState) -> float:
    return work.cost - work.bound if np.isfinite(work.cost) else np.inf


def stopped(history: list[float]) -> bool:
    if len(history) <= STILL_BLOCKS or not np.isfinite(history[-1 - STILL_BLOCKS]):
        return False
    return history[-1] > (1 - NEWS) * history[-1 - STILL_BLOCKS]


def _search_beside(
    arrays: Arrays, best: AnnealingResult, bound: float, seed: int, deadline: float
) -> tuple[AnnealingResult, float]:
    nodes = len(arrays.offsets) - 1
    hot = max(0.0, best.cost - bound) / nodes
    return anneal(arrays, best, AnnealingPlan(seed, MOVES_BESIDE * nodes, hot, hot / 100), deadline)


def _shrunk_again(work: SharedState, block: _Core, worth: float) -> _Core | None:
    """Return a block for the core without what the bound rules out; the same block when that is little, None when it is
    all."""
    if block.best is None or not np.isfinite(work.cost):
        return block
    answer = block.dual.reduced()
    if answer is None:
        return block
    bound, reduced = answer
    allowed = block.best.cost - bound
    dead = reduced > allowed + 1e-9 * abs(block.best.cost)
    if not dead.any() or dead.mean() < worth:
        return block
    prices = block.dual.best_prices
    if not work.shrink(dead):
        return None
    kept = work.layers[-1].limits
    moved = np.zeros(len(kept))
    if len(kept):
        # The price of a limit that another one stands for goes to the nearest that is left.
        nearest = np.clip(np.searchsorted(kept, np.arange(len(prices))), 0, len(kept) - 1)
        np.add.at(moved, nearest, prices)
    return _Core(work, moved)


def _repair(work: SharedState, block: _Core) -> None:
    repaired = repair(block.arrays, block.dual.heeding(block.dual.base), block.impossible, work.seed, work.deadline)
    if repaired is not None:
        work.offer_core(repaired.tolist())
    work.tell("repair")


def search_stage(work: SharedState) -> None:
    """Local search from the best solution until the time is up or the gap is closed."""
    arrays = arrays_of(work.core)
    lowered = work.lowered()
    if lowered is None:
        return
    strategies = np.array(lowered, dtype=np.int64)
    start = AnnealingResult(cost_in(arrays, strategies), strategies)

    def report(found: AnnealingResult) -> bool:
        work.offer_core(found.strategies.tolist())
        work.tell("search")
        return work.finished

    bound = work.bound if np.isfinite(work.bound) else 0.0
    spread = max(work.cost - bound, 1e-6 * abs(work.cost)) / (len(arrays.offsets) - 1)
    search(arrays, start, spread, work.seed, work.deadline, report)
