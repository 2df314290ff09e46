"""What is left of every limit, as a tree: the least over a range and a change of a range take a logarithmic number of
steps.

Node p of the tree stands for a block of limits: `least[p]` is the least left in the block, `added[p]` what was added to
the whole block and is not in the numbers below it. The leaves are `least[size:]`, with size a power of two.
"""

from __future__ import annotations

import numpy as np

from autopar.solver.arrays import Ints
from autopar.solver.pairwise.flat_arrays import Arrays
from autopar.solver.pairwise.jit import compiled

__all__ = ["change", "least_left", "tree_of", "try_move"]

# More than any limit: the leaves beyond the last limit.
PLENTY = 2**61


def tree_of(left: Ints) -> tuple[Ints, Ints]:
    """The tree over what is left of the limits."""
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
    """The least left in a range, which is not empty."""
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
