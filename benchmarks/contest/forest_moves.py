"""Moves of the local search: all strategies of a random forest of nodes at once, by dynamic programming, within the
limits.

A region grows from a random node; a node joins only while it has one neighbour in the region, so the region is a tree,
and the rest of the graph is fixed. Going up the tree gives every node the cost of its best subtree; going down, each
node takes the best strategy that still fits. Random costs, as large as a temperature, make the move one of simulated
annealing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autopar.solver import Floats, Ints
from benchmarks.contest.flat_arrays import Arrays, compiled

# -- slack of the limits -----------------------------------------------------------------------------------------------


# More than any limit: the leaves beyond the last limit.
PLENTY = 2**61


def tree_of(left: Ints) -> tuple[Ints, Ints]:
    """Return the tree over what is left of the limits."""
    size = 1
    while size < len(left):
        size *= 2
    least = np.full(2 * size, PLENTY, dtype=np.int64)
    least[size : size + len(left)] = left
    level = size
    while level > 1:
        level //= 2
        below = least[2 * level : 4 * level]
        least[level : 2 * level] = np.minimum(below[0::2], below[1::2])
    return least, np.zeros(2 * size, dtype=np.int64)


@compiled
def change(least: Ints, added: Ints, start: int, end: int, amount: int) -> None:
    """Add an amount to what is left of a range."""
    size = len(least) // 2
    low, high = start + size, end + size
    while low < high:
        if low & 1:
            least[low] += amount
            added[low] += amount
            low += 1
        if high & 1:
            high -= 1
            least[high] += amount
            added[high] += amount
        low >>= 1
        high >>= 1
    low = (start + size) >> 1
    high = (end - 1 + size) >> 1
    while low >= 1:
        least[low] = min(least[2 * low], least[2 * low + 1]) + added[low]
        if high != low:
            least[high] = min(least[2 * high], least[2 * high + 1]) + added[high]
        low >>= 1
        high >>= 1


@compiled
def least_left(least: Ints, added: Ints, start: int, end: int) -> int:
    """Return the least left in a range, which is not empty."""
    size = len(least) // 2
    low, high = start + size, end - 1 + size
    of_low, of_high = least[low], least[high]
    if low != high:
        while low >> 1 != high >> 1:
            if low & 1 == 0:
                of_low = min(of_low, least[low + 1])
            if high & 1 == 1:
                of_high = min(of_high, least[high - 1])
            low >>= 1
            high >>= 1
            of_low += added[low]
            of_high += added[high]
    found = min(of_low, of_high)
    low >>= 1
    while low >= 1:
        found += added[low]
        low >>= 1
    return int(found)


@compiled
def move(arrays: Arrays, least: Ints, added: Ints, node: int, old: int, new: int) -> None:
    """Charge the limits for another strategy, whether it fits or not."""
    for row in range(arrays.rows[node], arrays.rows[node + 1]):
        first = arrays.row_amounts[row]
        more = arrays.amounts[first + new] - arrays.amounts[first + old]
        if more != 0:
            change(least, added, arrays.row_starts[row], arrays.row_ends[row], -more)


@compiled
def try_move(arrays: Arrays, least: Ints, added: Ints, node: int, old: int, new: int) -> bool:
    """Charge the limits for another strategy if it fits; else leave them."""
    raised = False
    for row in range(arrays.rows[node], arrays.rows[node + 1]):
        first = arrays.row_amounts[row]
        more = arrays.amounts[first + new] - arrays.amounts[first + old]
        if more < 0:
            change(least, added, arrays.row_starts[row], arrays.row_ends[row], -more)
        elif more > 0:
            raised = True
    if not raised:
        return True
    for row in range(arrays.rows[node], arrays.rows[node + 1]):
        first = arrays.row_amounts[row]
        more = arrays.amounts[first + new] - arrays.amounts[first + old]
        if more <= 0:
            continue
        if least_left(least, added, arrays.row_starts[row], arrays.row_ends[row]) < more:
            for back in range(arrays.rows[node], arrays.rows[node + 1]):
                first = arrays.row_amounts[back]
                undone = arrays.amounts[first + new] - arrays.amounts[first + old]
                if undone < 0 or (undone > 0 and back < row):
                    change(least, added, arrays.row_starts[back], arrays.row_ends[back], undone)
            return False
        change(least, added, arrays.row_starts[row], arrays.row_ends[row], -more)
    return True


class ForestState(NamedTuple):
    """A solution and what follows from it.

    conditional: per place, what the strategy costs with all neighbours as they are; least, added: the tree of what is
    left.
    """

    strategies: Ints
    conditional: Floats
    least: Ints
    added: Ints


class Scratch(NamedTuple):
    """Room for one region; `touching` and `waiting` are all zero between moves."""

    region: Ints
    parents: Ints
    up_links: Ints
    inside: Ints
    touching: Ints
    waiting: Ints
    frontier: Ints
    chosen: Ints
    totals: Floats


def scratch_for(arrays: Arrays) -> Scratch:
    nodes = len(arrays.offsets) - 1
    region, parents, up_links, inside, touching, waiting, frontier, chosen = np.zeros((8, nodes), dtype=np.int64)
    totals = np.zeros(int(arrays.offsets[-1]))
    return Scratch(region, parents, up_links, inside, touching, waiting, frontier, chosen, totals)


def state_of(arrays: Arrays, costs: Floats, strategies: Ints, left: Ints) -> ForestState:
    """Return the state of a solution; `left` is what it leaves of the limits."""
    conditional = costs.copy()
    conditional_costs(arrays, strategies, conditional)
    return ForestState(strategies, conditional, *tree_of(left))


@compiled
def conditional_costs(arrays: Arrays, strategies: Ints, conditional: Floats) -> None:
    """Add to node costs what the edges cost with all neighbours as they are."""
    for node in range(len(arrays.offsets) - 1):
        first = arrays.offsets[node]
        count = arrays.offsets[node + 1] - first
        for link in range(arrays.links[node], arrays.links[node + 1]):
            other = arrays.neighbours[link]
            size = arrays.offsets[other + 1] - arrays.offsets[other]
            column = arrays.blocks[link] + strategies[other]
            for s in range(count):
                conditional[first + s] += arrays.values[column + s * size]


@compiled
def grow(arrays: Arrays, scratch: Scratch, start: int, most: int, depth: float) -> int:
    """Grow a tree of up to `most` nodes; `depth` is the chance to go on from the newest node. Returns its size."""
    scratch.frontier[0] = start
    scratch.waiting[start] = 1
    waiting, size = 1, 0
    while waiting > 0 and size < most:
        pick = waiting - 1 if np.random.random() < depth else np.random.randint(waiting)
        node = scratch.frontier[pick]
        waiting -= 1
        scratch.frontier[pick] = scratch.frontier[waiting]
        if scratch.touching[node] > 1:
            continue
        scratch.inside[node] = 1
        scratch.region[size] = node
        scratch.parents[node] = -1
        size += 1
        for link in range(arrays.links[node], arrays.links[node + 1]):
            other = arrays.neighbours[link]
            if scratch.inside[other]:
                scratch.parents[node] = other
                scratch.up_links[node] = link
            scratch.touching[other] += 1
            if not scratch.inside[other] and not scratch.waiting[other] and scratch.touching[other] == 1:
                scratch.waiting[other] = 1
                scratch.frontier[waiting] = other
                waiting += 1
    for i in range(size):
        node = scratch.region[i]
        scratch.inside[node] = 0
        scratch.waiting[node] = 0
        for link in range(arrays.links[node], arrays.links[node + 1]):
            scratch.touching[arrays.neighbours[link]] = 0
            scratch.waiting[arrays.neighbours[link]] = 0
    scratch.waiting[start] = 0
    return size


@compiled
def forbid_unfit(arrays: Arrays, state: ForestState, node: int, totals: Floats) -> None:
    """Make strategies that use more than is left infinitely dear."""
    first = arrays.offsets[node]
    count = arrays.offsets[node + 1] - first
    for row in range(arrays.rows[node], arrays.rows[node + 1]):
        amount = arrays.row_amounts[row]
        most = arrays.amounts[amount + state.strategies[node]]
        most += least_left(state.least, state.added, arrays.row_starts[row], arrays.row_ends[row])
        for s in range(count):
            if arrays.amounts[amount + s] > most:
                totals[first + s] = np.inf


@compiled
def prepare(arrays: Arrays, state: ForestState, scratch: Scratch, size: int, temperature: float, noise: Floats) -> None:
    """The costs of the region's nodes: disturbed, without the edges inside the region, unfit strategies infinite."""
    totals = scratch.totals
    for i in range(size):
        node = scratch.region[i]
        at = np.random.randint(len(noise))
        for place in range(arrays.offsets[node], arrays.offsets[node + 1]):
            totals[place] = state.conditional[place] + temperature * noise[(at + place) % len(noise)]
        forbid_unfit(arrays, state, node, totals)
    for i in range(size):
        node = scratch.region[i]
        parent = scratch.parents[node]
        if parent < 0:
            continue
        block = arrays.blocks[scratch.up_links[node]]
        width = arrays.offsets[parent + 1] - arrays.offsets[parent]
        first, above = arrays.offsets[node], arrays.offsets[parent]
        for s in range(arrays.offsets[node + 1] - first):
            totals[first + s] -= arrays.values[block + s * width + state.strategies[parent]]
        for t in range(width):
            totals[above + t] -= arrays.values[block + state.strategies[node] * width + t]


