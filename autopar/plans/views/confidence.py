"""Ranges of step times and plans that predictions cannot tell apart, as text and as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.cost.step_errors import COVERED
from autopar.cost.time_range import TimeRange, is_within_noise
from autopar.plans.format import percent_text, seconds_text
from autopar.plans.record import PlanRecord

__all__ = ["noise_note", "range_data", "range_line", "range_notes", "within_noise_of"]


def range_line(found: TimeRange | None) -> str:
    """Return the line of a summary about the range of the step time."""
    if found is None:
        return "  range   not known: no measured run is on such a device"
    limits = f"{seconds_text(found.low_seconds)} to {seconds_text(found.high_seconds)}"
    like = f"{found.errors.runs} measured runs ({found.errors.kind.text})"
    return f"  range   {limits}, which held {percent_text(COVERED)} of {like}"


def range_notes(found: TimeRange | None) -> list[str]:
    """Return notes about a range that is extrapolated, and about a plan that fills the memory."""
    if found is None:
        return []
    notes = []
    if found.extrapolated:
        notes.append(f"the range is extrapolated: no measured run {', none '.join(found.extrapolated)}")
    if found.fills_memory:
        notes.append("more than 90 % of the memory is in use: measured runs like that took 1.3 to 10 times as long")
    return notes


def range_data(found: TimeRange | None) -> dict[str, Any] | None:
    """Return the range of a step time; null where none is known."""
    if found is None:
        return None
    return {
        "low_seconds": found.low_seconds,
        "high_seconds": found.high_seconds,
        "share": COVERED,
        "runs": found.errors.runs,
        "like": found.errors.kind.text,
        "extrapolated": list(found.extrapolated),
        "noise": found.errors.apart - 1.0,
    }


def within_noise_of(plan: PlanRecord, other: PlanRecord) -> bool:
    """Return True if the order of two plans may be the other one than predicted."""
    one, two = plan.time_range, other.time_range
    return one is not None and two is not None and is_within_noise(one, two)


def noise_note(plans: Mapping[str, PlanRecord]) -> list[str]:
    """Return a line that names the plans that may be as fast as the fastest one; nothing if there are none."""
    fastest = min(plans, key=lambda name: plans[name].step_seconds, default=None)
    if fastest is None:
        return []
    near = [name for name in plans if name != fastest and within_noise_of(plans[fastest], plans[name])]
    if not near:
        return []
    ranges = [found for name in (fastest, *near) if (found := plans[name].time_range) is not None]
    noise = max(found.errors.apart for found in ranges) - 1.0
    return [f"  note  as fast as {fastest} within the noise of {percent_text(noise)}: {', '.join(near)}"]
