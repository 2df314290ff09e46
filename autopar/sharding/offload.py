"""Saved tensors of layers in the mode `offload`: those that may leave the device until the backward.

A layer moves what it makes, and values from outside that it alone saves, or with the layer that makes them. Parameters,
values without a gradient and values that other ops save stay: their memory would not be freed. So do small tensors,
whose copy takes longer to start than to run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.ir.analysis.saved_values import SavedValues
from autopar.ir.graph import NamedGraph
from autopar.sharding.recompute import RecomputeRegion

__all__ = ["LEAST_BYTES", "moved_inputs", "offloaded"]

# A copy over PCIe takes some 10 us to start, and 1 us for this size.
LEAST_BYTES = 2**16


def offloaded(regions: Sequence[RecomputeRegion]) -> dict[str, int]:
    """Return the number of the region of each op in a layer whose saved tensors go to the host."""
    return {op: number for number, region in enumerate(regions) if region.mode == "offload" for op in region.ops}


def moved_inputs(
    graph: NamedGraph, regions: Sequence[RecomputeRegion], saved: SavedValues | None = None
) -> Mapping[int, frozenset[str]]:
    """Return the values from outside that each region may move: by the value that owns their storage."""
    layers = graph.layer_of
    makers = {name: node.name for node in graph.nodes for name in node.outputs if name is not None}
    numbers = {number for number, region in enumerate(regions) if region.mode == "offload"}
    saved = saved or SavedValues.of(graph)
    found: dict[int, frozenset[str]] = {}
    for number in numbers:
        ops = frozenset(regions[number].ops)
        found[number] = frozenset(
            name
            for name, keepers in saved.keepers.items()
            if (maker := makers.get(name)) is not None and maker not in ops and graph.tensors[name].requires_grad
            # Where the layer of the maker moves the value, too, both share the copy.
            if all(op in ops or (op in layers and layers[op] == layers.get(maker)) for op in keepers)
            if not ops.isdisjoint(keepers)
        )
    return found
