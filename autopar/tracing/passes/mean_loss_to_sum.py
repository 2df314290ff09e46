"""Means of losses as sums over counts, so that each shard of a batch can add its part.

`cross_entropy` with `reduction="mean"` divides by the number of targets that count, which no shard knows of itself: a
mean of the shards' means is wrong as soon as they ignore different numbers of targets. The sum of the losses and the
count of the targets are both sums, whatever the shards hold.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from autopar.tracing.passes.edit import arguments_of, insert, replaced

__all__ = ["mean_losses_as_sums"]

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2
# In narrower types a sum over many targets could overflow: there the losses are widened before they are added.
WIDE = (torch.float32, torch.float64)


def mean_losses_as_sums(graph: Graph) -> None:
    """Rewrite every mean over class indices without class weights."""
    for node in graph.find_nodes(op="call_function", target=aten.cross_entropy_loss.default):
        arguments = arguments_of(node)
        indices = not arguments["target"].meta["val"].dtype.is_floating_point
        if arguments["reduction"] == MEAN and arguments["weight"] is None and indices:
            _rewrite(node, arguments)


def _rewrite(node: Node, arguments: dict[str, Any]) -> None:
    dtype = node.meta["val"].dtype
    wide = dtype in WIDE
    given = arguments["self"], arguments["target"], None, SUM if wide else NONE
    rest = arguments["ignore_index"], arguments["label_smoothing"]
    total = insert(node, aten.cross_entropy_loss.default, *given, *rest)
    if not wide:
        losses = insert(node, aten._to_copy.default, total, dtype=torch.float32)
        total = insert(node, aten.sum.default, losses)
    counted = insert(node, aten.ne.Scalar, arguments["target"], arguments["ignore_index"])
    count = insert(node, aten.sum.default, counted)
    as_float = insert(node, aten._to_copy.default, count, dtype=dtype if wide else torch.float32)
    mean = insert(node, aten.div.Tensor, total, as_float)
    if not wide:
        mean = insert(node, aten._to_copy.default, mean, dtype=dtype)
    replaced(node, mean)
