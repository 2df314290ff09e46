"""What is said when no plan can be had."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autopar.errors import AutoparError, LayoutError
from autopar.layout.language import Layout
from autopar.layout.source import layout_error
from autopar.layout.syntax import Statement
from autopar.pinned import cannot_be_had, pin_of
from autopar.planning.demands import Demands
from autopar.tracing.graph import NamedNode

__all__ = ["NoPlan", "no_option"]

MOST_LINES = 100
"""Of longer layouts, such as whole plans, the op that is in the way says more than its lines."""


class NoPlan(AutoparError):
    """No plan keeps all limits; `least_bytes` is the least memory that was found to do, where memory is short."""

    def __init__(self, text: str, least_bytes: float | None = None) -> None:
        super().__init__(text)
        self.least_bytes = least_bytes


def no_option(
    demands: Demands, node: NamedNode, axes: Mapping[str, int], can_be_had: Callable[[Demands], bool]
) -> LayoutError:
    """No choice of an op gives and takes what the layout demands; `can_be_had` says whether one does under another."""
    lines = _conflicting(demands, can_be_had)
    pin = pin_of(demands.layout, node)
    if pin is not None and len(lines) < 2:
        return cannot_be_had(pin, node, axes)
    spans = [statement.span for statement in lines if getattr(statement, "span", None) is not None]
    conflict = "\nthese lines cannot all be had; without one of them, the others can" if len(lines) > 1 else ""
    return layout_error(
        "E7" if len(lines) > 1 else "E5",
        f"the op {node.name} ({node.op}) cannot be split as the layout wants its tensors\n"
        f"  rule  {node.rule}\n  line  {node.origin.source}: {node.origin.source_code}{conflict}",
        "split other dims of its tensors, or leave some open with '?'",
        *spans,
    )


def _conflicting(demands: Demands, can_be_had: Callable[[Demands], bool]) -> tuple[Statement, ...]:
    """A smallest set of statements that cannot all be had: each is left out for good where the rest still cannot."""
    kept = list(demands.given.statements)
    if len(kept) > MOST_LINES:
        return ()
    for statement in list(kept):
        rest = [one for one in kept if one is not statement]
        try:
            still = not can_be_had(Demands(demands.graph, demands.axes, Layout(tuple(rest), demands.given.name)))
        except LayoutError:
            still = False  # what it says is needed for the rest to mean anything
        if still:
            kept = rest
    return tuple(kept)
