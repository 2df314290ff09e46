"""Which lines of a layout conflict: a smallest set, without any one of which the others can be had."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence

from autopar.errors import LayoutError
from autopar.sharding.bound_layout import BoundLayout
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.source import SourceSpan
from autopar.sharding.layout.syntax import Statement

__all__ = ["conflicting", "spans_of"]

MOST_LINES = 100
"""Of longer layouts, such as whole plans, what is in the way says more than its lines."""


def conflicting(
    bound_layout: BoundLayout, can_be_had: Callable[[BoundLayout], bool], deadline: float = math.inf
) -> tuple[tuple[Statement, ...], bool]:
    """A smallest set of lines of a layout that cannot be had; and whether it was found in time, or may hold too many.

    All lines, then halves, then ever smaller parts are left out for good where the rest still cannot be had.
    """
    kept = list(bound_layout.given.statements)
    if len(kept) > MOST_LINES:
        return (), False
    for size in _halved(len(kept)):
        for start in reversed(range(0, len(kept), size)):
            if time.monotonic() > deadline:
                return tuple(kept), False
            rest = [*kept[:start], *kept[start + size :]]
            others = BoundLayout(bound_layout.graph, Layout(tuple(rest), bound_layout.given.name), bound_layout.axes)
            if not _can_be_had(others, can_be_had):
                kept = rest
    return tuple(kept), True


def _halved(size: int) -> Iterator[int]:
    while size:
        yield size
        size //= 2


def _can_be_had(bound_layout: BoundLayout, can_be_had: Callable[[BoundLayout], bool]) -> bool:
    try:
        return can_be_had(bound_layout)
    except LayoutError:
        return True  # what was left out is needed for the rest to mean anything


def spans_of(statements: Sequence[Statement]) -> list[SourceSpan]:
    found = (getattr(statement, "span", None) for statement in statements)
    return [span for span in found if span is not None]
