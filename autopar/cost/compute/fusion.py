"""What `torch.compile` saves: ops that only read and write are joined, and what goes from one to the next stays inside.

A value is written if an op that is not joined with its maker reads it, if it is kept for the backward or handed out;
it is read if it was written. An op that then reads and writes nothing of its own takes no time.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from autopar.cost.compute.op_time import DirectionWork, OpWork
from autopar.cost.hardware.cluster import Device
from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode

__all__ = ["fused", "scaled", "shares_of"]


def fused(graph: NamedGraph, works: Mapping[str, OpWork], device: Device) -> dict[str, OpWork]:
    """The work of every op of a compiled module."""
    found = dict(works)
    for name, share in shares_of(graph, works).items():
        found[name] = OpWork(scaled(works[name].forward, share, device), scaled(works[name].backward, share, device))
    return found


def shares_of(graph: NamedGraph, works: Mapping[str, OpWork]) -> dict[str, float]:
    """Of the ops that are joined with others, what is left of their reading and writing."""
    joined = {node.name for node in graph.nodes if _joins(node, works[node.name])}
    makers = {name: node.name for node in graph.nodes for name in node.outputs if name is not None}
    outside = {name for node in graph.nodes if node.name not in joined for name in node.operands}
    written = outside | set(graph.outputs) | {tensor.name for tensor in graph.saved}
    found: dict[str, float] = {}
    for node in graph.nodes:
        if node.name not in joined:
            continue
        made = [name for name in node.outputs if name is not None]
        read = [name for name in node.operands if name is not None]
        inside = [name for name in made if name not in written]
        inside += [name for name in read if makers.get(name) in joined and name not in written]
        found[node.name] = 1 - _size(graph, inside) / max(_size(graph, [*made, *read]), 1)
    return found


def _joins(node: NamedNode, work: OpWork) -> bool:
    """Lookups by position read what they need, wherever it is, and are no part of a chain."""
    return work.forward.limited_by_bytes and work.backward.limited_by_bytes and not node.rule.indices


def _size(graph: NamedGraph, names: list[str]) -> float:
    return float(sum(prod(graph.tensors[name].shape) * graph.tensors[name].dtype.itemsize for name in names))


def scaled(work: DirectionWork, share: float, device: Device) -> DirectionWork:
    count = work.bytes * share
    seconds = max(device.launch_seconds, share * work.seconds) if count else 0.0
    return DirectionWork(work.flops, count, seconds, launches=work.launches if count else 0)
