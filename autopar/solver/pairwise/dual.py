"""Lower bounds by Lagrange multipliers: every limit gets a price, and what is left is a problem without limits.

For prices λ ≥ 0 the least of  cost(x) + Σ_k λ_k (usage_k(x) - limit_k)  over all x is at most the optimum. That least
is found by elimination where tables are narrow, and bounded by message passing elsewhere; the usage of its solution,
less the limits, is the direction in which to move the prices (a subgradient), and the distance to the best known cost
says how far (Polyak). A single price is found by tangents instead. Guesses that keep the limits are solutions.
"""

from __future__ import annotations

import numpy as np

from autopar.solver.arrays import Floats, Ints
from autopar.solver.pairwise.elimination import PairwiseElimination
from autopar.solver.pairwise.flat_arrays import Arrays, priced_costs
from autopar.solver.pairwise.limit_tree import tree_of, try_move
from autopar.solver.pairwise.trws import decode, reduced_costs, sweep

__all__ = ["Dual", "MessageDual", "NarrowDual", "loads_at"]

# After so many rounds without a better bound, steps become shorter.
PATIENCE = 8
SHORTER = 0.7
# The part of the last direction that goes into the next one.
MOMENTUM = 0.7

NO_TREE = np.zeros(2, dtype=np.int64)


