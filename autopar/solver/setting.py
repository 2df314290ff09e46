"""The planning problem: the graph with its saved values, the mesh, the cluster, and the user's options."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from autopar.cost.evaluate import Costs, evaluate
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.profile import TaskBuilder
from autopar.cost.unequal_devices import priced_kind
from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode
from autopar.mesh import SubMesh
from autopar.sharding.assignment import OpAssignment, Pipelining, StepPlan
from autopar.sharding.choices import Choice, shardings_of
from autopar.sharding.layout.syntax import MicroBatches
from autopar.sharding.options import TrainingOptions
from autopar.sharding.time_slice import gathered_where_used


@dataclass(frozen=True)
class SavedValues:
    """Saved values, as far as no decision changes them: the ops that save each value. A view saves its root.

    Each value counts where it is produced, or where it is resharded for an op that saves it. The simulation of memory
    follows every storage; the search corrects the difference by its peak.
    """

    # Root of each value: the value whose storage it shares.
    roots: dict[str, str]
    # Ops that save each root, itself or as a view.
    keepers: dict[str, tuple[str, ...]]
    # Op and operand: the resharded operand is saved.
    operands: frozenset[tuple[str, str]]
    # Values that their producers save.
    own: frozenset[str]

    @staticmethod
    def of(graph: NamedGraph) -> SavedValues:
        roots = {name: name for name in graph.tensors}
        for node in graph.nodes:
            footprint = graph.footprints[node.node]
            for name, alias in zip(node.outputs, footprint.aliases, strict=False):
                source = None if alias is None else node.operands[alias]
                if name is not None and source is not None:
                    roots[name] = roots[source]
        keepers: dict[str, tuple[str, ...]] = {}
        kept: set[str] = set()
        operands: set[tuple[str, str]] = set()
        own: set[str] = set()
        for node in reversed(graph.nodes if graph.exported.grad_enabled else ()):
            footprint = graph.footprints[node.node]
            for name, alias in zip(node.outputs, footprint.aliases, strict=False):
                source = None if alias is None else node.operands[alias]
                if name in kept and source is not None:
                    kept.add(source)
                    operands.add((node.name, source))
            if not any(name is not None and graph.tensors[name].requires_grad for name in node.outputs):
                continue
            for i in footprint.keeps:
                name = node.operands[i]
                if name is not None:
                    kept.add(name)
                    operands.add((node.name, name))
            for name in dict.fromkeys(node.operands[i] for i in footprint.keeps):
                if name is not None:
                    keepers[roots[name]] = (*keepers.get(roots[name], ()), node.name)
            for i in footprint.keeps_outputs:
                name = node.outputs[i]
                if name is not None:
                    own.add(name)
                    keepers[roots[name]] = (*keepers.get(roots[name], ()), node.name)
        return SavedValues(roots, keepers, frozenset(operands), frozenset(own))

    def is_kept(self, name: str) -> bool:
        """Return whether the storage of a result is saved."""
        return self.roots[name] == name and name in self.keepers

    def least_bytes(self, graph: NamedGraph, again: Collection[str]) -> float:
        """Return the bytes alive where the backward begins whatever is split: trained state and saved values.

        `again` are the recomputed ops.
        """
        made = [name for node in graph.nodes if node.name not in again for name in node.outputs if name is not None]
        held = [name for name in made if self.is_kept(name)] + [tensor.name for tensor in graph.parameters]
        return float(sum(prod(graph.tensors[name].shape) * graph.tensors[name].element_bytes for name in held))

    def only_for(self, op: str, name: str) -> bool:
        """Return whether a value is saved for this op alone."""
        return (op, name) in self.operands and len(self.keepers.get(self.roots[name], ())) == 1


@dataclass(frozen=True, eq=False)
class MicroBatchedCall:
    """Call of a graph in micro-batches, each of which runs a smaller graph."""

    graph: NamedGraph
    micro: MicroBatches
    # Stages that run the micro-batches; None if each rank runs all ops.
    pipelining: Pipelining | None = None
    # Micro-batches whose activations the first stage keeps.
    in_flight: float = 1.0
    # A lower bound on the step, as in `PlanningProblem.shares`.
    shares: tuple[float, float, float] | None = None

    def plan(self, plan: StepPlan) -> StepPlan:
        """Return the plan of the call, from that of one micro-batch."""
        options = replace(plan.options, micro_batches=1)
        assignment = replace(gathered_where_used(plan.assignment), pipelining=self.pipelining)
        return StepPlan(self.graph.fingerprint, assignment, options, self.micro)

    @property
    def stage_share(self) -> float:
        """Return the share of the model that a stage runs and stores, on average."""
        return 1.0 if self.pipelining is None else 1.0 / self.pipelining.stages


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
    # The call whose micro-batches have this graph; None without micro-batches.
    call: MicroBatchedCall | None = None
    # The cluster with all of its parts; that of the choices has the devices of one of them.
    whole_cluster: Cluster | None = None

    @staticmethod
    def of(
        graph: NamedGraph,
        axes: SubMesh,
        cluster: Cluster,
        options: TrainingOptions,
        call: MicroBatchedCall | None = None,
    ) -> PlanningProblem:
        stages = None if call is None else call.pipelining
        mesh, parts = (axes if stages is None else stages.mesh), cluster
        # A step takes as long as on the slowest ranks. Of stages the fastest count, so that the bound is one.
        kind = priced_kind(graph, mesh, cluster, options.links, fastest=stages is not None)
        axes, cluster = axes.seen(kind.coordinate), kind.alone(cluster)
        prices = TaskBuilder(graph, cluster, axes, options.links, options.compiled, options.precision)
        if stages is not None:
            prices.on_mesh(mesh)
        users: dict[str, list[NamedNode]] = {}
        for node in graph.nodes:
            for name in dict.fromkeys(node.operands):
                if name is not None:
                    users.setdefault(name, []).append(node)
        trains = graph.exported.grad_enabled
        everyone = {name: tuple(nodes) for name, nodes in users.items()}
        return PlanningProblem(graph, axes, cluster, options, prices, trains, axes.used, everyone, call, parts)

    def costs(self, plan: StepPlan) -> Costs:
        """Return the costs of a plan, of the whole call where there are micro-batches."""
        return evaluate(self.graph if self.call is None else self.call.graph, plan, self.whole_cluster or self.cluster)

    @cached_property
    def whole_seconds(self) -> Mapping[str, float]:
        """Return the seconds of each op on one rank, both directions, or of its launches where they are longer."""
        found: dict[str, float] = {}
        for node in self.graph.nodes:
            shardings = shardings_of(self.graph, node, Choice())
            assert shardings is not None, f"{node.name} runs whole"
            work = self.prices.work(node, OpAssignment(Choice(), *shardings, shardings[1]))
            ways = work.forward, work.backward
            found[node.name] = sum(max(way.seconds, way.launches * self.prices.launch) for way in ways)
        return found

    @cached_property
    def layer_of(self) -> Mapping[str, str]:
        """Return the path of the repeated layer of each op that is in one."""
        return {op: path for path, ops in self.graph.ops_of_layers.items() for op in ops}

    def shares_layer(self, op: str, other: str) -> bool:
        """Return whether two ops are in one repeated layer, or both in none: what recomputes one may recompute both."""
        return self.layer_of.get(op) == self.layer_of.get(other)

    @cached_property
    def kept(self) -> SavedValues:
        return SavedValues.of(self.graph)

    @property
    def ranks(self) -> int:
        return self.axes.size if self.call is None or self.call.pipelining is None else self.call.pipelining.mesh.size

    @property
    def stored_share(self) -> float:
        """Return the share of stored tensors, and of their time once a step, that a rank of a pipeline has."""
        return 1.0 if self.call is None else self.call.stage_share

    @property
    def shares(self) -> tuple[float, float, float]:
        """Return the least time of a step: multiples of that of a micro-batch, and of communication once a step.

        The third number counts the micro-batches that this communication may run beside.
        """
        own = None if self.call is None else self.call.shares
        return (float(self.options.micro_batches), 1.0, 1.0) if own is None else own

    @property
    def saved_share(self) -> float:
        """Return the saved tensors of the first stage, as a share of those of one micro-batch of the model."""
        return 1.0 if self.call is None else self.call.stage_share * self.call.in_flight
