"""Bytes that a loss in pieces reads and writes beside its products, as `rules/shard_call/loss_pieces.py` runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode
from autopar.rules.shard_call.loss_pieces import LogitsForm

__all__ = ["LogitBytes", "logit_bytes"]

# Kernels of a piece without a factor, a cap and smoothing.
FORWARD_KERNELS, BACKWARD_KERNELS = 18, 13


@dataclass(frozen=True)
class LogitBytes:
    """Bytes of each logit in the forward and the backward, and of each number of the weight in each piece."""

    pieces: int
    forward: int
    backward: int
    of_weight: int
    # Kernels of a piece beside its products, most of them on a few numbers of each row.
    forward_kernels: int
    backward_kernels: int


def logit_bytes(graph: NamedGraph, node: NamedNode) -> LogitBytes:
    """Return what one op of `autopar::linear_cross_entropy` reads and writes."""
    source = next(found for found in graph.exported.graph_module.graph.nodes if found.name == node.node)
    given: Mapping[str, Any] = source.kwargs
    product = graph.tensors[node.operands[0] or ""].dtype
    form = LogitsForm(given.get("scale", 1.0), given.get("softcap", 0.0), given.get("dtype"))
    narrow, wide = product.itemsize, form.wide(product).itemsize
    smooth = bool(given.get("label_smoothing", 0.0))
    # A factor; a division, a tanh, a factor.
    made = 2 * narrow * (form.scale != 1.0) + 6 * narrow * bool(form.softcap)
    # The maximum, the logarithm of the softmax, its maximum; the sum. Kernels of GPUs cast inside of the softmax.
    forward = made + narrow + (narrow + wide) + wide + narrow * smooth
    # The softmax, its gradient; the share of all classes; the cast.
    backward = made + (narrow + wide) + 2 * wide
    backward += 2 * wide * smooth + (narrow + wide) * (narrow != wide)
    # With a bias, where no class counts, and the sum of its gradient.
    backward += (2 * wide + narrow) * (node.operands[2] is not None)
    # Derivatives of the cap, a division, a square, a difference, a factor, and of the factor.
    backward += 9 * narrow * bool(form.softcap) + 2 * narrow * (form.scale != 1.0)
    # The total is read and written beside what the product writes; a wider one is added to by an op of its own.
    of_weight = narrow if wide == narrow else narrow + 2 * wide
    return LogitBytes(given.get("pieces", 1), forward, backward, of_weight, FORWARD_KERNELS, BACKWARD_KERNELS)
