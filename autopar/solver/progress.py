"""Progress of a search, and the gap between cost and bound."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["PROVED", "Progress", "relative_gap"]


# A bound this close to the cost is a proof: what is left is rounding of sums.
PROVED = 1e-9


def relative_gap(cost: float, bound: float) -> float:
    """How far the bound is below the cost, as a part of the cost."""
    if cost == bound:
        return 0.0
    if not (math.isfinite(cost) and math.isfinite(bound)):
        return math.inf
    gap = max(0.0, cost - bound) / max(abs(cost), abs(bound))
    return gap if gap > PROVED else 0.0


@dataclass(frozen=True)
class Progress:
    """How far the search is."""

    stage: str
    seconds: float
    cost: float
    bound: float

    @property
    def gap(self) -> float:
        return relative_gap(self.cost, self.bound)
