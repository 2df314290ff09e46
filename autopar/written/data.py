"""A plan as plain data, for programs; the format is documented in docs/plans.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autopar.written.summary import dims_by_place

if TYPE_CHECKING:
    from autopar.written.plan import Plan

__all__ = ["costs_data", "plan_data"]


def plan_data(plan: Plan) -> dict[str, Any]:
    """What `autopar plan --json` prints."""
    return {
        "model": type(plan.graph.model).__name__,
        "graph": plan.decided.graph,
        "mesh": dict(plan.decided.axes),
        "cluster": plan.cluster.name,
        "origin": plan.origin,
        **costs_data(plan),
        "dims": {dim: axes for axes, dims in reversed(list(dims_by_place(plan).items())) for dim in dims},
        "communication": [
            {
                "kind": one.kind,
                "axes": list(one.axes),
                "direction": one.direction,
                "of": one.of,
                "count": one.count,
                "bytes": one.bytes,
                "seconds": one.seconds,
            }
            for one in plan.costs.communication
        ],
        "layout": plan.text,
    }


def costs_data(plan: Plan) -> dict[str, Any]:
    """Time and memory."""
    costs, memory = plan.costs, plan.costs.memory
    return {
        "step_seconds": costs.step_seconds,
        "bound_seconds": plan.bound_seconds,
        "gap": plan.gap,
        "fits": plan.fits,
        "mfu": costs.mfu,
        "seconds": {
            "forward": costs.compute.forward_seconds,
            "backward": costs.compute.backward_seconds,
            "recompute": costs.compute.recompute_seconds,
            "optimizer": costs.compute.optimizer_seconds,
            "exposed": costs.exposed_seconds,
            "waiting": costs.waiting_seconds,
        },
        "memory_bytes": {
            "limit": plan.limit_bytes,
            "peak": memory.peak_bytes,
            "parameters": memory.parameters_bytes,
            "copies": memory.copies_bytes,
            "gradients": memory.gradients_bytes,
            "optimizer": memory.optimizer_bytes,
            "inputs": memory.inputs_bytes,
            "saved": memory.saved_bytes,
        },
    }
