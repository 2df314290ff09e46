"""Copies of parameters that a step keeps from the first forward to the last backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from autopar.cost.lowered_step import Version
from autopar.ir.graph import NamedGraph
from autopar.sharding.assignment import StepPlan

__all__ = ["kept_copies"]


def kept_copies(
    graph: NamedGraph, plan: StepPlan, bytes_in: Callable[[Version, torch.dtype], float]
) -> Iterator[tuple[str, float]]:
    """Yield names and bytes of copies; `bytes_in` has those of a version in a dtype.

    The copy that readers take has the name of its parameter.
    """
    options = plan.options
    for tensor in graph.parameters:
        name, used = tensor.name, (tensor.name, plan.assignment.values[tensor.name])
        stays = name in plan.keep_gathered and options.micro_batches > 1
        # Parameters that stay gathered, or that are not gathered and compute in another dtype than stored: autograd
        # saves the copy.
        is_whole = plan.assignment.values[name].splits == plan.assignment.stored[name].splits
        if stays or (is_whole and tensor.stored_dtype(options.precision) != tensor.dtype):
            yield name, bytes_in(used, tensor.dtype)
        if options.keeps_casts and name in graph.float8_weights and plan.keeps_between(name):
            # In one order of memory for each direction.
            yield f"{name} in float8", (1 + graph.exported.grad_enabled) * bytes_in(used, torch.float8_e4m3fn)