@compiled
def go_up(arrays: Arrays, scratch: Scratch, size: int) -> None:
    """Add to every node, per strategy, the least cost of the subtrees below it."""
    totals = scratch.totals
    for i in range(size - 1, -1, -1):
        node = scratch.region[i]
        parent = scratch.parents[node]
        if parent < 0:
            continue
        block = arrays.blocks[scratch.up_links[node]]
        width = arrays.offsets[parent + 1] - arrays.offsets[parent]
        first, above = arrays.offsets[node], arrays.offsets[parent]
        count = arrays.offsets[node + 1] - first
        for t in range(width):
            if totals[above + t] == np.inf:
                continue
            best = np.inf
            for s in range(count):
                best = min(best, totals[first + s] + arrays.values[block + s * width + t])
            totals[above + t] += best


@compiled
def go_down(arrays: Arrays, state: ForestState, scratch: Scratch, size: int) -> None:
    """Give every node the best strategy that fits, below the choices above it; charges the limits."""
    totals = scratch.totals
    for i in range(size):
        node = scratch.region[i]
        parent = scratch.parents[node]
        first = arrays.offsets[node]
        count = arrays.offsets[node + 1] - first
        old = state.strategies[node]
        if parent >= 0:
            width = arrays.offsets[parent + 1] - arrays.offsets[parent]
            column = arrays.blocks[scratch.up_links[node]] + scratch.chosen[parent]
            for s in range(count):
                totals[first + s] += arrays.values[column + s * width]
        checked = False
        while True:
            best = old
            for s in range(count):
                if totals[first + s] < totals[first + best]:
                    best = s
            if best == old or try_move(arrays, state.least, state.added, node, old, best):
                break
            totals[first + best] = np.inf
            if not checked:
                forbid_unfit(arrays, state, node, totals)
                checked = True
        scratch.chosen[node] = best


