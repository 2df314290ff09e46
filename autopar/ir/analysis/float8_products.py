"""Products that multiply in float8 where the precision of a step says so: linears, and products of experts."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autopar.ir.precision import Precision
from autopar.ir.values import NamedNode, NamedTensor
from autopar.rules.ops.routed import GROUPED_ROWS

__all__ = ["LINEAR", "MULTIPLE", "in_float8"]

LINEAR = "aten.linear.default"
# Kernels of float8 products take sizes that are multiples of it.
MULTIPLE = 16


def in_float8(node: NamedNode, tensors: Mapping[str, NamedTensor], precision: Precision) -> bool:
    """Return whether an op multiplies in float8: a linear by its weight, except the vocab's, or rows by group."""
    if not precision.linears or node.op not in (LINEAR, str(GROUPED_ROWS)):
        return False
    weight = tensors[node.operands[1] or ""]
    if weight.dtype is not torch.bfloat16 or any(size % MULTIPLE for size in weight.shape[-2:]):
        return False
    # Matrices of experts may be views of a parameter. Logits keep their dtype: their gradients are small numbers beside
    # large ones.
    return node.op != LINEAR or (weight.kind == "param" and "vocab" not in weight.dims)
