"""Linears that multiply in float8 where the precision of a step says so."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autopar.ir.precision import Precision
from autopar.ir.values import NamedNode, NamedTensor

__all__ = ["LINEAR", "MULTIPLE", "in_float8"]

LINEAR = "aten.linear.default"
# Kernels of float8 products take sizes that are multiples of it.
MULTIPLE = 16


def in_float8(node: NamedNode, tensors: Mapping[str, NamedTensor], precision: Precision) -> bool:
    """Return whether an op is a linear that multiplies in float8: one with a weight in bfloat16, except the vocab's."""
    if not precision.linears or node.op != LINEAR:
        return False
    # Logits keep their dtype: their gradients are small numbers beside large ones.
    weight = tensors[node.operands[1] or ""]
    suits = weight.kind == "param" and weight.dtype is torch.bfloat16 and "vocab" not in weight.dims
    return suits and all(size % MULTIPLE == 0 for size in weight.shape)