@compiled
def switch(arrays: Arrays, state: ForestState, node: int, new: int) -> float:
    """Change one strategy in the solution, not in the limits; returns what it adds to the cost."""
    old = state.strategies[node]
    first = arrays.offsets[node]
    more = state.conditional[first + new] - state.conditional[first + old]
    state.strategies[node] = new
    for link in range(arrays.links[node], arrays.links[node + 1]):
        other = arrays.neighbours[link]
        beyond = arrays.offsets[other]
        width = arrays.offsets[other + 1] - beyond
        before, after = arrays.blocks[link] + old * width, arrays.blocks[link] + new * width
        for t in range(width):
            state.conditional[beyond + t] += arrays.values[after + t] - arrays.values[before + t]
    return float(more)


@compiled
def forest_moves(
    arrays: Arrays,
    state: ForestState,
    scratch: Scratch,
    noise: Floats,
    seed: int,
    moves: int,
    largest: int,
    temperature: float,
    total: float,
    best: float,
    best_strategies: Ints,
) -> tuple[float, float]:
    """Make moves; `best_strategies` gets every solution below `best`. Returns the last and the best cost."""
    np.random.seed(seed)
    nodes = len(arrays.offsets) - 1
    for _ in range(moves):
        most = int(np.exp(np.random.random() * np.log(largest))) + 1
        size = grow(arrays, scratch, np.random.randint(nodes), most, np.random.random())
        prepare(arrays, state, scratch, size, temperature, noise)
        go_up(arrays, scratch, size)
        go_down(arrays, state, scratch, size)
        before = total
        for i in range(size):
            node = scratch.region[i]
            new = scratch.chosen[node]
            scratch.chosen[node] = state.strategies[node]
            if new != state.strategies[node]:
                total += switch(arrays, state, node, new)
        # A choice above may have counted on one below that did not fit any more.
        if total - before > 3.0 * temperature * size:
            for i in range(size - 1, -1, -1):
                node = scratch.region[i]
                if scratch.chosen[node] != state.strategies[node]:
                    move(arrays, state.least, state.added, node, state.strategies[node], scratch.chosen[node])
                    total += switch(arrays, state, node, scratch.chosen[node])
            total = before
        if total < best:
            best = total
            best_strategies[:] = state.strategies
    return total, best
