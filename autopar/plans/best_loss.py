"""Search with the loss of whole logits and in pieces, where memory limits a plan and the layout leaves it open."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from autopar.errors import LayoutError
from autopar.ir.graph import NamedGraph
from autopar.mesh import Mesh
from autopar.plans.best_order import LEAST_GAIN, in_best_order
from autopar.plans.loss_pieces import in_pieces, pieces_that_pay
from autopar.plans.plan import Plan
from autopar.sharding.layout.language import Layout
from autopar.sharding.options import Outputs
from autopar.solver.infeasible import NoFeasiblePlan
from autopar.tracing.fold_sequence import fold_sequence
from autopar.tracing.loss_in_pieces import logits_bytes

__all__ = ["with_best_loss"]

# Copies of the logits that pieces may save: the product, its cast, the softmax, and the gradients of the three.
MOST_COPIES = 6
# A plan with less of its memory limit was not changed by it.
LIMITED_SHARE = 0.8


def with_best_loss(
    graph: NamedGraph,
    mesh: Mesh,
    layout: Layout | None,
    outputs: Outputs,
    limit_bytes: float,
    search: Callable[[NamedGraph, float, float], Plan],
    seconds: float,
    beat_seconds: float,
) -> Plan:
    """Return the plan of a search in the faster order, with the loss in pieces as a layout says or where that is
    faster.

    `search` takes a graph, its time limit, and the step time of a plan to beat. Pieces recompute a product, so they are
    tried only where the plan with whole logits is limited by memory.
    """

    def ordered(graph: NamedGraph, seconds: float) -> Plan:
        return in_best_order(graph, mesh, layout, outputs, search, seconds, beat_seconds)

    if layout is not None and layout.pieces is not None:
        return ordered(in_pieces(graph, layout, outputs), seconds)
    pieced = pieces_that_pay(graph, mesh.size, limit_bytes, outputs)
    if pieced is None:
        return ordered(graph, seconds)
    ends, half = time.monotonic() + seconds, seconds / 2
    try:
        whole = ordered(graph, half)
    except (NoFeasiblePlan, LayoutError) as error:
        least = error.least_bytes if isinstance(error, NoFeasiblePlan) else None
        if least is not None and least - MOST_COPIES * logits_bytes(graph) > limit_bytes:
            raise
        try:
            return ordered(pieced, max(half, ends - time.monotonic()))
        except (NoFeasiblePlan, LayoutError):
            raise error from None
    if not _is_limited(whole):
        return whole
    if whole.graph.fold is not None:
        pieced = fold_sequence(pieced, whole.graph.fold, outputs == "loss")
    try:
        found = search(pieced, max(half, ends - time.monotonic()), min(beat_seconds, whole.step_seconds))
    except (NoFeasiblePlan, LayoutError):  # a layout may name the linear layer or the loss
        return whole
    best = found if found.step_seconds < (1 - LEAST_GAIN) * whole.step_seconds else whole
    # No plan with either loss is below the lower bound; 0 is none.
    return replace(best, bound_seconds=min(plan.bound_seconds or 0.0 for plan in (found, whole)))


def _is_limited(plan: Plan) -> bool:
    """Return whether a plan with more memory might be faster."""
    is_full = plan.costs.limited_bytes > LIMITED_SHARE * plan.limit_bytes
    return is_full or any(mode != "none" for mode in plan.decided.recompute.values())
