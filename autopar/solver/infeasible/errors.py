"""What is said when no plan can be had."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.errors import AutoparError, LayoutError
from autopar.ir.values import NamedNode
from autopar.mesh import SubMesh
from autopar.sharding.bound_layout import BoundLayout
from autopar.sharding.layout.source import layout_error
from autopar.sharding.op_pins import infeasible_pin, pin_of
from autopar.solver.infeasible.minimal_conflict import conflicting, spans_of

__all__ = ["NoFeasiblePlan", "OutOfTime", "no_option"]


class NoFeasiblePlan(AutoparError):
    """No plan keeps all limits."""

    def __init__(self, what: str, least_bytes: float | None = None, lines: Sequence[str] = (), fix: str = "") -> None:
        super().__init__("\n".join((what, *lines, *([fix] if fix else ()))))
        self.what = what
        self.least_bytes = least_bytes
        """The least memory that was found to do, where memory is short."""
        self.lines = tuple(lines)
        """Of the layout, as they are shown."""
        self.fix = fix


class OutOfTime(Exception):
    """The time was up before there was a model to search: what was found until then stands."""


def no_option(
    bound_layout: BoundLayout, node: NamedNode, axes: SubMesh, can_be_had: Callable[[BoundLayout], bool]
) -> LayoutError:
    """No choice of an op gives and takes what the layout demands; `can_be_had` says whether one does under another."""
    lines, _ = conflicting(bound_layout, can_be_had)
    pin = pin_of(bound_layout.layout, node)
    if pin is not None and len(lines) < 2:
        return infeasible_pin(pin, node, axes, bound_layout.graph)
    conflict = "\nthese lines cannot all be had; without any one of them, the others can" if len(lines) > 1 else ""
    return layout_error(
        "E7" if len(lines) > 1 else "E5",
        f"the op {node.name} ({node.op}) cannot be split as the layout requiress tensors\n"
        f"  rule  {node.rule}\n  line  {node.origin.source}: {node.origin.source_code}{conflict}",
        "split other dims of its tensors, or leave some open with '?'",
        *spans_of(lines),
    )
