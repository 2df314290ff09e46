"""The solver: a graph, a mesh and a cluster as an optimisation model, its solution, and the assignment it stands for.

setting      the problem, and what the user has fixed
candidates   options of ops and tensors
model/       sets, variables, factors, objective; solution -> assignment
search/      bounds, multipliers, incumbents
infeasible   errors where there is no plan; `explain_infeasible` writes their messages
stages       stages of a pipeline: schedules, cuts, recomputation
shapes       meshes that an open mesh may be; `segments`, `stage_design` and `staged_plan` serve it
solve        entry point: `solve_plan`; published strategies as first candidates
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["PROVED", "Flags", "Floats", "Ints", "Progress", "relative_gap"]


Floats = NDArray[np.float64]


Ints = NDArray[np.int64]


Flags = NDArray[np.bool_]


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
