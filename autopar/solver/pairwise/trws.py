"""Sequential tree-reweighted message passing (TRW-S; Kolmogorov 2006) on the pairwise costs: a lower bound and good
guesses.

A message over a link changes the costs of its two ends and of its edge by amounts that cancel. After a backward sweep
the costs are a constant plus terms that are all at least zero, so the constant is a lower bound, whatever the messages
were before.
"""

from __future__ import annotations

import numpy as np

from autopar.solver.arrays import Floats, Ints
from autopar.solver.pairwise.flat_arrays import Arrays
from autopar.solver.pairwise.jit import compiled
from autopar.solver.pairwise.limit_tree import least_left, try_move

__all__ = ["decode", "reduced_costs", "sweep"]


@compiled
def gather(arrays: Arrays, costs: Floats, messages: Floats, node: int, into: Floats) -> float:
    """A node's costs with all its messages, less the least of them, which is returned."""
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
    """The part of a node's costs that each of the chains through it gets."""
    behind = 0
    for link in range(arrays.links[node], arrays.links[node + 1]):
        if arrays.neighbours[link] < node:
            behind += 1
    ahead = arrays.links[node + 1] - arrays.links[node] - behind
    return float(1.0 / max(1, ahead, behind))


@compiled
def send(arrays: Arrays, messages: Floats, link: int, share: float, own: Floats, count: int) -> float:
    """The message over a link: its least part is returned, the rest is left in the neighbour's inbox."""
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
