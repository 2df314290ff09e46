"""A published run with its price, and the half of the runs that it belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

from benchmarks.published.runs import Run

__all__ = ["Priced", "half_of"]


@dataclass(frozen=True)
class Priced:
    """A run with what the cost model says of it."""

    run: Run
    step_seconds: float
    # None where nothing is known to compare it with.
    memory_bytes: float | None
    fits: bool


def half_of(run: Run) -> str:
    """Return `fit` or `held`, by a hash of the model and the grid of devices.

    Runs on one grid (equal sizes of the axes, any micro-batch) are alike, so a grid is in one half as a whole.
    """
    grid = f"{run.group} {run.cluster} dp={run.dp} tp={run.tp} pp={run.pp}"
    return ("fit", "held")[sha256(grid.encode()).digest()[0] % 2]
