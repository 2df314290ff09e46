"""Apply the activation-checkpoint regions of the model again: export leaves only marks on the nodes."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping

from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import checkpoint

__all__ = ["checkpoint_regions", "with_checkpoints"]


def with_checkpoints(graph: Graph, modules: Mapping[str, nn.Module] | None = None) -> GraphModule:
    """A module of `graph` (which is changed) whose regions are called through `torch.utils.checkpoint`.

    `modules` are those that the graph calls.
    """
    modules = modules or {}
    root = nn.Module()
    for name, module in modules.items():
        root.add_module(name, module)
    for number, nodes in list(checkpoint_regions(graph)):
        name = f"checkpoint_{number}"
        inputs, results = _boundary(nodes)
        root.add_module(name, _body(nodes, inputs, results, modules))
        with graph.inserting_before(nodes[-1].next):
            region = graph.get_attr(name)
            call = graph.call_function(
                checkpoint, (region, *inputs), {"use_reentrant": False, "preserve_rng_state": True}
            )
            items = [graph.call_function(operator.getitem, (call, index)) for index in range(len(results))]
        for result, item in zip(results, items, strict=True):
            result.replace_all_uses_with(item, delete_user_cb=set(result.users).difference(nodes).__contains__)
        for node in reversed(nodes):
            graph.erase_node(node)
    return GraphModule(root, graph)


def checkpoint_regions(graph: Graph) -> Iterator[tuple[int, list[Node]]]:
    """Each region with its nodes: what stands between its first and its last node belongs to it."""
    spans: dict[int, tuple[int, int]] = {}
    nodes = list(graph.nodes)
    for index, node in enumerate(nodes):
        origin = node.meta.get("origin")
        if origin is not None and origin.checkpoint is not None:
            first, _ = spans.get(origin.checkpoint, (index, index))
            spans[origin.checkpoint] = first, index
    for number, (first, last) in spans.items():
        yield number, nodes[first : last + 1]


def _boundary(nodes: list[Node]) -> tuple[list[Node], list[Node]]:
    """The values that enter a region and those that leave it, in the order of their first use."""
    inside = set(nodes)
    inputs = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside)
    return list(inputs), [node for node in nodes if any(user not in inside for user in node.users)]


def _body(nodes: list[Node], inputs: list[Node], results: list[Node], modules: Mapping[str, nn.Module]) -> GraphModule:
    body = Graph()
    values = {source: body.placeholder(source.name) for source in inputs}
    for node in nodes:
        values[node] = body.node_copy(node, values.__getitem__)
    body.output(tuple(values[node] for node in results))
    called = {str(node.target): modules[str(node.target)] for node in nodes if node.op == "call_module"}
    return GraphModule(called, body)
