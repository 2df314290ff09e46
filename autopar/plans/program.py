"""The integer program of a request, as `--write-model` writes it."""

from __future__ import annotations

from pathlib import Path

from autopar.ir.graph import NamedGraph
from autopar.mesh import Mesh
from autopar.plans.find import PlanRequest, is_memory_limit
from autopar.plans.unequal import with_speeds
from autopar.sharding.layout.language import Layout, choose_layout
from autopar.sharding.layout.syntax import MeshStatement
from autopar.solver.integer.formulation import FormulatedModel
from autopar.solver.solve import request_program

__all__ = ["program_of"]


def program_of(
    graph: NamedGraph, mesh: Mesh, layout: str | Path | Layout | None, request: PlanRequest
) -> FormulatedModel:
    """Return the integer program of a request on one mesh."""
    axes, cluster = mesh.whole, request.cluster_value()
    given = None if layout is None else with_speeds(graph, choose_layout(layout, axes), axes, cluster, mesh.links)
    limit = request.limit_bytes(cluster, given)
    kept = (one for one in given or () if not is_memory_limit(one) and not isinstance(one, MeshStatement))
    options, said = request.options_on(mesh), Layout(tuple(kept))
    return request_program(graph, axes, cluster, layout=said, memory_bytes=limit, options=options)
