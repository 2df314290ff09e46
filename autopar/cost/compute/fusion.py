"""Work of ops in a compiled module: `torch.compile` fuses ops that only read and write.

Values between fused ops stay in registers. A value is written if an op outside the fusion reads it, if it is saved for
the backward or returned; it is read if it was written. An op that then reads and writes nothing takes no time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from autopar.cost.compute.op_time import DirectionWork, OpWork
from autopar.cost.hardware.cluster import Device
from autopar.ir.graph import NamedGraph

__all__ = ["fused", "scaled", "unfused_shares"]


def fused(graph: NamedGraph, works: Mapping[str, OpWork], device: Device) -> dict[str, OpWork]:
    """Return the work of every op in a compiled module."""
    found = dict(works)
    for name, share in unfused_shares(graph, works).items():
        found[name] = OpWork(scaled(works[name].forward, share, device), scaled(works[name].backward, share, device))
    return found


def unfused_shares(graph: NamedGraph, works: Mapping[str, OpWork]) -> dict[str, float]:
    """Return the share of its bytes that each fused op still reads and writes."""

    def size(names: Sequence[str]) -> float:
        return float(sum(prod(graph.tensors[name].shape) * graph.tensors[name].element_bytes for name in names))

    # A lookup by index reads rows from anywhere and is not part of a fusion.
    joined = {
        node.name
        for node in graph.nodes
        if works[node.name].forward.limited_by_bytes and works[node.name].backward.limited_by_bytes
        if not node.rule.indices
    }
    makers = {name: node.name for node in graph.nodes for name in node.outputs if name is not None}
    outside = {name for node in graph.nodes if node.name not in joined for name in node.operands}
    written = outside | set(graph.outputs) | {tensor.name for tensor in graph.saved}
    found: dict[str, float] = {}
    for node in graph.nodes:
        if node.name in joined:
            made = [name for name in node.outputs if name is not None]
            read = [name for name in node.operands if name is not None]
            inside = [name for name in made if name not in written]
            inside += [name for name in read if makers.get(name) in joined and name not in written]
            found[node.name] = 1 - size(inside) / max(size([*made, *read]), 1)
    return found


def scaled(work: DirectionWork, share: float, device: Device) -> DirectionWork:
    """Return the work of an op that reads and writes a share of its bytes."""
    count = work.bytes * share
    seconds = max(device.launch_seconds, share * work.seconds) if count else 0.0
    return DirectionWork(work.flops, count, seconds, launches=work.launches if count else 0)
