"""Places of the ranks of a mesh on the levels of a cluster.

Ranks fill units one after another, and the minor axes of the mesh vary fastest. Where the groups of minor axes would
lie on both sides of a boundary between units, ranks leave places free, if that takes at most one unit in eight more:
64 of 72 devices of a rack for groups of 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import inf, prod
from operator import mul
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

__all__ = ["GroupPart", "free_places", "ranks_of", "ranks_per_unit", "spread_of", "straddling"]

# Units that free places may cost, as a share of those that full ones take.
MORE_UNITS = 1 / 8

# Names and sizes of the axes of a mesh, major to minor.
Sizes = tuple[tuple[str, int], ...]
# Number of units of the level below that a unit of each level joins; None: any number.
Capacities = tuple[int | None, ...]


@lru_cache(maxsize=4096)
def ranks_per_unit(sizes: Sizes, capacities: Capacities) -> tuple[int, ...]:
    """Return the number of ranks in a unit of each level, but for the last one in use."""
    everyone = max(1, prod(size for _, size in sizes))
    groups = _minor_groups(sizes)
    found: list[int] = []
    below = 1
    for level, units in enumerate(capacities):
        # One unit holds everyone where any number may join.
        most = everyone if units is None else below * units
        below = _without_straddling(everyone, most, below, groups, _available(capacities[level + 1 :]))
        found.append(below)
    return tuple(found)


def _available(capacities: Capacities) -> float:
    return inf if None in capacities else prod(units or 1 for units in capacities)


def _without_straddling(everyone: int, most: int, below: int, groups: Sequence[int], available: float) -> int:
    """Return the ranks of a unit: all it holds, or fewer, so that the largest groups that fit into it end with it."""
    largest = max((size for size in groups if size <= most), default=1)
    fewer = most // largest * largest
    if everyone <= most or fewer == most or fewer % below:
        return most
    units, more = -(-everyone // most), -(-everyone // fewer)
    return fewer if more <= min(available, units * (1 + MORE_UNITS)) else most


def free_places(sizes: Sizes, capacities: Capacities) -> dict[int, tuple[int, int]]:
    """Return the levels whose units leave places free: the ranks of a unit, and how many it holds."""
    found, below = {}, 1
    for level, (ranks, units) in enumerate(zip(ranks_per_unit(sizes, capacities), capacities, strict=True)):
        most = below * (units or 1)
        if ranks < most < prod(size for _, size in sizes):
            found[level] = ranks, most
        below = ranks
    return found


def straddling(sizes: Sizes, capacities: Capacities) -> dict[int, tuple[str, ...]]:
    """Return the minor axes whose groups fit into a unit of a level, and of which some lie in two."""
    found: dict[int, tuple[str, ...]] = {}
    names, everyone = [name for name, _ in sizes], prod(size for _, size in sizes)
    for level, ranks in enumerate(ranks_per_unit(sizes, capacities)):
        for place in reversed(range(len(sizes))):
            group = prod(size for _, size in sizes[place:])
            if 1 < group <= ranks < everyone and ranks % group:
                found.setdefault(level, tuple(names[place:]))
    return found


@lru_cache(maxsize=4096)
def ranks_of(sizes: Sizes, axes: tuple[str, ...]) -> tuple[int, ...]:
    """Return the ranks of the first group along some axes."""
    return tuple(_groups(sizes, axes)[0].tolist())


class GroupPart(NamedTuple):
    """Part of a group on one level."""

    # Units of the level below that one unit of the level joins, in the largest part of the group.
    units: int
    # Ranks of its smallest part, in a unit of the level below, and of the whole mesh there.
    ranks: int
    active: int


@lru_cache(maxsize=4096)
def spread_of(sizes: Sizes, axes: tuple[str, ...], capacities: Capacities) -> tuple[GroupPart, ...]:
    """Return the parts of the most spread group along some axes on each level.

    All groups of an axis run at once, and the step waits for the slowest.
    """
    every = _groups(sizes, axes)
    filled = ranks_per_unit(sizes, capacities)
    if _are_alike(sizes, filled):
        every = every[:1]
    everyone = prod(size for _, size in sizes)
    columns: list[np.ndarray] = []
    below, room = _Stretches(every), 1
    for ranks in filled:
        above = _Stretches(every // ranks)
        columns += [*below.smallest(room, everyone), above.most_of(below)]
        below, room = above, ranks
    # The outermost level counts first. Smaller parts with more ranks beside them are slower.
    worst = max(zip(*(column.tolist() for column in reversed(columns)), strict=True))[::-1]
    parts = zip(worst[::3], worst[1::3], worst[2::3], strict=True)
    return tuple(GroupPart(units, -ranks, active) for active, ranks, units in parts)


class _Stretches:
    """Neighbouring ranks of groups that lie in the same unit of a level, group by group."""

    def __init__(self, units: np.ndarray) -> None:
        import numpy as np  # late: the help of the command line reads clusters and needs no numpy

        self.begins = np.ones(units.shape, dtype=bool)
        self.begins[:, 1:] = np.diff(units, axis=1) != 0
        self.places = np.flatnonzero(self.begins)
        self.units = units.ravel()[self.places]
        # The first stretch of each group.
        self.firsts = np.flatnonzero(self.places % units.shape[1] == 0)

    def smallest(self, room: int, everyone: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the smallest part of each group: how many of all ranks are in its unit, and its own, below zero."""
        import numpy as np  # late: the help of the command line reads clusters and needs no numpy

        own = np.diff(np.append(self.places, self.begins.size))
        active = np.minimum(room, everyone - self.units * room)
        key = np.minimum.reduceat(own * (everyone + 1) - active, self.firsts)
        fewest = -(-key // (everyone + 1))
        return fewest * (everyone + 1) - key, -fewest

    def most_of(self, below: _Stretches) -> np.ndarray:
        """Return the most units of the level below that each group has in one unit."""
        import numpy as np  # late: the help of the command line reads clusters and needs no numpy

        counts = np.add.reduceat(below.begins.ravel().astype(np.int64), self.places)
        return np.maximum.reduceat(counts, self.firsts)


def _groups(sizes: Sizes, axes: tuple[str, ...]) -> np.ndarray:
    """Return the ranks of each group along some axes, in rows and in order; the first row has rank 0."""
    import numpy as np  # late: the help of the command line reads clusters and needs no numpy

    names = [name for name, _ in sizes]
    along = sorted(names.index(axis) for axis in axes)
    others = [place for place in range(len(names)) if place not in along]
    ranks = np.arange(prod(size for _, size in sizes)).reshape([size for _, size in sizes])
    return ranks.transpose(others + along).reshape(-1, prod(sizes[place][1] for place in along))


def _are_alike(sizes: Sizes, filled: Sequence[int]) -> bool:
    """Return whether each group along minor axes lies in one unit of a level, or fills whole ones."""
    return all(not (ranks % group and group % ranks) for ranks in filled for group in _minor_groups(sizes))


def _minor_groups(sizes: Sizes) -> list[int]:
    """Return the ranks of a group along the minor axes, with each axis more."""
    return list(accumulate((size for _, size in reversed(sizes)), mul))
