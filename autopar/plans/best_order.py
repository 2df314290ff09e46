"""Search in the plain and in the folded order of the sequence, where the layout leaves it open."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from autopar.errors import LayoutError
from autopar.ir.graph import NamedGraph
from autopar.mesh import Mesh
from autopar.plans.folded import fold_that_pays, in_order
from autopar.plans.plan import Plan
from autopar.sharding.layout.language import Layout
from autopar.sharding.options import Outputs
from autopar.solver.infeasible import NoFeasiblePlan
from autopar.solver.short_plans import CONTEXT

__all__ = ["in_best_order", "shapes_in_best_order"]

# A plan that gains less keeps the plain order.
LEAST_GAIN = 1e-3


def in_best_order(
    graph: NamedGraph,
    mesh: Mesh,
    layout: Layout | None,
    outputs: Outputs,
    search: Callable[[NamedGraph, float, float], Plan],
    seconds: float,
    beat_seconds: float,
) -> Plan:
    """Return the plan of a search in the order that a layout states; without a word of it, the faster of both.

    `search` takes a graph, its time limit, and the step time of a plan to beat.
    """
    if layout is not None and layout.fold is not None:
        return search(in_order(graph, layout, outputs), seconds, beat_seconds)
    folded = fold_that_pays(graph, outputs) if mesh.size > 1 else None
    if folded is None:
        return search(graph, seconds, beat_seconds)
    half = seconds / 2
    try:
        found = search(folded, half, beat_seconds)
    except (NoFeasiblePlan, LayoutError):  # a layout may name ops of the plain order
        return search(graph, half, beat_seconds)
    try:
        plain = search(graph, half, min(beat_seconds, found.step_seconds))
    except (NoFeasiblePlan, LayoutError):
        return found
    best = found if found.step_seconds < (1 - LEAST_GAIN) * plain.step_seconds else plain
    # No plan of either order is below the lower bound; 0 is none.
    return replace(best, bound_seconds=min(plan.bound_seconds or 0.0 for plan in (found, plain)))


def shapes_in_best_order(
    graph: NamedGraph,
    devices: int,
    outputs: Outputs,
    time_limit: float,
    search: Callable[[NamedGraph, float], Plan | None],
) -> Plan | None:
    """Return the plan of a search of mesh shapes, in the folded order if a fold pays.

    Where that finds no plan, or one without ranks for the sequence, the plain order is searched too. `search` takes a
    graph and its time limit, and returns None where nothing fits.
    """
    ends = time.monotonic() + time_limit
    folded = fold_that_pays(graph, outputs) if devices > 1 else None
    if folded is None:
        return search(graph, time_limit)
    found = search(folded, time_limit)
    left = ends - time.monotonic()
    if found is not None and (left <= 0.0 or CONTEXT in found.mesh.whole):
        return found
    plain = search(graph, max(time_limit / 2, left) if found is None else left)
    return min(filter(None, (plain, found)), key=lambda plan: plan.step_seconds, default=None)
