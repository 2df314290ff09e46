"""Call signatures of other sizes, and of inputs that need no memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed.tensor
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.runtime.compiled_call import CallSignature

__all__ = ["with_shapes", "without_values"]


def without_values(given: CallSignature) -> CallSignature:
    """Return a call with inputs that need no memory; containers among the arguments may hold the given tensors."""
    kept = (_expanded(tensor) for tensor in given.tensors)
    return replace(given, flat=replace(given.flat, tensors=tuple(kept), containers=()))


def _expanded(tensor: Tensor) -> Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    made = torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(local.shape)
    if isinstance(tensor, DTensor):
        mesh, placements = tensor.device_mesh, tensor.placements
        made = DTensor.from_local(made, mesh, placements, shape=tensor.shape, stride=tensor.stride(), run_check=False)
    return made.requires_grad_(tensor.requires_grad)


def with_shapes(given: CallSignature, shapes: Sequence[tuple[int, ...]]) -> CallSignature:
    """Return a call with zeros of other shapes."""
    made = (_zeros(tensor, shape) for tensor, shape in zip(given.tensors, shapes, strict=True))
    return replace(given, flat=replace(given.flat, tensors=tuple(made)))


def _zeros(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if isinstance(tensor, DTensor):
        mesh, placements = tensor.device_mesh, tensor.placements
        made: Tensor = torch.distributed.tensor.zeros(
            *shape, dtype=tensor.dtype, device_mesh=mesh, placements=placements
        )
    else:
        made = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
    return made.requires_grad_(tensor.requires_grad)
