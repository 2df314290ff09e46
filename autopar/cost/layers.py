"""Which ops are computed again in the backward: layers of which the plan says so, checkpoint regions of the model."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.cost.cluster import Device
from autopar.cost.compute import OpWork
from autopar.decided import Plan, Recompute
from autopar.tracing.graph import NamedGraph

__all__ = ["again", "is_cheap", "layers_of"]


def layers_of(graph: NamedGraph, plan: Plan) -> dict[str, tuple[str, Recompute]]:
    """For each op of a layer that computes something again, the layer and what."""
    by_node = {node.node: node for node in graph.nodes}
    found: dict[str, tuple[str, Recompute]] = {
        node.name: (f"checkpoint {node.origin.checkpoint}", "full")
        for node in graph.nodes
        if node.origin.checkpoint is not None
    }
    for repeat in graph.repeats:
        for path, layer in zip(repeat.module_paths, repeat.layers, strict=True):
            mode = plan.recompute.get(path, "none")
            for name in layer if mode != "none" else ():
                if name in by_node:
                    found[by_node[name].name] = (path, mode)
    return found


def again(layers: Mapping[str, tuple[str, Recompute]], works: Mapping[str, OpWork], device: Device) -> frozenset[str]:
    """The ops that are computed again: all of a layer, or those that are cheap."""
    return frozenset(name for name, (_, mode) in layers.items() if mode == "full" or is_cheap(works[name], device))


def is_cheap(work: OpWork, device: Device) -> bool:
    """An op that takes longer to read and write than to compute, by what the device can do of both.

    Of attention that is written out these are the scores and the softmax (Korthikanti et al., 2022); what a product of
    two long dims has made is kept.
    """
    return work.forward.multiplying_seconds <= work.forward.bytes / device.stream
