"""Judgement of a micro-benchmark's rows: large ones, where a rate counts, and small ones, where a start does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.published.metrics import Pair, median_error

__all__ = ["JudgedBySize", "Timing", "judge_by_size"]


@dataclass(frozen=True)
class Timing:
    """One row."""

    large: bool
    # None: autopar has no such hardware, or the row does not say which it is.
    pair: Pair | None


@dataclass(frozen=True)
class JudgedBySize:
    """Errors are the median of |predicted − measured| / measured."""

    name: str
    rows: int
    left_out: int
    large_rows: int
    large_error: float | None
    small_rows: int
    small_error: float | None


def judge_by_size(name: str, timings: Iterable[Timing]) -> JudgedBySize:
    rows = list(timings)
    large, small = ([row.pair for row in rows if row.pair and row.large == wanted] for wanted in (True, False))
    left_out = len(rows) - len(large) - len(small)
    return JudgedBySize(name, len(rows), left_out, len(large), median_error(large), len(small), median_error(small))
