"""The solver: a graph, a mesh and a cluster as an optimisation model, its solution, and the assignment it stands for.

setting      the problem, and what the user has fixed
candidates   options of ops and tensors
model/       sets, variables, factors, objective; solution -> assignment
search/      bounds, multipliers, incumbents
infeasible   errors where there is no plan; `explain_infeasible` writes their messages
solve        entry point: `solve_plan`; published strategies as first candidates
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Floats", "Ints"]


Floats = NDArray[np.float64]


Ints = NDArray[np.int64]
