"""Agreement of predictions with measurements: by rank, by the choice they lead to, by size, and by what fits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import mean, median

__all__ = ["Hits", "Pair", "kendall_tau", "mean_of", "median_error", "precision_recall", "regret"]


@dataclass(frozen=True)
class Pair:
    predicted: float
    measured: float


def kendall_tau(pairs: Sequence[Pair]) -> float | None:
    """Tau-b: +1 for the same order, −1 for the reverse; None where all values of a side are the same."""
    agreeing = predicted_ties = measured_ties = total = 0
    for one, other in combinations(pairs, 2):
        predicted, measured = _sign(one.predicted - other.predicted), _sign(one.measured - other.measured)
        total += 1
        agreeing += predicted * measured
        predicted_ties += predicted == 0
        measured_ties += measured == 0
    scale = ((total - predicted_ties) * (total - measured_ties)) ** 0.5
    return agreeing / scale if scale else None


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)


def regret(pairs: Sequence[Pair]) -> float:
    """Return the measured time of the predicted best over the best measured time, less one."""
    favourite = min(pairs, key=lambda pair: (pair.predicted, -pair.measured))  # of equal ones the worst
    return favourite.measured / min(pair.measured for pair in pairs) - 1


def median_error(pairs: Iterable[Pair]) -> float | None:
    """Return the median of |predicted − measured| / measured."""
    errors = [abs(pair.predicted / pair.measured - 1) for pair in pairs]
    return median(errors) if errors else None


@dataclass(frozen=True)
class Hits:
    """Precision and recall of predictions of yes and no."""

    precision: float | None
    recall: float | None
    predicted: int
    real: int


def precision_recall(outcomes: Iterable[tuple[bool, bool]]) -> Hits:
    """Return the share of the predicted that are real, and of the real that are predicted; pairs (predicted, real)."""
    listed = list(outcomes)
    both = sum(predicted and real for predicted, real in listed)
    predicted, real = sum(one for one, _ in listed), sum(one for _, one in listed)
    return Hits(both / predicted if predicted else None, both / real if real else None, predicted, real)


def mean_of(numbers: Iterable[float | None]) -> float | None:
    """Return the mean of those that are defined."""
    defined = [number for number in numbers if number is not None]
    return mean(defined) if defined else None
