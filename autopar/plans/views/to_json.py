"""Plans as plain data for programs; docs/plans.md documents the format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from autopar.ir.precision import Precision
from autopar.plans.record import PlanRecord
from autopar.plans.views.alternatives import Alternative
from autopar.plans.views.confidence import range_data
from autopar.plans.views.explain import Explanation, OpFacts
from autopar.plans.views.summary import dims_by_place
from autopar.sharding.layout.drift import print_drift

__all__ = ["costs_data", "explanation_data", "plan_data", "short_data"]


def plan_data(plan: PlanRecord) -> dict[str, Any]:
    """Return the data of `autopar plan --json`."""
    return {
        "model": type(plan.graph.model).__name__,
        "graph": plan.decided.graph,
        "parameters": {"numel": plan.graph.numel, "trained_numel": plan.graph.trained_numel},
        "mesh": dict(plan.decided.axes),
        "cluster": plan.cluster.name,
        "origin": plan.origin,
        "loss_pieces": plan.graph.loss_pieces,
        "capacity": plan.graph.capacity,
        **costs_data(plan),
        # Reversed: of several places of a dim, the most frequent one wins.
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


def costs_data(plan: PlanRecord) -> dict[str, Any]:
    """Return the costs of a plan."""
    costs, memory = plan.costs, plan.costs.memory
    return {
        "drift": _drift_data(plan),
        "precision": precision_data(plan.decided.options.precision),
        "step_seconds": costs.step_seconds,
        "range": range_data(plan.time_range),
        "bound_seconds": plan.bound_seconds or None,
        "bound_by": plan.bound_by or None,
        "gap": plan.gap,
        "claimed": plan.claimed,
        "fits": plan.fits,
        "mfu": costs.mfu,
        "seconds": {
            "forward": costs.compute.forward_seconds,
            "backward": costs.compute.backward_seconds,
            "recompute": costs.compute.recompute_seconds,
            "optimizer": costs.compute.optimizer_seconds,
            "exposed": costs.exposed_seconds,
            "waiting": costs.waiting_seconds,
            "host_copies": costs.copies_seconds,
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
            "host": memory.host_bytes,
        },
        "loading": asdict(plan.loading),
    }


def _drift_data(plan: PlanRecord) -> dict[str, Any] | None:
    """Return the replicas that drift; None for other plans."""
    drift, meetings = plan.decided.drift, plan.costs.meetings
    if drift is None or meetings is None:
        return None
    return {
        "statement": print_drift(drift.statement),
        "mesh": drift.mesh.whole,
        "replicas": drift.replicas,
        "sent_bytes": meetings.sent_bytes,
        "sent_seconds": meetings.sent_seconds,
        "late_seconds": meetings.late_seconds,
        "memory_bytes": meetings.memory_bytes,
    }


def precision_data(precision: Precision) -> dict[str, str | None]:
    """Return a precision with all its dtypes; null for those of the model."""
    return {"name": str(precision), **{field: dtype or None for field, dtype in asdict(precision).items()}}


def short_data(plan: PlanRecord | None) -> dict[str, Any]:
    """Return step time, memory and fit; null without a plan."""
    if plan is None:
        return dict.fromkeys(("step_seconds", "memory_bytes", "fits"))
    return {"step_seconds": plan.step_seconds, "memory_bytes": plan.memory_bytes, "fits": plan.fits}


def explanation_data(explanation: Explanation, alternatives: Sequence[Alternative]) -> dict[str, Any]:
    """Return the data of `autopar explain --json` for a name."""
    facts = explanation.tensor
    tensor = facts and {
        "dims": list(facts.tensor.dims),
        "shape": list(facts.tensor.shape),
        "dtype": str(facts.tensor.dtype).removeprefix("torch."),
        "stored_dtype": facts.stored_dtype and str(facts.stored_dtype).removeprefix("torch."),
        "reduce_dtype": facts.reduce_dtype and str(facts.reduce_dtype).removeprefix("torch."),
        "kind": facts.tensor.kind,
        "frozen": facts.tensor.frozen,
        "layout": facts.layout,
        "used": facts.used,
        "held": facts.gather,
        "stage": facts.stage,
        "lines": [{"line": number, "text": text} for number, text in facts.lines],
    }
    return {
        "tensor": tensor,
        "ops": [_op_data(op) for op in explanation.ops],
        "used_by": [{"op": op, "layout": layout} for op, layout in explanation.used_by],
        "alternatives": [{"change": o.change, **short_data(o.plan), "why": o.why or None} for o in alternatives],
    }


def _op_data(facts: OpFacts) -> dict[str, Any]:
    node = facts.node
    return {
        "name": node.name,
        "op": node.op,
        "rule": str(node.rule),
        "source": node.source,
        "factors": dict(node.factors),
        "choice": facts.choice,
        "line": node.origin.source or None,
        "code": node.origin.source_code or None,
        "pinned": [{"line": number, "text": text} for number, text in facts.pinned],
        "takes": [{"tensor": name, "layout": layout} for name, layout in facts.takes],
        "sends": [
            {
                "kind": one.kind,
                "axes": list(one.axes),
                "direction": one.direction,
                "tensor": one.tensor,
                "bytes": one.bytes,
                "seconds": one.seconds,
            }
            for one in facts.sends
        ],
    }
