"""Splits of a table: by nodes, pipeline, memory near the limit, half, and by rows that are unlike their neighbours."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median_low

from autopar.cost.hardware.cluster import load_cluster
from benchmarks.published.priced import Priced, half_of

__all__ = ["splits"]

# Share of a device's memory above which its allocator frees and requests blocks again.
FULL_FRACTION = 0.9
# Measured over predicted times of a row and of its neighbours: beyond this ratio the row has a cause of its own.
UNLIKE = 1.6
# Rows of a grid that tell which of them is the odd one.
FEWEST = 3


def splits(priced: Sequence[Priced]) -> list[dict[str, list[Priced]]]:
    """Return the rows of a table by each property in which they differ."""
    unlike = _unlike_neighbours(priced)
    found = [
        _by(priced, lambda one: "one node" if one.run.nodes == 1 else "several nodes"),
        _by(priced, lambda one: "no pipeline" if one.run.pp == 1 else "pipelines"),
        _by(priced, lambda one: "memory nearly full" if _is_full(one) else "memory to spare"),
        _by(priced, lambda one: "unlike its neighbours" if id(one) in unlike else "like its neighbours"),
        _by(priced, lambda one: f"half {half_of(one.run)}"),
    ]
    return [split for split in found if len(split) > 1]


def _by(priced: Sequence[Priced], name: Callable[[Priced], str]) -> dict[str, list[Priced]]:
    found: dict[str, list[Priced]] = defaultdict(list)
    for one in priced:
        found[name(one)].append(one)
    return dict(sorted(found.items()))


def _is_full(one: Priced) -> bool:
    measured = one.run.measured.memory_bytes
    return measured is not None and measured > FULL_FRACTION * load_cluster(one.run.cluster).device.memory_bytes


def _unlike_neighbours(priced: Sequence[Priced]) -> set[int]:
    """Return the rows whose error is unlike those of their neighbours, which a cost model gives equal causes.

    Neighbours have the same model and grid of devices; micro-batches and the sharding of states may differ.
    """
    grids: dict[tuple[object, ...], list[Priced]] = defaultdict(list)
    for one in priced:
        if one.run.measured.step_seconds is not None:
            run = one.run
            grids[run.group, run.tokens, run.dp, run.tp, run.pp, run.recompute].append(one)
    found: set[int] = set()
    for grid in grids.values():
        # Of two halves that differ the faster one is usual.
        usual = median_low(map(_ratio, grid))
        if len(grid) >= FEWEST:
            found.update(id(one) for one in grid if not 1 / UNLIKE < _ratio(one) / usual < UNLIKE)
    return found


def _ratio(one: Priced) -> float:
    assert one.run.measured.step_seconds is not None, one.run.label
    return one.run.measured.step_seconds / one.step_seconds
