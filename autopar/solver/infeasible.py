"""Errors of infeasible problems."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from autopar.errors import AutoparError, LayoutError
from autopar.ir.values import NamedNode
from autopar.mesh import SubMesh
from autopar.sharding.bound_layout import BoundLayout
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.source import SourceSpan, layout_error
from autopar.sharding.layout.syntax import Statement
from autopar.sharding.op_pins import infeasible_pin, pin_of

__all__ = ["NoFeasiblePlan", "OutOfTime", "conflicting", "no_option", "spans_of"]


class NoFeasiblePlan(AutoparError):
    """No plan keeps all limits."""

    def __init__(self, what: str, least_bytes: float | None = None, lines: Sequence[str] = (), fix: str = "") -> None:
        super().__init__("\n".join((what, *lines, *([fix] if fix else ()))))
        self.what = what
        self.least_bytes = least_bytes
        """The least memory that was found to do, where memory is short."""
        self.lines = tuple(lines)
        """Lines of the layout, as the message shows them."""
        self.fix = fix


class OutOfTime(Exception):
    """The time ended before the model was built; plans found until then stand."""


def no_option(
    bound_layout: BoundLayout, node: NamedNode, axes: SubMesh, can_be_had: Callable[[BoundLayout], bool]
) -> LayoutError:
    """Return the error of an op none of whose choices keeps the layout; `can_be_had` tests whether a part of it is
    feasible.
    """
    lines, _ = conflicting(bound_layout, can_be_had)
    pin = pin_of(bound_layout.layout, node)
    if pin is not None and len(lines) < 2:
        return infeasible_pin(pin, node, axes, bound_layout.graph)
    conflict = "\nthese lines cannot all be had; without any one of them, the others can" if len(lines) > 1 else ""
    return layout_error(
        "E7" if len(lines) > 1 else "E5",
        f"the op {node.name} ({node.op}) cannot be split as the layout requires\n"
        f"  rule  {node.rule}\n  line  {node.origin.source}: {node.origin.source_code}{conflict}",
        "split other dims of its tensors, or leave some open with '?'",
        *spans_of(lines),
    )


# -- smallest conflicting sets -----------------------------------------------------------------------------------------


# In longer layouts, such as whole plans, the op that has no option tells more than a set of lines.
MOST_LINES = 100


def conflicting(
    bound_layout: BoundLayout, can_be_had: Callable[[BoundLayout], bool], deadline: float = math.inf
) -> tuple[tuple[Statement, ...], bool]:
    """Return a smallest infeasible set of lines, and whether it is proved smallest within the time.

    Lines are dropped for good while the rest stays infeasible: all at once, then halves, then ever smaller parts.
    """
    kept = list(bound_layout.given.statements)
    if len(kept) > MOST_LINES:
        return (), False
    size = len(kept)
    while size:
        for start in reversed(range(0, len(kept), size)):
            if time.monotonic() > deadline:
                return tuple(kept), False
            rest = [*kept[:start], *kept[start + size :]]
            others = BoundLayout(bound_layout.graph, Layout(tuple(rest), bound_layout.given.name), bound_layout.axes)
            try:
                kept = kept if _can_be_had(others, can_be_had) else rest
            except OutOfTime:
                return tuple(kept), False
        size //= 2
    return tuple(kept), True


def _can_be_had(bound_layout: BoundLayout, can_be_had: Callable[[BoundLayout], bool]) -> bool:
    try:
        return can_be_had(bound_layout)
    except LayoutError:
        return True  # what was left out is needed for the rest to mean anything


def spans_of(statements: Sequence[Statement]) -> list[SourceSpan]:
    found = (getattr(statement, "span", None) for statement in statements)
    return [span for span in found if span is not None]
