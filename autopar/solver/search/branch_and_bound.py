"""The end of small problems: all assignments in the order of their bounds, each priced, until no other can be better.

At fixed prices elimination finds the least assignment; what is left falls into parts, each of which differs from it in
one variable more (Lawler, 1972). The part with the least bound goes on. A part whose bound is no less than the best
known seconds holds nothing better, and when that is so of all, the best known is the best of all.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from autopar.solver.arrays import Floats
from autopar.solver.search.elimination import Elimination

__all__ = ["close"]

Masks = tuple[NDArray[np.bool_], ...]


@dataclass(frozen=True)
class _Part:
    """Assignments: of each variable the states that are left."""

    masks: Masks
    chosen: list[int]


def close(
    elimination: Elimination,
    weights: Floats,
    best: float,
    price: Callable[[list[int]], float],
    most: int,
    deadline: float,
) -> float:
    """A bound on the weighed sums of all assignments of a model that could still be better than the best, after at most
    so many candidates.

    `price` prices an assignment and answers what is to be gone below; `best` is that at the beginning.
    """
    costs, tables = elimination.weighted(weights)
    order = count()
    parts: list[tuple[float, int, _Part]] = []

    def add(masks: Masks) -> None:
        left = [np.where(mask, own, np.inf) for mask, own in zip(masks, costs, strict=True)]
        value, chosen = elimination.plan.solve(left, tables)
        if np.isfinite(value):
            heapq.heappush(parts, (value, next(order), _Part(masks, chosen)))

    add(tuple(np.ones(len(own), dtype=bool) for own in costs))
    for _ in range(most):
        if not parts or parts[0][0] >= best or time.monotonic() > deadline:
            break
        _, _, part = heapq.heappop(parts)
        best = price(part.chosen)
        masks = list(part.masks)
        for place, state in enumerate(part.chosen):
            if masks[place].sum() > 1:
                others = masks[place].copy()
                others[state] = False
                add((*masks[:place], others, *masks[place + 1 :]))
            masks[place] = np.arange(len(costs[place])) == state
    return min(parts[0][0], best) if parts else best
