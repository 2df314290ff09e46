"""Replace a lookup of equally long bags by a lookup of rows, and a reduction along each row.

`nn.EmbeddingBag` flattens `[batch, length]` ids and gives the offset of each bag. Nothing can be split then: a bag may
begin anywhere. Where the offsets are 0, length, 2 length ..., the ids are reshaped to rows. Bags of unequal length
become the op `autopar::bags`, without the results that nobody uses; it splits by bags and by the table.

Input::

    bags, _, _, _ = embedding_bag(table, ids, offsets=[0, 5, 10], mode=sum)
Output::

    found = embedding(table, reshape(ids, [3, 5]))
    bags = sum(found, dim=1)
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from autopar.tracing.passes.edit import arguments_of, insert, replace, value_of

aten = torch.ops.aten
BAGS = (aten.embedding_bag.default, aten.embedding_bag.padding_idx)
# Values of `mode` in ATen.
SUM, MEAN, MAX = 0, 1, 2
# Arguments of `autopar::bags`, in order.
_ARGUMENTS = ("weight", "indices", "offsets", "per_sample_weights", "mode", "include_last_offset")


def bags_to_rows(graph: Graph) -> None:
    """Rewrite every lookup of bags of which only the first result is used."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in BAGS:
            continue
        arguments = arguments_of(node)
        used = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]
        # A padding index does not count in a mean, which rows cannot express.
        if len(used) != len(node.users) or not used or arguments.get("padding_idx") is not None:
            continue
        length = _length(arguments)
        if length is not None:
            found = _rows(node, arguments, length)
        elif arguments["scale_grad_by_freq"]:
            continue
        else:
            found = insert(node, torch.ops.autopar.bags.default, *(arguments[name] for name in _ARGUMENTS))
        for user in used:
            replace(user, found)
        graph.erase_node(node)


def _length(arguments: dict[str, Any]) -> int | None:
    """Return the length of all bags; None for unequal lengths, or lengths that depend on data."""
    count = arguments["indices"].meta["val"].numel()
    offsets = value_of(arguments["offsets"])
    if offsets is None:
        return None
    bags = offsets.numel() - bool(arguments["include_last_offset"])
    length, rest = divmod(count, bags) if bags > 0 else (0, 1)
    if rest or not length or not torch.equal(offsets, length * torch.arange(offsets.numel(), dtype=offsets.dtype)):
        return None
    return length


def _rows(node: Node, arguments: dict[str, Any], length: int) -> Node:
    """Return the lookup `[bag, place in it, features]`, reduced along the places."""
    ids, weights, mode = arguments["indices"], arguments["per_sample_weights"], arguments["mode"]
    rows = [ids.meta["val"].numel() // length, length]
    scaled = bool(arguments["scale_grad_by_freq"])
    found = insert(node, aten.embedding.default, arguments["weight"], _as_shape(node, ids, rows), -1, scaled)
    if weights is not None:
        weights = insert(node, aten.unsqueeze.default, _as_shape(node, weights, rows), -1)
        found = insert(node, aten.mul.Tensor, found, weights)
    if mode == MAX:
        # The backward of amax shares a gradient among equal places; embedding_bag gives it to one.
        both = insert(node, aten.max.dim, found, 1)
        return insert(node, operator.getitem, both, 0)
    return insert(node, aten.mean.dim if mode == MEAN else aten.sum.dim_IntList, found, [1])


def _as_shape(node: Node, value: Node, shape: list[int]) -> Node:
    """Return a value as rows; the source of a reshape if it has this shape already."""
    source = value.args[0] if value.target is aten.reshape.default else None
    if isinstance(source, Node) and list(source.meta["val"].shape) == shape:
        return source
    return insert(node, aten.reshape.default, value, shape)