class Dual:
    """Prices, improved round by round; subclasses bound the problem at given prices."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        self.prices = np.zeros(len(arrays.limits))
        self.best_prices = self.prices
        self.bound = -np.inf
        self.step = 1.0
        self.stale = 0
        self.direction: Floats | None = None
        self.base = least_usage(arrays)
        self.settled = False  # no other prices would give a better bound

    def at(self, costs: Floats) -> tuple[float, Ints]:
        """A bound on the problem with these node costs and no limits, and a guess at its solution."""
        raise NotImplementedError

    def round(self, best_known: float) -> tuple[Ints, Ints]:
        """One round at the present prices, then new prices; returns the guess and what it leaves of the limits."""
        arrays = self.arrays
        bound, guess = self.at(priced_costs(arrays, self.prices))
        bound -= float(self.prices @ arrays.limits)
        left = arrays.limits - loads_at(arrays, guess)
        if bound > self.bound:
            self.bound, self.best_prices, self.stale = bound, self.prices, 0
        else:
            self.stale += 1
            if self.stale >= PATIENCE:
                self.step *= SHORTER
                self.stale = 0
        self.move_prices(bound, -left.astype(np.float64), best_known)
        return guess, left

    def move_prices(self, bound: float, excess: Floats, best_known: float) -> None:
        direction = excess if self.direction is None else (1 - MOMENTUM) * excess + MOMENTUM * self.direction
        self.direction = direction
        movable = np.where((self.prices <= 0) & (direction < 0), 0.0, direction)
        norm = float(movable @ movable)
        if norm > 0:
            self.prices = np.maximum(0.0, self.prices + self.step * max(best_known - bound, 0.0) / norm * movable)

    def heeding(self, base: Ints, discount: float = 1.0) -> Ints:
        """A guess that keeps the limits where it can, as long as `base` does: nodes not yet chosen are taken to be as
        in it.

        Prices below the present ones (`discount`) let more be used until the limits stop it.
        """
        raise NotImplementedError

    def reduced(self) -> tuple[float, Floats] | None:
        """A bound, and by how much each place lifts it at least when it is chosen."""
        return None


class MessageDual(Dual):
    """Bounds by message passing; messages carry over from round to round."""

    def __init__(self, arrays: Arrays) -> None:
        super().__init__(arrays)
        self.own = np.zeros(int(np.diff(arrays.offsets).max(initial=1)))
        sources = np.repeat(np.arange(len(arrays.offsets) - 1), np.diff(arrays.links))
        self.messages = np.zeros(int(np.diff(arrays.offsets)[sources].sum()))
        self.leasts = np.zeros(len(arrays.neighbours))

    def at(self, costs: Floats) -> tuple[float, Ints]:
        arrays = self.arrays
        sweep(arrays, costs, self.messages, True, self.own, self.leasts)
        bound = float(sweep(arrays, costs, self.messages, False, self.own, self.leasts))
        guess = self.base.copy()
        decode(arrays, costs, self.messages, self.own, guess, self.base, NO_TREE, NO_TREE, False)
        return bound, guess

    def heeding(self, base: Ints, discount: float = 1.0) -> Ints:
        arrays = self.arrays
        strategies = base.copy()
        least, added = tree_of(arrays.limits - loads_at(arrays, base))
        costs = priced_costs(arrays, discount * self.prices)
        decode(arrays, costs, self.messages, self.own, strategies, base, least, added, True)
        return strategies

    def reduced(self) -> tuple[float, Floats]:
        arrays = self.arrays
        costs = priced_costs(arrays, self.best_prices)
        bound = -np.inf
        for _ in range(3):
            bound, _guess = self.at(costs)
        bound -= float(self.best_prices @ arrays.limits)
        self.bound = max(self.bound, bound)
        result = np.zeros(len(costs))
        reduced_costs(arrays, costs, self.messages, self.own, self.leasts, result)
        return bound, result


class NarrowDual(Dual):
    """Exact answers at given prices, by elimination."""

    def __init__(self, arrays: Arrays, plan: PairwiseElimination) -> None:
        super().__init__(arrays)
        self.plan = plan
        # With a single limit: cost and excess of the solutions last found below and above it.
        self.tangents: list[tuple[float, float] | None] = [None, None]

    def at(self, costs: Floats) -> tuple[float, Ints]:
        value, strategies = self.plan.solve(np.split(costs, self.arrays.offsets[1:-1]))
        return value, np.array(strategies, dtype=np.int64)

    def heeding(self, base: Ints, discount: float = 1.0) -> Ints:
        arrays = self.arrays
        least, added = tree_of(arrays.limits - loads_at(arrays, base))
        costs = priced_costs(arrays, discount * self.best_prices)

        def pick(node: int, here: Floats) -> int:
            for strategy in np.argsort(here, kind="stable").tolist():
                if strategy == base[node] or try_move(arrays, least, added, node, int(base[node]), strategy):
                    return int(strategy)
            raise AssertionError("the base strategy is always tried")

        totals = self.plan.tables(np.split(costs, arrays.offsets[1:-1]))
        return np.array(self.plan.backtrack(totals, pick), dtype=np.int64)

    def reduced(self) -> tuple[float, Floats]:
        costs = np.split(priced_costs(self.arrays, self.best_prices), self.arrays.offsets[1:-1])
        return self.bound, np.concatenate(self.plan.lifts(costs))

    def move_prices(self, bound: float, excess: Floats, best_known: float) -> None:
        if len(self.prices) != 1:
            super().move_prices(bound, excess, best_known)
            return
        # The bound at price λ is at most cost + λ · excess, for each solution: the next price is where two such lines
        # cross.
        slope = float(excess[0])
        if slope == 0 or (slope < 0 and self.prices[0] == 0):
            self.settled = True
            return
        cost = bound - float(self.prices[0]) * slope
        self.tangents[slope > 0] = (cost, slope)
        below, above = self.tangents
        before = float(self.prices[0])
        if above is None:
            self.prices = np.zeros(1)
        elif below is None:
            self.prices = np.array([max(2 * float(self.prices[0]), abs(best_known - above[0]) / above[1], 1e-12)])
        else:
            self.prices = np.array([max(0.0, (below[0] - above[0]) / (above[1] - below[1]))])
            crossing = above[0] + float(self.prices[0]) * above[1]
            self.settled = float(self.prices[0]) == before or crossing <= self.bound + 1e-9 * abs(self.bound)


def least_usage(arrays: Arrays) -> Ints:
    """Per node, the strategy that uses least over all limits together; the cheapest of those."""
    lengths = (arrays.row_ends - arrays.row_starts).astype(np.float64)
    nodes = np.repeat(np.arange(len(arrays.offsets) - 1), np.diff(arrays.rows))
    counts = np.diff(arrays.offsets)[nodes]
    places = np.repeat(arrays.offsets[:-1][nodes] - arrays.row_amounts, counts) + np.arange(int(counts.sum()))
    used = np.bincount(places, np.repeat(lengths, counts) * arrays.amounts, len(arrays.costs))
    owners = np.repeat(np.arange(len(arrays.offsets) - 1), np.diff(arrays.offsets))
    order = np.lexsort((arrays.costs, used, owners))
    return np.asarray(order[arrays.offsets[:-1]] - arrays.offsets[:-1])


def loads_at(arrays: Arrays, strategies: Ints) -> Ints:
    """What a solution uses of every limit."""
    nodes = np.repeat(np.arange(len(arrays.offsets) - 1), np.diff(arrays.rows))
    amounts = arrays.amounts[arrays.row_amounts + strategies[nodes]]
    steps = np.zeros(len(arrays.limits) + 1, dtype=np.int64)
    np.add.at(steps, arrays.row_starts, amounts)
    np.add.at(steps, arrays.row_ends, -amounts)
    return np.asarray(np.cumsum(steps[:-1]))
