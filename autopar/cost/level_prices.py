"""Choose the all-reduces that run by level: for each size of the buffer, the cheapest way over its links."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from math import inf

from autopar.sharding.level_sums import LevelSum

# Price of a collective: kind, axes, bytes.
Price = Callable[[str, tuple[str, ...], float], float]

# Share of the price of one collective that a way by level must stay below: prices of NCCL are off by a tenth
# (docs/costs.md), and three launches wait for three times as many ranks.
WORTH = 0.9

# Buffers that are compared, in bytes; between two of them the way of the smaller one holds.
SIZES = tuple(2.0**power for power in range(36))


def cheapest_ways(
    axes: Sequence[str], sizes: Mapping[str, int], price: Price, host_seconds: Mapping[str, float]
) -> tuple[LevelSum, ...]:
    """Return the ways that beat one collective clearly, each with the buffers for which it does.

    `axes` are the fast ones first. `host_seconds` are the launches by kind, which must be won back too.
    """
    used = [axis for axis in axes if sizes[axis] > 1]
    candidates = [LevelSum(groups) for groups in _cut(used)]
    if not candidates:
        return ()
    found: list[LevelSum] = []
    for i, size in enumerate(SIZES):
        best = min(candidates, key=lambda one: seconds_by_level(one, sizes, price, size))
        launches = sum(host_seconds.get(phase.kind, 0.0) for phase in best.phases(sizes))
        launches -= host_seconds.get("all_reduce", 0.0)
        whole = price("all_reduce", tuple(used), size)
        if seconds_by_level(best, sizes, price, size) + launches >= WORTH * whole:
            continue
        most = SIZES[i + 1] - 1 if i + 1 < len(SIZES) else inf
        if found and found[-1].groups == best.groups and found[-1].most_bytes == size - 1:
            found[-1] = LevelSum(best.groups, found[-1].least_bytes, most)
        else:
            found.append(LevelSum(best.groups, size, most))
    return tuple(found)


def seconds_by_level(one: LevelSum, sizes: Mapping[str, int], price: Price, buffer_bytes: float) -> float:
    """Return the time of an all-reduce by level, one phase after the other."""
    return sum(price(phase.kind, phase.axes, phase.share * buffer_bytes) for phase in one.phases(sizes))


def _cut(axes: Sequence[str]) -> list[tuple[tuple[str, ...], ...]]:
    """Return all ways to cut a list into at least two groups of neighbours."""
    places = range(1, len(axes))
    return [
        tuple(tuple(axes[begin:end]) for begin, end in zip((0, *cuts), (*cuts, len(axes)), strict=True))
        for count in places
        for cuts in combinations(places, count)
    ]
