"""Tasks of one device: one op, one reshard, one bucket or one addition of gradients, each with its time.

The search prices single choices by them. Equal work is priced once: ops by their call and shardings, collectives by
kind, axes and size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from autopar.cost.compute.byte_time import seconds_of_bytes
from autopar.cost.compute.op_time import FLOAT8_LAUNCHES, NO_WORK, DirectionWork, OpWork, local_bytes, op_work
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.network import Network
from autopar.cost.overlap import OverlapCost
from autopar.cost.parameter_passes import ParameterPasses
from autopar.cost.reshard_costs import ReshardCosts
from autopar.cost.ring_overlap import ring_traffic
from autopar.ir.analysis.float8_products import in_float8
from autopar.ir.analysis.op_memory import Footprint
from autopar.ir.graph import NamedGraph
from autopar.ir.precision import OWN, Precision
from autopar.ir.values import NamedNode
from autopar.mesh import SubMesh
from autopar.sharding.assignment import OpAssignment
from autopar.sharding.options import TrainingOptions, sum_dtype
from autopar.sharding.reshard.reshard import StepSize
from autopar.sharding.reshard_insertion import InsertedReshard
from autopar.sharding.sharding import Sharding

Direction = Literal["forward", "backward", "recompute", "optimizer"]


class Task(NamedTuple):
    """One kernel, local copy or collective of a device."""

    name: str
    # `compute`, `copy`, or the kind of a collective.
    kind: str
    direction: Direction
    seconds: float
    axes: tuple[str, ...] = ()
    bytes: float = 0.0
    flops: float = 0.0
    # True for parameters, and for values of halves: they move in parallel with the compute.
    overlapped: bool = False
    # True for a task of one micro-batch of the step only.
    once: bool = False
    # Time of the host to launch it.
    host_seconds: float = 0.0
    # True for the gradient of a weight, where the schedule of a pipeline puts it off.
    is_late: bool = False
    # True for the reduction of a parameter that other stages of a pipeline have gradients of.
    is_tied: bool = False
    # True for a value that each half of a micro-batch sends.
    of_halves: bool = False

    @property
    def sends(self) -> bool:
        return self.kind not in ("compute", "copy")


@dataclass
class TaskBuilder(ParameterPasses):
    """Tasks of one graph on one mesh of one cluster; the work of equal ops is computed once."""

    graph: NamedGraph
    cluster: Cluster
    axes: SubMesh
    links: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    compiled: bool = False
    precision: Precision = OWN
    # The graph of half a micro-batch, where its halves run side by side.
    half: NamedGraph | None = None
    keeps_casts: bool = False
    works: dict[Any, OpWork] = field(default_factory=dict)
    numels: dict[tuple[str, Sharding], float] = field(default_factory=dict)

    @staticmethod
    def of(
        graph: NamedGraph, cluster: Cluster, axes: SubMesh, options: TrainingOptions, half: NamedGraph | None
    ) -> TaskBuilder:
        """Return the tasks of a step with these options."""
        given = options.links, options.compiled, options.precision, half, options.keeps_casts
        return TaskBuilder(graph, cluster, axes, *given)

    def __post_init__(self) -> None:
        self.device = self.cluster.device
        # A compiled module launches its kernels from generated code, without the overhead of Python.
        self.launch = self.device.launch_seconds if self.compiled else self.device.host_seconds
        self.half_nodes = {} if self.half is None else {node.name: node for node in self.half.nodes}
        self.on_mesh(self.axes)

    def is_halved(self, name: str) -> bool:
        """Return whether each half of a micro-batch has a part of a value."""
        return self.half is not None and self.half.tensors[name].shape != self.graph.tensors[name].shape

    def on_mesh(self, mesh: SubMesh) -> None:
        """Set the mesh whose links carry the collectives: one stage of a pipeline has a part of its axes."""
        self.reshard_costs = ReshardCosts(Network(self.cluster, mesh, self.links), self.launch)

    # -- ops

    def work(self, node: NamedNode, op_assignment: OpAssignment) -> OpWork:
        """Return the work of an op under an assignment."""
        footprint = self.graph.footprints[node.node]
        casts = self._casts(node)
        key = id(footprint), node.op, op_assignment.choice, op_assignment.operands, op_assignment.produced, casts
        found = self.works.get(key)
        if found is None:
            found = self.works[key] = self._work(node, op_assignment, footprint, casts)
        return found

    def _casts(self, node: NamedNode) -> tuple[int, ...]:
        """Return the places of the operands that a product casts to float8; none for other ops."""
        if not in_float8(node, self.graph.tensors, self.precision):
            return ()
        return (0,) if self.casts_apart(node.operands[1] or "") else (0, 1)

    def _work(
        self, node: NamedNode, op_assignment: OpAssignment, footprint: Footprint, casts: tuple[int, ...]
    ) -> OpWork:
        half = self.half_nodes.get(node.name, node)
        if self.half is None or half.sizes == node.sizes:
            return op_work(self.graph, node, op_assignment, footprint, self.axes, self.device, casts)
        smaller = self.half.footprints[node.node]
        return 2 * op_work(self.half, half, op_assignment, smaller, self.axes, self.device, casts)

    def op(self, name: str, direction: Direction, work: DirectionWork) -> Iterator[Task]:
        if work is not NO_WORK and work.seconds:
            host = work.launches * self.launch
            yield Task(name, "compute", direction, work.seconds, bytes=work.bytes, flops=work.flops, host_seconds=host)

    def memory_op(self, name: str, direction: Direction, size: float, rate: float | None = None) -> Task:
        """Return an op that reads and writes `size` bytes and computes nothing."""
        seconds = seconds_of_bytes(size, self.device, rate)
        return Task(name, "compute", direction, seconds, bytes=size, host_seconds=self.launch if size else 0.0)

    def weight_cast(self, name: str, used: Sharding, direction: Direction) -> Task:
        """Return the cast of a weight to float8, in the order of memory of one direction."""
        task = self.memory_op(f"{name} in float8", direction, self.weight_cast_bytes(name, used))
        return task._replace(host_seconds=FLOAT8_LAUNCHES * self.launch)

    def gradient_sum(self, name: str, sharding: Sharding) -> Task:
        """Return the addition of a value's gradient to that of another use."""
        size = local_bytes(self.graph, name, sharding, self.axes)
        return self.sum_of_gradients(size, self.is_halved(name))._replace(name=f"{name} +=")

    def sum_of_gradients(self, size: float, halved: bool) -> Task:
        """Return the addition of two gradients of a value with these bytes."""
        task = self.memory_op("+=", "backward", 3.0 * size)
        return task._replace(host_seconds=2 * task.host_seconds) if halved else task

    def gradient_accumulation(self, name: str, sharding: Sharding) -> Task:
        """Return the addition of a parameter's gradient to that of earlier micro-batches."""
        dtype = self.graph.tensors[name].dtype
        added = sum_dtype(dtype).itemsize
        return self.memory_op(f"{name}.grad +=", "backward", self._numel(name, sharding) * (dtype.itemsize + 2 * added))

    # -- communication

    def reshard(
        self, one: InsertedReshard, way: str, direction: Direction | None = None, of_ops: bool = True
    ) -> Iterator[Task]:
        """Yield the steps of a value's reshard, forward or backward.

        Ops wait for all of them, unless halves run side by side. `of_ops`: not of the inputs and outputs of a step.
        """
        if way == "backward" and not one.differentiable:
            return
        shown: Direction = direction or ("forward" if way == "forward" else "backward")
        chosen = one.reshard.forward if way == "forward" else one.reshard.backward
        sizes = [StepSize.of(step, one.reshard.atoms, one.reshard.axes) for step in chosen]
        share = self.share(one.tensor) if way == "forward" else 1.0
        halved = of_ops and self.is_halved(one.tensor)
        for cost in self.reshard_costs.value_steps(sizes, one.itemsize, share, 2 if halved else 1):
            kind = "copy" if cost.step.local else cost.step.kind
            host, beside = cost.host_seconds, halved and not cost.step.local
            own = one.tensor, kind, shown, cost.seconds, cost.step.axes, cost.bytes
            yield Task(*own, overlapped=beside, host_seconds=host, of_halves=halved)

    def message(
        self, one: InsertedReshard, way: str, work: OpWork, direction: Direction | None = None
    ) -> Iterator[Task]:
        """Yield a message inside an op, which waits; of one beside the op's work, the time that is exposed."""
        if not one.beside:
            yield from (task._replace(overlapped=False) for task in self.reshard(one, way, direction))
            return
        shown: Direction = direction or ("forward" if way == "forward" else "backward")
        own, parts = work.forward if way == "forward" else work.backward, 2 if self.is_halved(one.tensor) else 1
        for sent in ring_traffic(one, way, own.seconds, self.reshard_costs, OverlapCost.of(self.cluster), parts):
            ends = one.tensor, sent.kind, shown, sent.seconds, sent.axes, sent.bytes
            yield Task(*ends, host_seconds=sent.host_seconds, of_halves=parts > 1)

    def share(self, tensor: str) -> float:
        """Return a tensor's share of a collective that adds up several small tensors; 1 for all others."""
        return self.graph.shares.get(tensor, 1.0)

    def bucket(self, members: Sequence[InsertedReshard], way: Literal["forward", "backward"]) -> Iterator[Task]:
        """Yield the overlapped steps of parameters in one bucket, each step for all members at once."""
        first = members[0]
        if way == "backward" and not first.differentiable:
            return
        chains = [one.reshard.forward if way == "forward" else one.reshard.backward for one in members]
        name = first.tensor if len(members) == 1 else f"{first.tensor} and {len(members) - 1} more"
        for steps in zip(*chains, strict=True):
            step = StepSize.of(steps[0], first.reshard.atoms, first.reshard.axes)
            pairs = zip(members, steps, strict=True)
            size = float(sum(s.numel * one.itemsize_in(way, self.graph, self.precision) for one, s in pairs))
            cost = self.reshard_costs.bucket_step(step, size)
            kind = "copy" if step.local else step.kind
            yield Task(name, kind, way, cost.seconds, step.axes, size, 0.0, True, False, cost.host_seconds)
