"""Sum a mean loss over the batch, divided by a count, so that shards can add up.

`cross_entropy` with `reduction="mean"` divides by the number of targets that are not ignored. No shard knows this
number. A mean of the shards' means is wrong when shards ignore different numbers of targets. The sum of the losses and
the count of the targets are both plain sums over the batch.

Input::

    loss = cross_entropy(logits, target)
Output::

    total = cross_entropy(logits, target, reduction="sum")
    count = _to_copy(sum(target != ignore_index), dtype=f32)
    loss = total / count
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from autopar.tracing.passes.edit import arguments_of, insert, replace

aten = torch.ops.aten
# Values of `reduction` in ATen.
NONE, MEAN, SUM = 0, 1, 2
# In narrower types a sum over many targets could overflow: the losses are widened before they are added.
WIDE = (torch.float32, torch.float64)


def mean_loss_to_sum(graph: Graph) -> None:
    """Rewrite every mean over class indices without class weights."""
    # Weighted means and means over class probabilities divide by other numbers, and stay.
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
    # The sum has the shape and dtype of the mean.
    total = insert(node, aten.cross_entropy_loss.default, *given, *rest, value=node.meta["val"] if wide else None)
    if not wide:
        losses = insert(node, aten._to_copy.default, total, dtype=torch.float32)
        total = insert(node, aten.sum.default, losses)
    counted = insert(node, aten.ne.Scalar, arguments["target"], arguments["ignore_index"])
    count = insert(node, aten.sum.default, counted)
    as_float = insert(node, aten._to_copy.default, count, dtype=dtype if wide else torch.float32)
    mean = insert(node, aten.div.Tensor, total, as_float)
    if not wide:
        mean = insert(node, aten._to_copy.default, mean, dtype=dtype)
    replace(node, mean)
