"""Fx graphs: queries on nodes, removal of dead nodes, activation-checkpoint regions as calls."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import checkpoint

aten = torch.ops.aten


def remove_dead(graph: Graph) -> None:
    """Erase nodes without users, except random ops."""
    for node in reversed(list(graph.nodes)):
        # Without a random op the next one would draw other numbers than in the model.
        if node.op == "call_function" and not node.users and not is_random(node):
            graph.erase_node(node)


def is_random(node: Node) -> bool:
    """Return True if a node draws random numbers."""
    # Attention has no tag: it is random only with dropout.
    if node.target is aten.scaled_dot_product_attention.default:
        rate = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return bool(rate != 0.0)
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def is_factory(node: Node) -> bool:
    """Return True if a node creates a tensor without operands, on a device that it may not name."""
    schema = getattr(node.target, "_schema", None)
    return (
        node.op == "call_function"
        and schema is not None
        and not node.all_input_nodes
        and any(argument.name == "device" for argument in schema.arguments)
    )


def frozen_argument(value: Any) -> Hashable:
    """Return an argument of a node as a value that tells `1` from `1.0` and `True`."""
    if isinstance(value, (list, tuple)):
        return tuple(map(frozen_argument, value))
    if isinstance(value, dict):
        return tuple((key, frozen_argument(item)) for key, item in value.items())
    return type(value), value


# -- checkpoint regions ------------------------------------------------------------------------------------------------


def with_checkpoints(graph: Graph) -> GraphModule:
    """Return a module of `graph` that calls its regions through `torch.utils.checkpoint`.

    Export leaves only marks of the regions on the nodes. `graph` is changed.
    """
    root = nn.Module()
    for number, nodes in list(checkpoint_regions(graph)):
        name = f"checkpoint_{number}"
        inputs, results = boundary(nodes)
        root.add_module(name, body_of(nodes, inputs, results, {}))
        with graph.inserting_before(nodes[-1].next):
            call = call_checkpoint(graph, name, inputs)
        put_call(graph, nodes, results, call)
    return GraphModule(root, graph)


def checkpoint_regions(graph: Graph) -> Iterator[tuple[int, list[Node]]]:
    """Yield each region's number and nodes, from its first to its last node in the graph."""
    spans: dict[int, tuple[int, int]] = {}
    nodes = list(graph.nodes)
    for index, node in enumerate(nodes):
        origin = node.meta.get("origin")
        if origin is not None and origin.checkpoint is not None:
            first, _ = spans.get(origin.checkpoint, (index, index))
            spans[origin.checkpoint] = first, index
    # Passes may insert unmarked nodes within a region; they belong to it.
    for number, (first, last) in spans.items():
        yield number, nodes[first : last + 1]


def boundary(nodes: Sequence[Node]) -> tuple[list[Node], list[Node]]:
    """Return the values that enter a region and those that leave it, in the order of their first use."""
    inside = set(nodes)
    inputs = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside)
    return list(inputs), [node for node in nodes if any(user not in inside for user in node.users)]


def body_of(
    nodes: Sequence[Node], inputs: Sequence[Node], results: Sequence[Node], modules: Mapping[str, nn.Module]
) -> GraphModule:
    """Return the nodes of a region as a module; `modules` are those that the graph calls."""
    body = Graph()
    values = {source: body.placeholder(source.name) for source in inputs}
    for node in nodes:
        values[node] = body.node_copy(node, values.__getitem__)
    body.output(tuple(values[node] for node in results))
    called = {str(node.target): modules[str(node.target)] for node in nodes if node.op == "call_module"}
    return GraphModule(called, body)


def call_checkpoint(graph: Graph, name: str, inputs: Sequence[Node]) -> Node:
    """Insert a call of the submodule `name` through `torch.utils.checkpoint` at the current place."""
    region = graph.get_attr(name)
    return graph.call_function(checkpoint, (region, *inputs), {"use_reentrant": False, "preserve_rng_state": True})


def put_call(graph: Graph, nodes: Sequence[Node], results: Sequence[Node], call: Node) -> None:
    """Replace a region's results by those of a call, and erase its nodes."""
    with graph.inserting_before(call.next):
        items = [graph.call_function(operator.getitem, (call, index)) for index in range(len(results))]
    for result, item in zip(results, items, strict=True):
        result.replace_all_uses_with(item, delete_user_cb=set(result.users).difference(nodes).__contains__)
    for node in reversed(nodes):
        graph.erase_node(node)
