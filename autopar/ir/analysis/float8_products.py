"""Products that multiply in float8 where the precision of a step says so: linears, and products of experts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from autopar.ir.analysis.op_memory import Footprint
from autopar.ir.precision import Precision
from autopar.ir.values import NamedNode, NamedTensor
from autopar.rules.ops.routed import GROUPED_ROWS

__all__ = ["LINEAR", "MULTIPLE", "in_float8", "weights_in_float8"]

LINEAR = "aten.linear.default"
# Kernels of float8 products take sizes that are multiples of it.
MULTIPLE = 16


def in_float8(node: NamedNode, tensors: Mapping[str, NamedTensor], precision: Precision) -> bool:
    """Return whether an op multiplies in float8: a linear by its weight, except the vocab's, or rows by group."""
    return bool(precision.linears) and _suits(node, tensors)


def weights_in_float8(
    nodes: Iterable[NamedNode], tensors: Mapping[str, NamedTensor], memory: Mapping[str, Footprint]
) -> frozenset[str]:
    """Return the weights that nothing reads but products that may be in float8: parameters, and their views."""
    # The parameter of a weight, through its views.
    sources = {name: name for name, tensor in tensors.items() if tensor.kind == "param"}
    found, others = set[str](), set[str]()
    for node in nodes:
        aliases = memory[node.node].aliases
        is_view = bool(aliases) and all(alias == 0 for alias in aliases)
        for place, name in enumerate(node.operands):
            source = sources.get(name or "")
            if source is None:
                continue
            if place == 1 and _suits(node, tensors):
                found.add(source)
            elif place == 0 and is_view:
                sources.update((made, source) for made in node.outputs if made is not None)
            else:
                others.add(source)
    weights = found - others
    return frozenset(name for name, source in sources.items() if source in weights)


def _suits(node: NamedNode, tensors: Mapping[str, NamedTensor]) -> bool:
    if node.op not in (LINEAR, str(GROUPED_ROWS)):
        return False
    weight = tensors[node.operands[1] or ""]
    if weight.dtype is not torch.bfloat16 or any(size % MULTIPLE for size in weight.shape[-2:]):
        return False
    # Matrices of experts may be views of a parameter. Logits keep their dtype: their gradients are small numbers beside
    # large ones.
    return node.op != LINEAR or (weight.kind == "param" and "vocab" not in weight.dims)
