"""All-reduces by level: reduce-scatter over fast axes, all-reduce over slow ones, all-gather back over the fast ones.

The slow links then carry a part of the buffer for each rank. On two axes this is the all-reduce of a 2-D torus, on more
that of BlueConnect. Prices of links decide for which buffers a plan does so. The decision is data: it is priced, saved
with the plan, and run by all ranks alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf, prod
from typing import NamedTuple

__all__ = ["NO_LEVEL_SUMS", "LevelPhase", "LevelSum", "LevelSums"]


class LevelPhase(NamedTuple):
    """One collective of an all-reduce by level."""

    kind: str
    axes: tuple[str, ...]
    # Bytes of its buffer, as a share of the whole buffer.
    share: float


@dataclass(frozen=True)
class LevelSum:
    """All-reduces over some axes that run by level: for which buffers, and over which groups of axes in turn."""

    # The fast axes first; the last group is all-reduced.
    groups: tuple[tuple[str, ...], ...]
    least_bytes: float = 0.0
    most_bytes: float = inf

    @property
    def axes(self) -> frozenset[str]:
        return frozenset(axis for group in self.groups for axis in group)

    def takes(self, buffer_bytes: float) -> bool:
        return self.least_bytes <= buffer_bytes <= self.most_bytes

    def phases(self, sizes: Mapping[str, int]) -> Iterator[LevelPhase]:
        """Yield the collectives in order; `sizes` are those of the axes."""
        *scattered, summed = self.groups
        shares = [1.0]
        for group in scattered:
            yield LevelPhase("reduce_scatter", group, shares[-1])
            shares.append(shares[-1] / prod(sizes[axis] for axis in group))
        yield LevelPhase("all_reduce", summed, shares[-1])
        for group, share in zip(reversed(scattered), reversed(shares[:-1]), strict=True):
            yield LevelPhase("all_gather", group, share)

    def __str__(self) -> str:
        most = "" if self.most_bytes == inf else f" to {self.most_bytes:.0f}"
        return f"{', '.join('*'.join(group) for group in self.groups)} from {self.least_bytes:.0f}{most}"


_FORM = re.compile(r"(?P<groups>[\w*, ]+) from (?P<least>\d{1,18})(?: to (?P<most>\d{1,18}))?")


@dataclass(frozen=True)
class LevelSums:
    """The all-reduces of a plan that run by level; all others are one collective."""

    found: tuple[LevelSum, ...] = ()

    def over(self, axes: Iterable[str]) -> tuple[LevelSum, ...]:
        """Return those over some axes, each for buffers of other sizes."""
        wanted = frozenset(axes)
        return tuple(one for one in self.found if one.axes == wanted)

    def __str__(self) -> str:
        return "; ".join(map(str, self.found))

    @staticmethod
    def parse(text: str) -> LevelSums:
        """Read what `str` prints."""
        found = []
        for part in filter(None, (part.strip() for part in text.split(";"))):
            form = _FORM.fullmatch(part)
            if form is None:
                raise ValueError(f"expected axes and bytes, as in 'tp, dp from 65536', got '{part}'")
            groups = tuple(tuple(axis.strip() for axis in group.split("*")) for group in form["groups"].split(","))
            found.append(LevelSum(groups, float(form["least"]), float(form["most"]) if form["most"] else inf))
        return LevelSums(tuple(found))


NO_LEVEL_SUMS = LevelSums()
