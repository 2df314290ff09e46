"""Differences as numbers that can be compared."""

from __future__ import annotations

from math import inf, isnan
from typing import Any

__all__ = ["number"]


def number(difference: Any) -> float:
    """A difference that is no number is as bad as can be: `max` and `<` know nothing of NaN, and would lose it."""
    found = float(difference)
    return inf if isnan(found) else found
