"""Means of losses as sums over counts, so that each shard of a batch can add its part.

`cross_entropy` with `reduction="mean"` divides by the number of targets that count, which no shard knows of itself: a
mean of the shards' means is wrong as soon as they ignore different numbers of targets. The sum of the losses and the
count of the targets are both sums, whatever the shards hold.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node

__all__ = ["mean_losses_as_sums"]

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2
WIDE = (torch.float32, torch.float64)
"""In narrower types a sum over many targets could overflow: there the losses are widened before they are added."""


def mean_losses_as_sums(graph: Graph) -> None:
    """Rewrite every mean over class indices without class weights."""
    for node in graph.find_nodes(op="call_function", target=aten.cross_entropy_loss.default):
        arguments = _arguments(node)
        indices = not arguments["target"].meta["val"].dtype.is_floating_point
        if arguments["reduction"] == MEAN and arguments["weight"] is None and indices:
            _rewrite(graph, node, arguments)


def _arguments(node: Node) -> dict[str, Any]:
    schema = aten.cross_entropy_loss.default._schema.arguments
    named = {argument.name: argument.default_value for argument in schema}
    named.update(zip(named, node.args, strict=False))
    named.update(node.kwargs)
    return named


def _rewrite(graph: Graph, node: Node, arguments: dict[str, Any]) -> None:
    dtype = node.meta["val"].dtype
    wide = dtype in WIDE
    with graph.inserting_before(node):
        given = arguments["self"], arguments["target"], None, SUM if wide else NONE
        rest = arguments["ignore_index"], arguments["label_smoothing"]
        total = _insert(graph, node, aten.cross_entropy_loss.default, *given, *rest)
        if not wide:
            losses = _insert(graph, node, aten._to_copy.default, total, dtype=torch.float32)
            total = _insert(graph, node, aten.sum.default, losses)
        counted = _insert(graph, node, aten.ne.Scalar, arguments["target"], arguments["ignore_index"])
        count = _insert(graph, node, aten.sum.default, counted)
        as_float = _insert(graph, node, aten._to_copy.default, count, dtype=dtype if wide else torch.float32)
        mean = _insert(graph, node, aten.div.Tensor, total, as_float)
        if not wide:
            mean = _insert(graph, node, aten._to_copy.default, mean, dtype=dtype)
    node.replace_all_uses_with(mean)
    graph.erase_node(node)


def _insert(graph: Graph, origin: Node, op: Any, *args: Any, **kwargs: Any) -> Node:
    made = graph.call_function(op, args, kwargs)
    made.meta.update(origin.meta)
    value = origin.meta["val"]
    assert isinstance(value, FakeTensor), origin
    with value.fake_mode:
        made.meta["val"] = op(*torch.fx.node.map_arg(args, lambda n: n.meta["val"]), **kwargs)
    return made
