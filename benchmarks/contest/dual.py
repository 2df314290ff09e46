"""Lower bounds by Lagrange multipliers: every limit gets a multiplier, and a problem without limits is left.

For multipliers λ ≥ 0 the least of cost(x) + Σ_k λ_k (usage_k(x) - limit_k) over all x is at most the optimum.
Elimination finds it if tables are narrow; message passing bounds it otherwise. The usage of its solution less the
limits is a subgradient, and the distance to the incumbent gives the step (Polyak). One multiplier alone is found by
tangents. Guesses that keep the limits are solutions.
"""

from __future__ import annotations

import numpy as np

from autopar.solver import Floats, Ints
from benchmarks.contest.elimination import PairwiseElimination
from benchmarks.contest.flat_arrays import Arrays, compiled, priced_costs
from benchmarks.contest.forest_moves import least_left, tree_of, try_move

__all__ = ["Dual", "MessageDual", "NarrowDual", "decode", "loads_at", "reduced_costs", "sweep"]


# -- message passing ---------------------------------------------------------------------------------------------------


@compiled
def gather(arrays: Arrays, costs: Floats, messages: Floats, node: int, into: Floats) -> float:
    """Return a node's costs with all its messages, less the least of them, which is returned."""
    first = arrays.offsets[node]
    count = arrays.offsets[node + 1] - first
    for s in range(count):
        into[s] = costs[first + s]
    for link in range(arrays.links[node], arrays.links[node + 1]):
        inbox = arrays.inboxes[link]
        for s in range(count):
            into[s] += messages[inbox + s]
    least = into[0]
    for s in range(1, count):
        least = min(least, into[s])
    for s in range(count):
        into[s] -= least
    return float(least)


@compiled
def share_of(arrays: Arrays, node: int) -> float:
    """Return the part of a node's costs that each of the chains through it gets."""
    behind = 0
    for link in range(arrays.links[node], arrays.links[node + 1]):
        if arrays.neighbours[link] < node:
            behind += 1
    ahead = arrays.links[node + 1] - arrays.links[node] - behind
    return float(1.0 / max(1, ahead, behind))


@compiled
def send(arrays: Arrays, messages: Floats, link: int, share: float, own: Floats, count: int) -> float:
    """Return the message over a link: its least part is returned, the rest is left in the neighbour's inbox."""
    other = arrays.neighbours[link]
    size = arrays.offsets[other + 1] - arrays.offsets[other]
    here, there = arrays.inboxes[link], arrays.inboxes[arrays.reverses[link]]
    for t in range(size):
        messages[there + t] = np.inf
    for s in range(count):
        base = share * own[s] - messages[here + s]
        block = arrays.blocks[link] + s * size
        for t in range(size):
            value = base + arrays.values[block + t]
            if value < messages[there + t]:
                messages[there + t] = value
    least = messages[there]
    for t in range(1, size):
        least = min(least, messages[there + t])
    for t in range(size):
        messages[there + t] -= least
    return float(least)


@compiled
def sweep(arrays: Arrays, costs: Floats, messages: Floats, forward: bool, own: Floats, leasts: Floats) -> float:
    """Pass messages to all later (or earlier) neighbours, node by node; after a backward sweep the result is a lower
    bound.

    own: scratch for one node; leasts: what was taken out of the last message over each link.
    """
    bound = 0.0
    nodes = len(arrays.offsets) - 1
    for step in range(nodes):
        node = step if forward else nodes - 1 - step
        bound += gather(arrays, costs, messages, node, own)
        share = share_of(arrays, node)
        count = arrays.offsets[node + 1] - arrays.offsets[node]
        for link in range(arrays.links[node], arrays.links[node + 1]):
            if (arrays.neighbours[link] > node) == forward:
                leasts[link] = send(arrays, messages, link, share, own, count)
                bound += leasts[link]
    return bound


@compiled
def reduced_costs(arrays: Arrays, costs: Floats, messages: Floats, own: Floats, leasts: Floats, result: Floats) -> None:
    """After a backward sweep: how much each place adds to the bound at least when it is chosen."""
    for node in range(len(arrays.offsets) - 1):
        gather(arrays, costs, messages, node, own)
        first = arrays.offsets[node]
        count = arrays.offsets[node + 1] - first
        for s in range(count):
            result[first + s] = own[s]
        for link in range(arrays.links[node], arrays.links[node + 1]):
            other = arrays.neighbours[link]
            if other > node:
                continue
            size = arrays.offsets[other + 1] - arrays.offsets[other]
            here, there = arrays.inboxes[link], arrays.inboxes[arrays.reverses[link]]
            for s in range(count):
                block = arrays.blocks[link] + s * size
                least = np.inf
                for t in range(size):
                    least = min(least, arrays.values[block + t] - messages[there + t])
                result[first + s] += least - messages[here + s] - leasts[link]


