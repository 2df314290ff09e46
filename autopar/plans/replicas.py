"""Plans of replicas that drift: the graph of one replica, and its plan with the meetings of all."""

from __future__ import annotations

from dataclasses import replace
from weakref import WeakKeyDictionary

import torch

from autopar.cost.hardware.cluster import Cluster
from autopar.ir.call_arguments import plain_call, signature_of
from autopar.ir.exported import entered
from autopar.ir.graph import NamedGraph
from autopar.ir.pytree import unflatten
from autopar.mesh import Mesh
from autopar.plans.plan import Plan
from autopar.plans.unequal import with_replica_speeds
from autopar.sharding.layout.language import Layout, choose_layout
from autopar.sharding.replicas import Drift, batch_dim_of, batch_places, check_batch, split_replicas
from autopar.tracing.trace import trace

__all__ = ["replica_graph", "replicas_of", "with_meetings"]

# By rows of a replica and their dim.
_GRAPHS: WeakKeyDictionary[NamedGraph, dict[tuple[int, str], NamedGraph]] = WeakKeyDictionary()


def replicas_of(
    graph: NamedGraph, layout: Layout, mesh: Mesh, cluster: Cluster
) -> tuple[NamedGraph, Layout, Mesh, Drift | None]:
    """Return graph, layout and mesh of the replica with most rows, and the replicas; all unchanged without them."""
    inner, drift = split_replicas(choose_layout(layout, mesh.whole), mesh)
    if drift is None:
        return graph, inner, mesh, None
    dim = batch_dim_of(inner)
    drift = with_replica_speeds(cluster, graph, drift, dim)
    return replica_graph(graph, drift, dim), inner, drift.replica_mesh, drift


def replica_graph(graph: NamedGraph, drift: Drift, dim: str) -> NamedGraph:
    """Trace the model of a graph again, with the rows of the replica that has most."""
    places = batch_places(graph, drift, dim)
    check_batch(drift, graph.dims[dim].size, dim)
    known = _GRAPHS.setdefault(graph, {})
    rows = max(drift.rows(graph.dims[dim].size))
    if (rows, dim) not in known:
        known[rows, dim] = _traced(graph, places, rows)
    return known[rows, dim]


def _traced(graph: NamedGraph, places: dict[str, tuple[int, int]], rows: int) -> NamedGraph:
    exported, tensors = graph.exported, []
    for node, placeholder in zip(
        exported.graph_module.graph.find_nodes(op="placeholder"), exported.placeholders, strict=True
    ):
        if placeholder.kind != "input":
            continue
        value, shape = node.meta["val"], list(node.meta["val"].shape)
        if placeholder.name in places:
            dim, each = places[placeholder.name]
            shape[dim] = rows * each
        made = torch.zeros(shape, dtype=value.dtype, device=value.device)
        tensors.append(made.requires_grad_(placeholder.requires_grad))
    arguments, _ = unflatten(exported.input_tree, tensors)
    args, kwargs = plain_call(signature_of(graph.model), arguments)
    with torch.set_grad_enabled(exported.grad_enabled), entered(exported.autocast):
        return trace(graph.model, tuple(args) if args else kwargs, dims=graph.given)


def with_meetings(plan: Plan, drift: Drift | None) -> Plan:
    """Return the plan of a replica with the costs of meetings; its bound stays one."""
    return plan if drift is None else replace(plan, decided=replace(plan.decided, drift=drift))
