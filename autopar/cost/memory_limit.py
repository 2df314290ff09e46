"""The memory limit of a layout, and the check of a plan against it."""

from __future__ import annotations

from autopar.cost.memory.peak import memory
from autopar.cost.step.lowered_step import LoweredStep
from autopar.ir.graph import NamedGraph
from autopar.sharding.assignment import StepPlan
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.source import layout_error
from autopar.sharding.layout.syntax import Limit

__all__ = ["check_memory", "memory_limit", "size_text"]


def memory_limit(layout: Layout, device_bytes: float | None) -> tuple[Limit, float] | None:
    """The lowest limit of memory that a layout sets, and its bytes; `device_bytes` is what a device has, if known."""
    found: list[tuple[Limit, float]] = []
    for statement in layout:
        if not isinstance(statement, Limit) or statement.quantity != "memory":
            continue
        if statement.size_bytes is not None:
            found.append((statement, float(statement.size_bytes)))
            continue
        assert statement.percent is not None, "a limit is a size or a percentage"
        if device_bytes is None:
            raise layout_error(
                "E6",
                f"{statement.percent:g}% of the memory of a device that is not known here",
                "write a size, as in 'limit memory 70GiB'",
                statement.span,
            )
        found.append((statement, statement.percent / 100 * device_bytes))
    return min(found, key=lambda pair: pair[1], default=None)


def check_memory(layout: Layout, graph: NamedGraph, plan: StepPlan, device_bytes: float | None = None) -> None:
    """Raise E6 where a step of the plan takes more on some device than the layout allows."""
    limit = memory_limit(layout, device_bytes)
    if limit is None:
        return
    statement, most_bytes = limit
    found = memory(LoweredStep(graph, plan))
    if found.peak_bytes > most_bytes:
        parts = {
            "parameters": found.parameters_bytes + found.copies_bytes,
            "gradients": found.gradients_bytes,
            f"the states of {plan.optimizer}": found.optimizer_bytes,
            "what is kept for the backward": found.saved_bytes,
        }
        listed = ", ".join(f"{what} {size_text(part)}" for what, part in parts.items())
        raise layout_error(
            "E6",
            f"a step takes {size_text(found.peak_bytes)} on a device, in {found.peak_at}, "
            f"more than {size_text(most_bytes)}; "
            f"when they are all there, {listed}",
            "split more, 'recompute full @...' of repeated layers, 'regather @*', fewer examples at a time, "
            "or a higher limit",
            statement.span,
        )


def size_text(count: float) -> str:
    unit = next((unit for unit in ("GiB", "MiB", "KiB") if count >= _UNITS[unit]), "B")
    return f"{count / _UNITS[unit]:.2f} {unit}"


_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}
