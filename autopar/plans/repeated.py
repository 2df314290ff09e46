"""Tensors at the same place of repeated layers."""

from __future__ import annotations

from autopar.ir.graph import NamedGraph
from autopar.plans.text.glob_cover import skeleton

__all__ = ["alike"]


def alike(graph: NamedGraph, name: str) -> tuple[str, ...]:
    """Return the names of a tensor in all layers of its stack, in order; the name alone if nothing repeats."""
    nodes = {node.node: node for node in graph.nodes}
    found = {name: None}
    for repeat in graph.repeats:
        for steps in zip(*repeat.layers, strict=True):
            twins = [(*nodes[step].operands, *nodes[step].outputs) for step in steps if step in nodes]
            for same in zip(*twins, strict=False):
                if name in same:
                    found.update(dict.fromkeys(one for one in same if one is not None))
    kind, shown = graph.tensors[name].kind if name in graph.tensors else None, skeleton(name)
    return tuple(
        tensor.name
        for tensor in graph.tensors.values()
        # The input of the first layer is another tensor than the output of each layer.
        if tensor.name in found and tensor.kind == kind and skeleton(tensor.name) == shown
    )
