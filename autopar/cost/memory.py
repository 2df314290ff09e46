"""What one device holds: parameters, gradients, optimizer states, what is saved for the backward; and the peak."""

from __future__ import annotations

from math import prod

from autopar.conversions import Wiring
from autopar.cost.compute import local_bytes
from autopar.cost.costs import MemoryCosts
from autopar.cost.optimizers import optimizer_of
from autopar.plan import Plan
from autopar.tracing.graph import NamedGraph

__all__ = ["memory"]


def memory(graph: NamedGraph, plan: Plan, wiring: Wiring) -> MemoryCosts:
    """The bytes of one step, on the rank that holds most."""
    axes = plan.axes
    stored = optimizer = gradients = 0.0
    optimizer_kind = optimizer_of(plan.optimizer)
    for tensor in graph.tensors.values():
        if tensor.kind in ("param", "buffer", "constant"):
            count = local_bytes(graph, tensor.name, plan.decisions.stored[tensor.name], axes) / tensor.dtype.itemsize
            size = (plan.master_dtype or tensor.dtype).itemsize if tensor.kind == "param" else tensor.dtype.itemsize
            stored += count * size
            if tensor.kind == "param" and tensor.requires_grad:
                optimizer += optimizer_kind.states * count * size
                gradients += count * (plan.gradient_dtype or plan.master_dtype or tensor.dtype).itemsize
    saved = sum(
        local_bytes(graph, tensor.name, plan.decisions.values[tensor.name], axes)
        for tensor in graph.saved
        if tensor.kind != "param"
    ) + sum(save.bytes for save in graph.saved_inside) / prod(axes.values())
    return MemoryCosts(stored, gradients, optimizer, 0.0, saved, stored + gradients + optimizer + saved, "")
