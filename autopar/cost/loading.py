"""Price of weights that the first rank alone has: scattered into shards, and whole state dicts gathered on that rank.

A tensor leaves the first rank once, each piece for one rank. Along axes that do not split it, that rank broadcasts its
piece. Whole tensors are gathered from one rank for each piece. One tensor is sent after the other.

    scatter = sum of scatter(split axes, S) + broadcast(other axes, S / pieces)
    gather  = sum of gather(split axes, S)

The third primitive with one root, reduce, runs nowhere: a step needs every sum on all ranks that have a shard of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from autopar.cost.hardware.cluster import Cluster
from autopar.cost.network import Network
from autopar.cost.unequal_devices import with_slowest_links
from autopar.ir.graph import NamedGraph
from autopar.sharding.assignment import StepPlan

__all__ = ["LoadingCosts", "loading_costs"]


@dataclass(frozen=True)
class LoadingCosts:
    """Time to bring weights from the first rank to all others, and to bring them back."""

    scatter_seconds: float
    gather_seconds: float
    # Bytes of all parameters and buffers, which the first rank has.
    whole_bytes: float


def loading_costs(graph: NamedGraph, plan: StepPlan, cluster: Cluster) -> LoadingCosts:
    """Return what weights of the first rank cost under a plan; of replicas that drift, within one of them."""
    mesh, links = plan.mesh, plan.options.links
    network = Network(with_slowest_links(cluster, mesh, links), mesh, links)
    pipelining = plan.assignment.pipelining
    scatter = gather = whole = 0.0
    for tensor in graph.tensors.values():
        if tensor.kind not in ("param", "buffer"):
            continue
        is_parameter = tensor.kind == "param"
        dtype = tensor.stored_dtype(plan.options.precision)
        size = float(dtype.itemsize * prod(tensor.shape))
        stored = plan.assignment.stored[tensor.name] if is_parameter else None
        split = set() if stored is None else {axis for axes in stored.splits for axis in axes}
        # A parameter of a pipeline is on one stage, a buffer on all.
        staged = pipelining is not None and is_parameter and pipelining.held[tensor.name] is not None
        if staged and pipelining is not None:
            split.add(pipelining.axis)
        over = tuple(axis for axis, ranks in mesh.items() if axis in split and ranks > 1)
        copies = tuple(axis for axis, ranks in mesh.items() if axis not in split and ranks > 1)
        pieces = prod(mesh[axis] for axis in over if not (staged and pipelining and axis == pipelining.axis))
        whole += size
        if over:
            scatter += network.seconds("scatter", over, size)
            gather += network.seconds("gather", over, size)
        if copies:
            scatter += network.seconds("broadcast", copies, size / pieces)
    return LoadingCosts(scatter, gather, whole)
