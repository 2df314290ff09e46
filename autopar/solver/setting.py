"""The planning problem: the graph, the mesh, the cluster, and the user's options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from autopar.cost.hardware.cluster import Cluster
from autopar.cost.profile import TaskBuilder
from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode
from autopar.mesh import SubMesh
from autopar.sharding.options import TrainingOptions
from autopar.solver.model.saved_values import SavedValues

__all__ = ["PlanningProblem"]


@dataclass(frozen=True, eq=False)
class PlanningProblem:
    """One graph on one mesh of one cluster."""

    graph: NamedGraph
    axes: SubMesh
    cluster: Cluster
    options: TrainingOptions
    prices: TaskBuilder
    trains: bool
    # Axes with more than one rank.
    used: SubMesh
    # Ops that take each tensor, in order, each once.
    users: Mapping[str, tuple[NamedNode, ...]]

    @staticmethod
    def of(graph: NamedGraph, axes: SubMesh, cluster: Cluster, options: TrainingOptions) -> PlanningProblem:
        prices = TaskBuilder(graph, cluster, axes, options.links, options.compiled, options.gradient_dtype)
        users: dict[str, list[NamedNode]] = {}
        for node in graph.nodes:
            for name in dict.fromkeys(node.operands):
                if name is not None:
                    users.setdefault(name, []).append(node)
        trains = graph.exported.grad_enabled
        everyone = {name: tuple(nodes) for name, nodes in users.items()}
        return PlanningProblem(graph, axes, cluster, options, prices, trains, axes.used, everyone)

    @cached_property
    def kept(self) -> SavedValues:
        return SavedValues.of(self.graph)

    @property
    def ranks(self) -> int:
        return self.axes.size
