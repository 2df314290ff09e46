"""Bags of equal length are rows of ids: a lookup and a sum, mean or maximum along each row.

`nn.EmbeddingBag` given `[batch, length]` ids flattens them and says where each bag begins. Nothing of that can be
split: any bag may begin anywhere. Where the beginnings only count, 0, length, 2 length ..., the ids are put back into
rows. Bags of any length are one op without the results that nobody uses, which can be split by bags and by the table.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from autopar.tracing.passes.edit import arguments_of, insert, replaced
from autopar.tracing.passes.paired_index import value_of

__all__ = ["bags_as_rows"]

aten = torch.ops.aten
BAGS = (aten.embedding_bag.default, aten.embedding_bag.padding_idx)
SUM, MEAN, MAX = 0, 1, 2


def bags_as_rows(graph: Graph) -> None:
    """Rewrite every lookup of bags, where only what is found in them is used."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in BAGS:
            continue
        arguments = arguments_of(node)
        used = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]
        if len(used) != len(node.users) or not used or arguments.get("padding_idx") is not None:
            continue
        length = _length(arguments)
        if length is None and arguments["scale_grad_by_freq"]:
            continue
        found = _of_any_length(node, arguments) if length is None else _rows(node, arguments, length)
        for user in used:
            replaced(user, found)
        graph.erase_node(node)


def _of_any_length(node: Node, arguments: dict[str, Any]) -> Node:
    names = ("weight", "indices", "offsets", "per_sample_weights", "mode", "include_last_offset")
    return insert(node, torch.ops.autopar.bags.default, *(arguments[name] for name in names))


def _length(arguments: dict[str, Any]) -> int | None:
    """How long all bags are; None where they differ, or where that depends on data."""
    count = arguments["indices"].meta["val"].numel()
    begins = value_of(arguments["offsets"])
    if begins is None:
        return None
    bags = begins.numel() - bool(arguments["include_last_offset"])
    length, rest = divmod(count, bags) if bags > 0 else (0, 1)
    if rest or not length or not torch.equal(begins, length * torch.arange(begins.numel(), dtype=begins.dtype)):
        return None
    return length


def _rows(node: Node, arguments: dict[str, Any], length: int) -> Node:
    """The lookup with its dims `[bag, place in it, features]`, and what becomes of the places."""
    ids, weights, mode = arguments["indices"], arguments["per_sample_weights"], arguments["mode"]
    rows = [ids.meta["val"].numel() // length, length]
    scaled = bool(arguments["scale_grad_by_freq"])
    found = insert(node, aten.embedding.default, arguments["weight"], _shaped(node, ids, rows), -1, scaled)
    if weights is not None:
        weights = insert(node, aten.unsqueeze.default, _shaped(node, weights, rows), -1)
        found = insert(node, aten.mul.Tensor, found, weights)
    if mode == MAX:  # amax would share a gradient among places that are equal
        both = insert(node, aten.max.dim, found, 1)
        return insert(node, operator.getitem, both, 0)
    return insert(node, aten.mean.dim if mode == MEAN else aten.sum.dim_IntList, found, [1])


def _shaped(node: Node, value: Node, shape: list[int]) -> Node:
    """A value as rows; as it was before it was flattened, if it was."""
    source = value.args[0] if value.target is aten.reshape.default else None
    if isinstance(source, Node) and list(source.meta["val"].shape) == shape:
        return source
    return insert(node, aten.reshape.default, value, shape)
