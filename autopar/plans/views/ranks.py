"""Devices of a plan, and the kinds of ranks where they are unequal."""

from __future__ import annotations

from collections import Counter

from autopar.cost.unequal_devices import devices_of
from autopar.plans.format import bytes_text, seconds_text, table
from autopar.plans.record import PlanRecord

__all__ = ["devices_text", "shares_notes", "unequal_ranks"]


def devices_text(plan: PlanRecord) -> str:
    """Return the devices of a plan with their numbers: `4 × H100 SXM5 80 GB, 4 × A100 SXM4 80 GB`."""
    every = devices_of(plan.cluster, plan.whole_mesh.whole, plan.whole_mesh.links)
    return ", ".join(f"{count} × {name}" for name, count in Counter(device.name for _, device in every).items())


def unequal_ranks(plan: PlanRecord) -> list[str]:
    """Return a row for each kind of ranks, where devices or shares are unequal."""
    kinds = plan.costs.kinds
    rows = [("part", "device", "ranks", "samples", "compute", "step", "memory")]
    for one in kinds:
        kind = one.kind
        times = seconds_text(one.compute_seconds), seconds_text(one.step_seconds)
        samples = f"{kind.samples:.3g} of an even share"
        rows.append(
            (kind.part or "others", kind.device.name, f"{kind.ranks}", samples, *times, bytes_text(one.peak_bytes))
        )
    return ["unequal ranks: the slowest ones give the step time", *table(rows, right=(2, 4, 5, 6))] if kinds else []


def shares_notes(plan: PlanRecord) -> list[str]:
    """Return a note for each axis that splits the samples by unequal shares."""
    shares = plan.decided.axes.shares
    if shares is None:
        return []
    end = "whole samples, with the gradients of one process"
    parts = ((axis, ":".join(map(str, weights))) for axis, weights in shares.weights)
    return [f"{shares.dim} is split over {axis} by {numbers}: {end}" for axis, numbers in parts]
