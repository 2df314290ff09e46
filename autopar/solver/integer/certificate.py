"""A lower bound on an integer program from the duals of its relaxation, whoever computed them and however well.

Any duals give a bound. Those with a wrong sign are set to zero, and the free columns get the duals that make their
reduced costs vanish. Then Σ duals · sides + Σ over groups of the least reduced cost is at most the optimum. Only sums
and minima of numpy are trusted, and their rounding errors are subtracted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.solver import Floats
from autopar.solver.integer.program import IntegerProgram

__all__ = ["Certificate", "certify"]

# A sum of so many terms at most is rounded for each reduced cost: rows of one column, with a margin.
TERMS = 256
ROUNDING = TERMS * 2.0**-53


@dataclass(frozen=True, eq=False)
class Certificate:
    """Duals, the bound that they prove, and for each column what the objective is at least if it is one."""

    duals: Floats
    bound: float
    at_one: Floats

    def beyond(self, objective: float) -> NDArray[np.bool_]:
        """Return the columns that are zero in every point of at most this objective whose columns are whole."""
        return self.at_one > objective


def certify(program: IntegerProgram, duals: Floats) -> Certificate:
    """Return the bound that duals prove; it is -inf where some column has no bound that they need."""
    duals = _signed(program, duals)
    priced = program.values * duals[program.row_of]
    width = len(program.lower)
    reduced = program.costs - np.bincount(program.column_of, priced, width)
    sizes = np.abs(program.costs) + np.bincount(program.column_of, np.abs(priced), width)
    reduced[program.free] = 0.0
    sides = np.where(duals > 0, program.row_lower, program.row_upper)
    constants = np.where(duals != 0, duals * np.where(duals != 0, sides, 0.0), 0.0)
    grouped = (program.groups >= 0) & (program.upper > 0)
    alone = (program.groups < 0) & np.isin(np.arange(width), program.free, invert=True)
    least = np.full(program.groups.max(initial=-1) + 1, np.inf)
    np.minimum.at(least, program.groups[grouped], reduced[grouped])
    largest = np.zeros(len(least))
    np.maximum.at(largest, program.groups[grouped], sizes[grouped])
    with np.errstate(invalid="ignore"):
        below = np.where(reduced[alone] < 0, reduced[alone] * program.upper[alone], 0.0)
    exact = program.constant + constants.sum() + least.sum() + below.sum()
    error = ROUNDING * (abs(program.constant) + np.abs(constants).sum() + largest.sum() + sizes[alone].sum())
    bound = float(exact - error)
    at_one = np.full(width, bound)
    at_one[grouped] += np.maximum(0.0, (reduced - least[program.groups])[grouped] - 2 * ROUNDING * sizes[grouped])
    return Certificate(duals, bound, at_one)


def _signed(program: IntegerProgram, duals: Floats) -> Floats:
    """Return duals of the signs that their rows and columns allow, and those that define the free columns."""
    duals = np.where(np.isfinite(duals), duals, 0.0)
    duals = np.where(np.isinf(program.row_lower), np.minimum(duals, 0.0), duals)
    duals = np.where(np.isinf(program.row_upper), np.maximum(duals, 0.0), duals)
    # A column without an upper bound, in one row alone, bounds the dual of that row.
    counts = np.bincount(program.column_of, minlength=len(program.lower))
    is_open = (counts == 1) & np.isinf(program.upper) & np.isfinite(program.lower)
    entries = np.flatnonzero(is_open[program.column_of])
    rows, ratios = program.row_of[entries], program.costs[program.column_of[entries]] / program.values[entries]
    negative = program.values[entries] < 0
    duals[rows] = np.where(negative, np.maximum(duals[rows], ratios), np.minimum(duals[rows], ratios))
    duals[program.defining] = 0.0
    found = program.costs - np.bincount(program.column_of, program.values * duals[program.row_of], len(program.lower))
    duals[program.defining] = -found[program.free]
    return duals
