"""What one device does in a step, in order: ops, conversions, collectives, each with its time.

The conversions are those that the generated graph holds (`autopar.sharding.reshard_insertion`), parameters in the same
buckets. What is equal is worked out once: ops by their call and the layouts of their tensors, collectives by kind, axes
and size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from autopar.cost.compute.fusion import fused
from autopar.cost.compute.op_time import OpWork, op_work
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.step.lowered_step import LoweredStep
from autopar.cost.step.tasks import Direction, Task, TaskBuilder
from autopar.ir.values import NamedNode
from autopar.sharding.buckets import Bucket
from autopar.sharding.choices import Choice
from autopar.sharding.reshard_insertion import InsertedReshard, OpReshards

__all__ = ["Profile", "Task", "profile"]


@dataclass(frozen=True)
class Profile:
    """The tasks of one micro-batch in their order, and those of the optimizer."""

    forward: tuple[Task, ...]
    backward: tuple[Task, ...]
    optimizer: tuple[Task, ...]
    model_flops: float
    """Of one micro-batch, of the whole model, without what is computed again."""

    def __iter__(self) -> Iterator[Task]:
        yield from (*self.forward, *self.backward, *self.optimizer)


def profile(wired: LoweredStep, cluster: Cluster) -> Profile:
    """Everything that a device does, on the rank that has most to do."""
    return _Profiler(wired, cluster).run()


@dataclass
class _Profiler:
    wired: LoweredStep
    cluster: Cluster

    def __post_init__(self) -> None:
        plan = self.plan = self.wired.plan
        self.graph, self.reshard_plan = self.wired.graph, self.wired.reshard_plan
        self.axes = plan.axes
        self.prices = TaskBuilder(self.graph, self.cluster, self.axes, plan.links, plan.compiled, plan.gradient_dtype)
        self.buckets: dict[str, list[Bucket]] = {}
        for bucket in self.wired.buckets:
            self.buckets.setdefault(bucket.op, []).append(bucket)
        self.first_use: dict[str, str] = {}
        for node in self.graph.nodes:
            for name in node.operands:
                self.first_use.setdefault(name or "", node.name)
        self.last_use = {name: node.name for node in self.graph.nodes for name in node.operands if name is not None}

    def run(self) -> Profile:
        nodes = self.graph.nodes
        works = {node.name: self._work(node) for node in nodes}
        if self.plan.compiled:
            works = fused(self.graph, works, self.cluster.device)
        forward: list[Task] = [
            task for one in self.reshard_plan.inputs.values() for task in self.prices.conversion(one, "forward")
        ]
        for node in nodes:
            forward += self._forward(node, works[node.name], "forward", parameters=True)
        forward += [task for one in self.reshard_plan.outputs for task in self.prices.conversion(one, "forward")]
        backward = [task for one in self.reshard_plan.outputs for task in self.prices.conversion(one, "backward")]
        layers: dict[int, list[NamedNode]] = {}
        for node in nodes:
            if node.name in self.wired.again:
                layers.setdefault(self.wired.layers[node.name][0], []).append(node)
        inside = 0
        for node in reversed(nodes if self.graph.exported.grad_enabled else ()):
            layer, mode = self.wired.layers.get(node.name, (0, "none"))
            if mode != "none" and layer != inside:
                for one in layers.get(layer, ()):  # the forward once more: all of it, or what is cheap
                    backward += self._forward(one, works[one.name], "recompute", parameters=False)
            inside = layer
            backward += self._backward(node, works[node.name])
        return Profile(tuple(forward), tuple(backward), self._optimizer(), self._model_flops())

    # -- ops

    def _work(self, node: NamedNode) -> OpWork:
        return self.prices.work(node, self.plan.assignment.ops[node.name])

    def _forward(self, node: NamedNode, work: OpWork, direction: Direction, parameters: bool) -> Iterator[Task]:
        wired = self.reshard_plan.ops[node.name]
        for bucket in self.buckets.get(node.name, ()):
            if parameters:
                yield from self._bucket(bucket, "forward")
            elif bucket.is_alone:
                yield from (task._replace(direction=direction) for task in self._bucket(bucket, "forward"))
        for one in self._values(wired):
            yield from self.prices.conversion(one, "forward", direction)
        yield from self.prices.op(node.name, direction, work.forward)
        for one in wired.after:
            yield from self.prices.conversion(one, "forward", direction)

    def _backward(self, node: NamedNode, work: OpWork) -> Iterator[Task]:
        wired = self.reshard_plan.ops[node.name]
        for one in reversed(wired.after):
            yield from self.prices.conversion(one, "backward")
        for bucket in self.buckets.get(node.name, ()):
            if bucket.gathers and any(one.tensor in self.plan.regather for one in bucket.members):
                yield from (task._replace(direction="recompute") for task in self._bucket(bucket, "forward"))
        yield from self.prices.op(node.name, "backward", work.backward)
        for one in reversed(self._values(wired)):
            yield from self.prices.conversion(one, "backward")
        for name in dict.fromkeys(node.operands):
            yield from self._added(name, node)
            yield from self._accumulated(name, node)
        for bucket in self.buckets.get(node.name, ()):
            yield from self._bucket(bucket, "backward")

    def _values(self, wired: OpReshards) -> tuple[InsertedReshard, ...]:
        """What is converted of values, and what the op sends itself; parameters are in the buckets."""
        before = (one for one in wired.before if self.graph.tensors[one.tensor].kind != "param")
        return (*before, *wired.inside)

    def _added(self, name: str | None, node: NamedNode) -> Iterator[Task]:
        """A gradient that is added to that of another use of the same value; the last use in the graph comes first."""
        if name is None or not self.graph.tensors[name].requires_grad or self.last_use[name] == node.name:
            return
        yield self.prices.added(name, self.plan.assignment.values[name])

    def _accumulated(self, name: str | None, node: NamedNode) -> Iterator[Task]:
        """The gradient of a parameter is added to that of the micro-batches before, once it is complete."""
        plan = self.plan
        if name is None or self.first_use[name] != node.name or not self.graph.tensors[name].requires_grad:
            return
        tensor = self.graph.tensors[name]
        if tensor.kind == "param" and (plan.micro_batches > 1 or plan.gradient_dtype is not None):
            layout = plan.assignment.values[name] if name in plan.accumulated else plan.assignment.stored[name]
            yield self.prices.accumulated(name, layout, plan.master_dtype)

    def _bucket(self, bucket: Bucket, way: Literal["forward", "backward"]) -> Iterator[Task]:
        once = self.plan.resident if way == "forward" else self.plan.accumulated
        for task in self.prices.together(bucket.members, way):
            yield task._replace(once=bucket.members[0].tensor in once)

    # -- the whole

    def _optimizer(self) -> tuple[Task, ...]:
        if not self.graph.exported.grad_enabled:
            return ()
        plan = self.plan
        total = sum(
            self.prices.optimizer_bytes(
                tensor.name, plan.assignment.stored[tensor.name], plan.optimizer, plan.master_dtype
            )
            for tensor in self.graph.parameters
            if tensor.requires_grad
        )
        return (self.prices.moved("optimizer", "optimizer", total),)

    def _model_flops(self) -> float:
        """Of the whole model, whatever is split: forward, and backward where there is one."""
        total = 0.0
        found: dict[int, float] = {}
        for node in self.graph.nodes:
            footprint = self.graph.footprints[node.node]
            if id(footprint) not in found:
                whole = replace(self.plan.assignment.ops[node.name], choice=Choice())
                work = op_work(self.graph, node, whole, footprint, self.axes, self.cluster.device)
                found[id(footprint)] = work.forward.flops + work.backward.flops
            total += found[id(footprint)]
        return total
