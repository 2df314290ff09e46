"""Queries on the nodes of an fx graph, and the removal of dead ones."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

__all__ = ["aten", "is_factory", "is_random", "remove_dead"]


aten = torch.ops.aten


def remove_dead(graph: Graph) -> None:
    """Erase what nobody uses, except random ops: the next one would draw other numbers."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not is_random(node):
            graph.erase_node(node)


def is_random(node: Node) -> bool:
    """Whether a node draws random numbers."""
    if node.target is aten.scaled_dot_product_attention.default:
        rate = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return bool(rate != 0.0)
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def is_factory(node: Node) -> bool:
    """Whether a node makes a tensor out of nothing, on a device it may not name."""
    schema = getattr(node.target, "_schema", None)
    return (
        node.op == "call_function"
        and schema is not None
        and not node.all_input_nodes
        and any(argument.name == "device" for argument in schema.arguments)
    )
