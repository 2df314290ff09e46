"""Which ops are computed again in the backward, by layer, as the costs read it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autopar.decided import Plan
from autopar.layout.holds import Recompute
from autopar.recompute import Region, computed_again, regions_of
from autopar.tracing.graph import NamedGraph

__all__ = ["again", "layered", "layers_of", "reading"]


def layers_of(graph: NamedGraph, plan: Plan) -> dict[str, tuple[int, Recompute]]:
    """For each op of a layer that computes something again, the layer and what; layers may have one path in common."""
    return layered(regions_of(graph, plan.recompute))


def layered(regions: Iterable[Region]) -> dict[str, tuple[int, Recompute]]:
    return {op: (number, region.mode) for number, region in enumerate(regions, start=1) for op in region.ops}


def again(graph: NamedGraph, plan: Plan) -> frozenset[str]:
    """The ops that are computed again."""
    return computed_again(graph, regions_of(graph, plan.recompute))


def reading(graph: NamedGraph, layers: Mapping[str, tuple[int, Recompute]], again: frozenset[str]) -> frozenset[str]:
    """The ops that are computed again and need their operands for it: all of a layer that is computed again as a whole,
    of others those that lead to what some op keeps."""
    needed: set[tuple[int, str | None]] = set()  # by layer: what leaves one is not made again for the others
    found: set[str] = set()
    for node in reversed(graph.nodes if again else ()):
        footprint = graph.footprints[node.node]
        trains = any(name is not None and graph.tensors[name].requires_grad for name in node.outputs)
        layer, mode = layers.get(node.name, (0, "none"))
        kept = {(layer, node.operands[i]) for i in footprint.keeps} if trains else set()
        if node.name not in again:
            needed |= kept
        elif (
            mode == "full"
            or kept
            or footprint.keeps_outputs
            or not needed.isdisjoint((layer, name) for name in node.outputs)
        ):
            found.add(node.name)
            needed |= {(layer, name) for name in node.operands if name is not None}
    return frozenset(found)