@compiled
def decode(
    arrays: Arrays,
    costs: Floats,
    messages: Floats,
    own: Floats,
    strategies: Ints,
    base: Ints,
    least: Ints,
    added: Ints,
    heed: bool,
) -> None:
    """Choose strategies node by node, by costs, earlier choices, and the messages from later nodes.

    With `heed`, only strategies that fit what is left of the limits, where every node not yet chosen takes its `base`
    strategy; when none fits, the node keeps that one.
    """
    for node in range(len(arrays.offsets) - 1):
        first = arrays.offsets[node]
        count = arrays.offsets[node + 1] - first
        for s in range(count):
            own[s] = costs[first + s]
        for link in range(arrays.links[node], arrays.links[node + 1]):
            other = arrays.neighbours[link]
            if other > node:
                for s in range(count):
                    own[s] += messages[arrays.inboxes[link] + s]
            else:
                size = arrays.offsets[other + 1] - arrays.offsets[other]
                for s in range(count):
                    own[s] += arrays.values[arrays.blocks[link] + s * size + strategies[other]]
        if heed:
            for row in range(arrays.rows[node], arrays.rows[node + 1]):
                amount = arrays.row_amounts[row]
                most = arrays.amounts[amount + base[node]] + max(
                    0, least_left(least, added, arrays.row_starts[row], arrays.row_ends[row])
                )
                for s in range(count):
                    if arrays.amounts[amount + s] > most:
                        own[s] = np.inf
        while True:
            best = base[node]
            for s in range(count):
                if own[s] < own[best]:
                    best = s
            if not heed or best == base[node]:
                strategies[node] = best
                break
            if try_move(arrays, least, added, node, base[node], best):
                strategies[node] = best
                break
            own[best] = np.inf


# After so many rounds without a better bound, steps become shorter.
PATIENCE = 8
SHORTER = 0.7
# The part of the last direction that goes into the next one.
MOMENTUM = 0.7

NO_TREE = np.zeros(2, dtype=np.int64)


class Dual:
    """Multipliers, improved round by round; subclasses bound the problem at fixed multipliers."""

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
        """Return a bound on the problem with these node costs and no limits, and a guess at its solution."""
        raise NotImplementedError

    def round(self, best_known: float) -> tuple[Ints, Ints]:
        """Run one round and update the multipliers; return the guess and its slack of the limits."""
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
        """Return a guess that keeps the limits if `base` does: nodes not yet chosen count as in `base`.

        Multipliers below the present ones (`discount`) use more, until the limits stop it.
        """
        raise NotImplementedError

    def reduced(self) -> tuple[float, Floats] | None:
        """Return a bound, and by how much each place lifts it at least when it is chosen."""
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
    """Exact answers at fixed multipliers, by elimination."""

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
    """Return per node the strategy of least total usage; of equal ones the cheapest."""
    lengths = (arrays.row_ends - arrays.row_starts).astype(np.float64)
    nodes = np.repeat(np.arange(len(arrays.offsets) - 1), np.diff(arrays.rows))
    counts = np.diff(arrays.offsets)[nodes]
    places = np.repeat(arrays.offsets[:-1][nodes] - arrays.row_amounts, counts) + np.arange(int(counts.sum()))
    used = np.bincount(places, np.repeat(lengths, counts) * arrays.amounts, len(arrays.costs))
    owners = np.repeat(np.arange(len(arrays.offsets) - 1), np.diff(arrays.offsets))
    order = np.lexsort((arrays.costs, used, owners))
    return np.asarray(order[arrays.offsets[:-1]] - arrays.offsets[:-1])


def loads_at(arrays: Arrays, strategies: Ints) -> Ints:
    """Return the usage of a solution, per limit."""
    nodes = np.repeat(np.arange(len(arrays.offsets) - 1), np.diff(arrays.rows))
    amounts = arrays.amounts[arrays.row_amounts + strategies[nodes]]
    steps = np.zeros(len(arrays.limits) + 1, dtype=np.int64)
    np.add.at(steps, arrays.row_starts, amounts)
    np.add.at(steps, arrays.row_ends, -amounts)
    return np.asarray(np.cumsum(steps[:-1]))
