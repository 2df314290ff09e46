"""Progress of a search, and the gap between cost and bound."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["PROVED", "Progress", "relative_gap"]


# A relative gap below this is a proof: the rest is rounding of sums.
PROVED = 1e-9


def relative_gap(cost: float, bound: float) -> float:
    """Return how far the bound is below the cost, as a fraction of the cost."""
    if cost == bound:
        return 0.0
    if not (math.isfinite(cost) and math.isfinite(bound)):
        return math.inf
    gap = max(0.0, cost - bound) / max(abs(cost), abs(bound))
    return gap if gap > PROVED else 0.0


@dataclass(frozen=True)
class Progress:
    """State of a search, as `progress` callbacks receive it."""

    stage: str
    seconds: float
    cost: float
    bound: float

    @property
    def gap(self) -> float:
        return relative_gap(self.cost, self.bound)
