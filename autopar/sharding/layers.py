"""Which ops are computed again in the backward, by layer, as the costs read it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autopar.ir.graph import NamedGraph
from autopar.sharding.layout.gather_policy import Recompute
from autopar.sharding.recompute import Region

__all__ = ["layered", "reading"]


def layered(regions: Iterable[Region]) -> dict[str, tuple[int, Recompute]]:
    """For each op of a region, its number and what is computed again of it."""
    return {op: (number, region.mode) for number, region in enumerate(regions, start=1) for op in region.ops}


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
