"""Interpolate the ratio of measured to predicted times between the points of a table.

A table corrects a formula: the price is the formula times a ratio, and the ratio is that of the table's own points.
Points are logarithms of sizes, and logarithms of ratios are averaged. At a point of the table the price is therefore
the measured time. A table made from the formula changes no price, between its points neither.

    one size        linear between the two neighbours
    several sizes   the mean of the nearest points, weighted by their distance
    outside         first moved to the nearest place inside the sizes of the table, so far away the ratio is constant
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nsmallest
from math import exp, log, log2

__all__ = ["Place", "Ratios", "place"]

# Points of a mean, for each size of a point: as many as surround a place on a grid.
NEAREST_PER_SIZE = 2
# Exponent of the squared distance in the weights; errors of held-back products and attentions are flat around it.
FALL = 2
# Squared distance, in octaves, below which a place is a point of the table.
SAME = 1e-18

Place = tuple[float, ...]


def place(*sizes: float) -> Place:
    """Return the place of some sizes; sizes below 1, as of a share of a row, count as 1."""
    return tuple(log2(max(1.0, size)) for size in sizes)


@dataclass(frozen=True, eq=False)
class Ratios:
    """Ratios of measured to predicted times at the places of a table."""

    places: tuple[Place, ...]
    logarithms: tuple[float, ...]
    # Least and largest coordinate of each size.
    box: tuple[tuple[float, float], ...]

    @staticmethod
    def of(times: Sequence[tuple[Place, float, float]]) -> Ratios:
        """Return the ratios of places with their measured and predicted seconds, of which there is one at least."""
        ordered = sorted(times)
        places = tuple(where for where, _, _ in ordered)
        logarithms = tuple(log(measured / predicted) for _, measured, predicted in ordered)
        return Ratios(places, logarithms, tuple((min(one), max(one)) for one in zip(*places, strict=True)))

    def at(self, where: Place) -> float:
        """Return the ratio at a place."""
        inside = tuple(min(max(size, least), most) for size, (least, most) in zip(where, self.box, strict=True))
        return exp(self._linear(inside) if len(inside) == 1 else self._mean(inside))

    @property
    def least(self) -> float:
        """Return the least ratio at any place."""
        return exp(min(self.logarithms))

    def _linear(self, where: Place) -> float:
        i = bisect_left(self.places, where)
        (right,), value = self.places[i], self.logarithms[i]
        if i == 0 or right == where[0]:
            return value
        (left,) = self.places[i - 1]
        share = (where[0] - left) / (right - left)
        return (1 - share) * self.logarithms[i - 1] + share * value

    def _mean(self, where: Place) -> float:
        distances = (
            (sum((a - b) ** 2 for a, b in zip(where, point, strict=True)), value)
            for point, value in zip(self.places, self.logarithms, strict=True)
        )
        nearest = nsmallest(NEAREST_PER_SIZE * len(where), distances)
        if nearest[0][0] < SAME:
            return nearest[0][1]
        weights = [1.0 / squared**FALL for squared, _ in nearest]
        return sum(weight * value for weight, (_, value) in zip(weights, nearest, strict=True)) / sum(weights)
