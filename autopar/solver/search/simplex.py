"""Shares that sum to one."""

from __future__ import annotations

import numpy as np

from autopar.solver import Flags, Floats

__all__ = ["lifted", "on_simplex"]


def lifted(shares: Floats, takers: Flags, most: int) -> Floats:
    """Raise shares that sum to one until the largest `most` of them do; only the ops that take a sharding have one."""
    if most <= 1:
        return takers.astype(np.float64)
    descending = np.sort(shares)[::-1]
    total = descending[:most].sum()
    return np.where(takers, np.maximum(shares, descending[most - 1]) / total, 0.0)


def on_simplex(values: Floats) -> Floats:
    """Return the nearest point whose entries sum to one and are not negative."""
    descending = np.sort(values)[::-1]
    above = np.cumsum(descending) - 1.0
    last = np.flatnonzero(descending * np.arange(1, len(values) + 1) > above)[-1]
    return np.asarray(np.maximum(values - above[last] / (last + 1), 0.0))
