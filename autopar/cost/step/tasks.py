"""What a plan's price is made of: one op, one conversion, one addition of gradients, each as the tasks that it is.

`profile` puts them in order for a plan that is decided; whoever decides looks them up one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch

from autopar.cost.collectives.network import Network
from autopar.cost.compute.op_time import NOTHING, DirectionWork, OpWork, local_bytes, op_work, seconds_of_bytes
from autopar.cost.compute.optimizers import optimizer_of
from autopar.cost.hardware.cluster import Cluster
from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode
from autopar.mesh import SubMesh
from autopar.sharding.assignment import OpAssignment
from autopar.sharding.buckets import shape_of
from autopar.sharding.reshard.reshard import Step, StepKind
from autopar.sharding.reshard_insertion import InsertedReshard
from autopar.sharding.sharding import Sharding

__all__ = ["Direction", "Task", "TaskBuilder"]

Direction = Literal["forward", "backward", "recompute", "optimizer"]


class Task(NamedTuple):
    """One thing that a device does, or that its links do for it."""

    name: str
    kind: str
    """`compute`, `copy`, or that of a collective."""
    direction: Direction
    seconds: float
    axes: tuple[str, ...] = ()
    bytes: float = 0.0
    flops: float = 0.0
    beside: bool = False
    """Of parameters: it may run beside the computing."""
    once: bool = False
    """In one micro-batch of the step, not in each."""
    host_seconds: float = 0.0
    """What the host takes to start it."""


@dataclass
class TaskBuilder:
    """The prices of one graph on one mesh of one cluster; what is equal is worked out once."""

    graph: NamedGraph
    cluster: Cluster
    axes: SubMesh
    links: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    compiled: bool = False
    gradient_dtype: torch.dtype | None = None
    works: dict[Any, OpWork] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.device = self.cluster.device
        self.network = Network(self.cluster, self.axes, self.links)
        self.launch = self.device.launch_seconds if self.compiled else self.device.host_seconds

    # -- ops

    def work(self, node: NamedNode, op_assignment: OpAssignment) -> OpWork:
        """What an op computes under a decision."""
        footprint = self.graph.footprints[node.node]
        key = id(footprint), node.op, op_assignment.choice, op_assignment.operands, op_assignment.produced
        found = self.works.get(key)
        if found is None:
            found = self.works[key] = op_work(self.graph, node, op_assignment, footprint, self.axes, self.device)
        return found

    def op(self, name: str, direction: Direction, work: DirectionWork) -> Iterator[Task]:
        if work is not NOTHING and work.seconds:
            host = work.launches * self.launch
            yield Task(name, "compute", direction, work.seconds, bytes=work.bytes, flops=work.flops, host_seconds=host)

    def moved(self, name: str, direction: Direction, size: float) -> Task:
        """An op that does nothing but read and write."""
        seconds = seconds_of_bytes(size, self.device)
        return Task(name, "compute", direction, seconds, bytes=size, host_seconds=self.launch if size else 0.0)

    def added(self, name: str, layout: Sharding) -> Task:
        """A gradient that is added to that of another use of the same value."""
        return self.moved(f"{name} +=", "backward", 3.0 * local_bytes(self.graph, name, layout, self.axes))

    def accumulated(self, name: str, layout: Sharding, master_dtype: torch.dtype | None) -> Task:
        """The gradient of a parameter that is added to that of the micro-batches before."""
        dtype = self.graph.tensors[name].dtype
        count = local_bytes(self.graph, name, layout, self.axes) / dtype.itemsize
        added = (self.gradient_dtype or master_dtype or dtype).itemsize
        return self.moved(f"{name}.grad +=", "backward", count * (dtype.itemsize + 2 * added))

    def optimizer_bytes(self, name: str, stored: Sharding, optimizer: str, master_dtype: torch.dtype | None) -> float:
        """What the optimizer reads and writes for one parameter."""
        dtype = self.graph.tensors[name].dtype
        numel = local_bytes(self.graph, name, stored, self.axes) / dtype.itemsize
        return numel * (master_dtype or dtype).itemsize * optimizer_of(optimizer).passes

    # -- communication

    def conversion(self, one: InsertedReshard, way: str, direction: Direction | None = None) -> Iterator[Task]:
        """A value that is converted, which whoever wants it waits for."""
        if way == "backward" and not one.differentiable:
            return
        for step in one.reshard.forward if way == "forward" else one.reshard.backward:
            size = float(step.numel * one.itemsize)
            told: Direction = direction or ("forward" if way == "forward" else "backward")
            if step.local:
                moved = 2.0 * one.itemsize * max(prod(shape_of(one, layout)) for layout in (step.before, step.after))
                yield self.moved(one.tensor, told, moved)._replace(kind="copy", axes=step.axes)
            else:
                joined = step.kind is StepKind.ALL_REDUCE and way == "forward" and len(one.reshard.forward) == 1
                share = self.share(one.tensor) if joined else 1.0
                seconds, host = self.network.seconds(step.kind.value, step.axes, size), self._host(step)
                yield Task(
                    one.tensor, step.kind.value, told, share * seconds, step.axes, size, host_seconds=share * host
                )

    def share(self, tensor: str) -> float:
        """What a tensor's sum over ranks is of a collective that adds up several."""
        return self.graph.shares.get(tensor, 1.0)

    def together(self, members: Sequence[InsertedReshard], way: Literal["forward", "backward"]) -> Iterator[Task]:
        """Parameters that are converted in one bucket: the steps of all at once, beside the computing."""
        first = members[0]
        if way == "backward" and not first.differentiable:
            return
        steps = [one.reshard.forward if way == "forward" else one.reshard.backward for one in members]
        for together in zip(*steps, strict=True):
            step = together[0]
            pairs = zip(members, together, strict=True)
            size = float(sum(each.numel * self.bucket_itemsize(one, way) for one, each in pairs))
            name = first.tensor if len(members) == 1 else f"{first.tensor} and {len(members) - 1} more"
            seconds = 0.0 if step.local else self.network.seconds(step.kind.value, step.axes, size)
            kind = "copy" if step.local else step.kind.value
            yield Task(name, kind, way, seconds, step.axes, size, 0.0, True, False, self._host(step))

    def _host(self, step: Step) -> float:
        return self.launch if step.local else self.cluster.library.host_seconds.get(step.kind.value, self.launch)

    def bucket_itemsize(self, one: InsertedReshard, way: str) -> int:
        """Gradients may be added up in another dtype."""
        return one.itemsize if way == "forward" or self.gradient_dtype is None else self.gradient_dtype.itemsize
