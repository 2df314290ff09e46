"""Large-neighbourhood search: simulated annealing whose moves are random forests, with a thread per core.

A cycle runs every chain from the best solution, from a high temperature to a low one, and keeps the best end. The next
cycle is longer; its temperatures follow the chain that did best. Cycles count moves, not seconds, so one seed gives
one search. Only the last cycle, which the deadline cuts, is fitted to the time left.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from autopar.solver import Floats, Ints
from benchmarks.contest.dual import loads_at
from benchmarks.contest.flat_arrays import Arrays, priced_costs
from benchmarks.contest.forest_moves import conditional_costs, forest_moves, scratch_for, state_of

__all__ = ["AnnealingPlan", "AnnealingResult", "anneal", "cost_in", "descend", "repair", "search"]

# The largest region of one move, in nodes.
LARGEST = 300
# Moves between two looks at the clock.
BATCH = 32
# A cycle ends this much cooler than it begins, and without disturbance for its last part.
COOLING = 300.0
GREEDY_PART = 0.03
# The first cycle makes this many moves per node; each following one so many times as many.
FIRST_CYCLE = 8
GROWTH = 2.0
# The hottest start, as a multiple of the gap per node, and the bounds of that multiple.
HOTTEST = (0.1, 3000.0)
CHAINS = 2


@dataclass(frozen=True, eq=False)
class AnnealingResult:
    """A solution of the flat problem."""

    cost: float
    strategies: Ints


@dataclass(frozen=True, eq=False)
class AnnealingPlan:
    """How one chain runs: so many moves, cooling from one temperature to another."""

    seed: int
    moves: int
    hot: float
    cold: float


def cost_in(arrays: Arrays, strategies: Ints) -> float:
    """Return the cost of a solution."""
    places = arrays.offsets[:-1] + strategies
    edges = np.zeros(len(arrays.costs))
    conditional_costs(arrays, strategies, edges)
    return float(arrays.costs[places].sum() + edges[places].sum() / 2)


def noise_table() -> Floats:
    """Return Gumbel noise of mean near zero: the least of several disturbed costs is a sample by probability."""
    return np.asarray(-np.random.default_rng(0).gumbel(size=1 << 14))


def anneal(
    arrays: Arrays, start: AnnealingResult, plan: AnnealingPlan, deadline: float
) -> tuple[AnnealingResult, float]:
    """Run one chain; return the best solution seen and the end of the chain."""
    strategies = start.strategies.copy()
    best = start.strategies.copy()
    state = state_of(arrays, arrays.costs, strategies, arrays.limits - loads_at(arrays, strategies))
    scratch = scratch_for(arrays)
    noise = noise_table()
    random = np.random.default_rng(plan.seed)
    total = best_cost = start.cost
    done = 0
    while done < plan.moves and time.monotonic() < deadline:
        part = done / plan.moves
        temperature = plan.hot * (plan.cold / plan.hot) ** part if part < 1 - GREEDY_PART and plan.hot > 0 else 0.0
        moves = min(BATCH, plan.moves - done)
        seed = int(random.integers(2**31))
        total, best_cost = forest_moves(
            arrays, state, scratch, noise, seed, moves, LARGEST, temperature, total, best_cost, best
        )
        done += moves
    return AnnealingResult(cost_in(arrays, best), best), total


def descend(arrays: Arrays, start: AnnealingResult, moves: int, seed: int, deadline: float) -> AnnealingResult:
    """Run a chain at temperature zero, which only improves."""
    return anneal(arrays, start, AnnealingPlan(seed, moves, 0.0, 0.0), deadline)[0]


def search(
    arrays: Arrays,
    start: AnnealingResult,
    spread: float,
    seed: int,
    deadline: float,
    report: Callable[[AnnealingResult], bool],
) -> AnnealingResult:
    """Run cycles until the deadline, or until `report`, called with the best of each cycle, returns true.

    `spread`: average cost of a node above its optimum; temperatures are multiples of it.
    """
    best = start
    multiple = 3.0
    moves = FIRST_CYCLE * max(32, len(arrays.offsets) - 1)
    pace: float | None = None  # moves per second
    cycle = 0
    with ThreadPoolExecutor(CHAINS) as pool:
        while time.monotonic() < deadline:
            left = deadline - time.monotonic()
            planned = moves
            if pace is not None and planned * (1 + 1 / GROWTH) > pace * left:
                planned = max(BATCH, int(pace * left * 0.97))  # the last cycle takes what is left
            multiples = [multiple * 10**chain for chain in range(CHAINS)]
            plans = [
                AnnealingPlan(seed + cycle * CHAINS + chain, planned, spread * hot, spread * hot / COOLING)
                for chain, hot in enumerate(multiples)
            ]
            began = time.monotonic()
            chains = [pool.submit(anneal, arrays, best, plan, deadline) for plan in plans]
            ended = [chain.result() for chain in chains]
            pace = planned / max(1e-3, time.monotonic() - began)
            best = min([best, *(found for found, _ in ended)], key=lambda found: found.cost)
            warmer = ended[-1][1] < ended[0][1]
            multiple = float(np.clip(multiple * (3.0 if warmer else 1 / 3.0), HOTTEST[0], HOTTEST[1] / 10))
            moves = int(moves * GROWTH)
            cycle += 1
            if report(best):
                break
    return best


def repair(arrays: Arrays, start: Ints, impossible: float, seed: int, deadline: float) -> Ints | None:
    """Return a solution that keeps the limits and pays no impossible cost, whatever else it costs; None out of time.

    A violated limit may stay as full as it is, not fuller, and its multiplier grows round by round.
    """
    strategies = start.copy()
    scratch = scratch_for(arrays)
    noise = noise_table()
    random = np.random.default_rng(seed)
    prices = np.zeros(len(arrays.limits))
    scale = max(1.0, float(np.abs(arrays.costs[arrays.costs < impossible]).max(initial=1.0)))
    while True:
        left = arrays.limits - loads_at(arrays, strategies)
        if (not len(left) or left.min() >= 0) and not pays(arrays, strategies, impossible):
            return strategies
        if time.monotonic() > deadline:
            return None
        over = left < 0
        if over.any():
            prices *= 0.9
            prices[over] += scale * left[over] / min(-1, int(left.min())) / max(1, int(-left.min()))
            scale *= 1.2
        costs = priced_costs(arrays, prices)
        state = state_of(arrays, costs, strategies, np.maximum(left, 0))
        temperature = 0.0 if random.random() < 0.5 else float(np.median(np.abs(costs)))
        ignored = strategies.copy()
        moves = max(64, (len(arrays.offsets) - 1) // 8)
        seed = int(random.integers(2**31))
        forest_moves(arrays, state, scratch, noise, seed, moves, LARGEST, temperature, 0.0, -np.inf, ignored)
        strategies = state.strategies


def pays(arrays: Arrays, strategies: Ints, impossible: float) -> bool:
    """Return whether some node or edge has an impossible cost."""
    places = arrays.offsets[:-1] + strategies
    if np.any(arrays.costs[places] >= impossible):
        return True
    sources = np.repeat(np.arange(len(arrays.offsets) - 1), np.diff(arrays.links))
    widths = np.diff(arrays.offsets)[arrays.neighbours]
    entries = arrays.blocks + strategies[sources] * widths + strategies[arrays.neighbours]
    return bool(np.any(arrays.values[entries] >= impossible))
