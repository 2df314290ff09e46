"""The activation-checkpoint regions of the model, in the generated graph: run by `torch.utils.checkpoint` again.

What a region recomputes, it recomputes with its collectives. Parameters are converted outside: a bucket that starts or
ends inside is moved before the region. One that is gathered again is moved into it, if nothing else reads it: then the
recomputation gathers it, and in between nothing holds it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from autopar.rewrite.bucket import BucketEnd, BucketStart, Release, Running, Watch
from autopar.tracing.checkpoint import checkpoint_regions, with_checkpoints

__all__ = ["with_regions"]


def with_regions(graph: Graph, modules: dict[str, nn.Module]) -> GraphModule:
    """The module of a graph with all its buckets; the graph is changed."""
    for number, nodes in list(checkpoint_regions(graph)):
        inside: list[Node] = []
        for running, readers in _gathered_again(nodes, modules).items():
            if readers <= set(nodes):
                inside += _machinery(graph, modules, running)
            for node in [node for node in graph.nodes if isinstance(_module(node, modules), Watch | Release)]:
                if _module(node, modules).running is running:  # type: ignore[union-attr]
                    graph.erase_node(node)
        _move(inside, nodes[0])
        for node in inside:
            node.meta["origin"] = nodes[0].meta["origin"]
        region = next(nodes for found, nodes in checkpoint_regions(graph) if found == number)
        _move([node for node in region if _is_parameters(node, modules) and node not in inside], region[0])
    return with_checkpoints(graph, modules)


def _module(node: Node, modules: Mapping[str, nn.Module]) -> nn.Module | None:
    return modules.get(str(node.target)) if node.op == "call_module" else None


def _machinery(graph: Graph, modules: Mapping[str, nn.Module], running: Running) -> list[Node]:
    """The start and the end of a bucket, and what is taken out of it."""
    ends = [
        node
        for node in graph.nodes
        if isinstance(module := _module(node, modules), BucketStart | BucketEnd) and module.running is running
    ]
    taken = [node for node in graph.nodes if node.target is operator.getitem and node.args[0] in ends]
    return [*ends, *taken]


def _gathered_again(nodes: list[Node], modules: Mapping[str, nn.Module]) -> dict[Running, set[Node]]:
    """The buckets that are gathered again and read in a region, and all their readers."""
    found: dict[Running, set[Node]] = {}
    for node in nodes:
        module = _module(node, modules)
        if isinstance(module, Watch):
            found.setdefault(module.running, set())
    for running, readers in found.items():
        graph = nodes[0].graph
        readers.update(
            source
            for node in graph.nodes
            if isinstance(module := _module(node, modules), Watch) and module.running is running
            for source in node.all_input_nodes
        )
    return found


def _is_parameters(node: Node, modules: Mapping[str, nn.Module]) -> bool:
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        return isinstance(_module(node.args[0], modules), BucketEnd)
    if node.target is torch.ops.aten.to.dtype and isinstance(node.args[0], Node):
        return node.args[0].op == "placeholder"
    return isinstance(_module(node, modules), BucketStart | BucketEnd)


def _move(nodes: list[Node], before: Node) -> None:
    for node in nodes:
        if node is not before:
            before.prepend(node)
