"""The planning problem: the graph with its saved values, the mesh, the cluster, and the user's options."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from autopar.cost.costs import Costs
from autopar.cost.evaluate import evaluate, least_seconds
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.tasks import TaskBuilder
from autopar.cost.unequal_devices import priced_kind
from autopar.ir.analysis.saved_values import SavedValues
from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode
from autopar.mesh import SubMesh
from autopar.sharding.assignment import OpAssignment, Pipelining, StepPlan
from autopar.sharding.choices import Choice, shardings_of
from autopar.sharding.layout.syntax import MicroBatches, Recompute
from autopar.sharding.offload import LEAST_BYTES
from autopar.sharding.options import TrainingOptions
from autopar.sharding.time_slice import gathered_where_used, slice_of_half
from autopar.solver.model.recompute_variables import STATES

# Offload is left to the search while it takes up to so many times the forward: collectives make that dearer.
WORTHWHILE = 2.0


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
        gathered, halves = gathered_where_used(plan.assignment), self.micro.halves
        assignment = replace(gathered, pipelining=self.pipelining, halves=halves)
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
    # False where the memory of the host is too small for the layers that a search would offload.
    may_offload: bool = True

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
        half = None if call is None else slice_of_half(call.graph, call.micro)
        prices = TaskBuilder.of(graph, cluster, axes, options, half)
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
        return evaluate(self.whole_graph, plan, self.whole_cluster or self.cluster)

    def least_seconds(self, plan: StepPlan) -> float:
        """Return the least time of a plan, quicker than its costs; zero if it is not known."""
        return least_seconds(self.whole_graph, plan, self.whole_cluster or self.cluster)

    @property
    def whole_graph(self) -> NamedGraph:
        """Return the graph of the whole call."""
        return self.graph if self.call is None else self.call.graph

    def whole_plan(self, plan: StepPlan) -> StepPlan:
        """Return the plan of the whole call, from that of one micro-batch or of the call."""
        return plan if self.call is None or plan.micro is not None else self.call.plan(plan)

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
    def modes(self) -> tuple[Recompute, ...]:
        """Return the recompute modes that a search chooses from.

        Layers are offloaded only where that may take less time than to recompute them: their copies, but for those
        beside the compute, against their forward.
        """
        rate, outcomes = self.cluster.device.host_bytes_per_second, list[bool]()
        if rate is None or not self.trains or self.options.compiled or not self.may_offload:
            return STATES[:-1]
        kinds = {tuple(self.graph.forms[op] for op in ops): ops for ops in self.graph.ops_of_layers.values()}
        for ops in kinds.values():
            copies = self.movable_bytes(ops) / rate
            seconds = sum(self.whole_seconds[op] for op in ops)
            # The backward of products takes twice the time of the forward.
            forward = seconds / 3
            exposed = max(0.0, copies - forward) + max(0.0, copies - 2 * forward)
            outcomes.append(copies > 0.0 and exposed < WORTHWHILE * forward)
        return STATES if any(outcomes) else STATES[:-1]

    def movable_bytes(self, ops: Collection[str]) -> float:
        """Return the bytes of the tensors that some ops save, where a rank's share of them is worth a copy."""
        whole = {name: tensor for name, tensor in self.graph.tensors.items() if tensor.kind == "activation"}
        own = frozenset(ops)
        saved = [name for name, keepers in self.kept.keepers.items() if name in whole and not own.isdisjoint(keepers)]
        sizes = [prod(whole[name].shape) * whole[name].element_bytes for name in saved]
        sizes += [self.graph.footprints[node.node].internal_bytes for node in self.graph.nodes if node.name in own]
        return float(sum(size for size in sizes if size / self.ranks >= LEAST_BYTES))

    def shares_layer(self, op: str, other: str) -> bool:
        """Return whether two ops are in one layer, or both in none: what recomputes one may recompute both."""
        return self.graph.layer_of.get(op) == self.graph.layer_of.get(other)

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
