"""What one device does in a step, in order: ops, conversions, collectives, each with its time.

The conversions are those that the generated graph holds (`autopar.conversions`), parameters in the same buckets. What
is equal is worked out once: ops by their call and the layouts of their tensors, collectives by kind, axes and size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal, NamedTuple

from autopar.choices import Choice
from autopar.conversions import Inserted, OpConversions, Wiring, wire
from autopar.cost.buckets import Bucket, buckets_of, shape_of
from autopar.cost.cluster import Cluster
from autopar.cost.comm import Network
from autopar.cost.compute import NOTHING, OpWork, Work, local_bytes, op_work, seconds_of_bytes
from autopar.cost.fusion import fused
from autopar.cost.layers import again, layers_of
from autopar.cost.optimizers import optimizer_of
from autopar.decided import Plan
from autopar.reshard import Step
from autopar.tracing.graph import NamedGraph, NamedNode

__all__ = ["Profile", "Task", "profile", "wire_of"]

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


@dataclass(frozen=True)
class Profile:
    """The tasks of one micro-batch in their order, and those of the optimizer."""

    forward: tuple[Task, ...]
    backward: tuple[Task, ...]
    optimizer: tuple[Task, ...]
    model_flops: float
    """Of one micro-batch, of the whole model, without what is computed again."""
    again: frozenset[str] = frozenset()
    """The ops that are computed again in the backward."""

    def __iter__(self) -> Iterator[Task]:
        yield from (*self.forward, *self.backward, *self.optimizer)


def profile(graph: NamedGraph, plan: Plan, cluster: Cluster, wiring: Wiring | None = None) -> Profile:
    """Everything that a device does, on the rank that has most to do."""
    return _Profiler(graph, plan, cluster, wiring or wire_of(graph, plan)).run()


def wire_of(graph: NamedGraph, plan: Plan) -> Wiring:
    return wire(graph, plan.decisions, plan.outputs, plan.local_inputs)


@dataclass
class _Profiler:
    graph: NamedGraph
    plan: Plan
    cluster: Cluster
    wiring: Wiring
    works: dict[Any, OpWork] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.device = self.cluster.device
        self.axes = self.plan.axes
        self.network = Network(self.cluster, self.axes, self.plan.links)
        self.buckets: dict[str, list[Bucket]] = {}
        for bucket in buckets_of(self.graph, self.plan, self.wiring):
            self.buckets.setdefault(bucket.op, []).append(bucket)
        self.layer_of = layers_of(self.graph, self.plan)
        self.launch = self.device.launch_seconds if self.plan.compiled else self.device.host_seconds
        self.first_use: dict[str, str] = {}
        for node in self.graph.nodes:
            for name in node.operands:
                self.first_use.setdefault(name or "", node.name)
        self.last_use = {name: node.name for node in self.graph.nodes for name in node.operands if name is not None}

    def run(self) -> Profile:
        nodes = self.graph.nodes
        works = {node.name: self._work(node) for node in nodes}
        if self.plan.compiled:
            works = fused(self.graph, works, self.device)
        forward: list[Task] = [task for one in self.wiring.inputs.values() for task in self._value(one, "forward")]
        for node in nodes:
            forward += self._forward(node, works[node.name], "forward", parameters=True)
        forward += [task for one in self.wiring.outputs for task in self._value(one, "forward")]
        backward = [task for one in self.wiring.outputs for task in self._value(one, "backward")]
        recomputed = again(self.layer_of, works, self.device)
        inside: str | None = None
        for node in reversed(nodes if self.graph.exported.grad_enabled else ()):
            layer, mode = self.layer_of.get(node.name, ("", "none"))
            if mode != "none" and layer != inside:
                backward += self._recomputed(layer, recomputed, works)
            inside = layer
            backward += self._backward(node, works[node.name])
        return Profile(tuple(forward), tuple(backward), self._optimizer(), self._model_flops(), recomputed)

    # -- ops

    def _work(self, node: NamedNode) -> OpWork:
        decision = self.plan.decisions.ops[node.name]
        footprint = self.graph.footprints[node.node]
        key = id(footprint), node.op, decision.choice, decision.operands, decision.produced
        found = self.works.get(key)
        if found is None:
            found = self.works[key] = op_work(self.graph, node, decision, footprint, self.axes, self.device)
        return found

    def _forward(self, node: NamedNode, work: OpWork, direction: Direction, parameters: bool) -> Iterator[Task]:
        wired = self.wiring.ops[node.name]
        if parameters:
            for bucket in self.buckets.get(node.name, ()):
                yield from self._bucket(bucket, "forward")
        for one in self._values(wired):
            yield from self._value(one, "forward", direction)
        yield from self._task(node.name, direction, work.forward)
        for one in wired.after:
            yield from self._value(one, "forward", direction)

    def _backward(self, node: NamedNode, work: OpWork) -> Iterator[Task]:
        wired = self.wiring.ops[node.name]
        for one in reversed(wired.after):
            yield from self._value(one, "backward")
        for bucket in self.buckets.get(node.name, ()):
            if bucket.gathers and any(one.tensor in self.plan.regather for one in bucket.members):
                yield from (task._replace(direction="recompute") for task in self._bucket(bucket, "forward"))
        yield from self._task(node.name, "backward", work.backward)
        for one in reversed(self._values(wired)):
            yield from self._value(one, "backward")
        for name in dict.fromkeys(node.operands):
            yield from self._added(name, node)
            yield from self._accumulated(name, node)
        for bucket in self.buckets.get(node.name, ()):
            yield from self._bucket(bucket, "backward")

    def _values(self, wired: OpConversions) -> tuple[Inserted, ...]:
        """What is converted of values, and what the op sends itself; parameters are in the buckets."""
        before = (one for one in wired.before if self.graph.tensors[one.tensor].kind != "param")
        return (*before, *wired.inside)

    def _added(self, name: str | None, node: NamedNode) -> Iterator[Task]:
        """A gradient that is added to that of another use of the same value; the last use in the graph comes first."""
        if name is None or not self.graph.tensors[name].requires_grad or self.last_use[name] == node.name:
            return
        size = 3.0 * local_bytes(self.graph, name, self.plan.decisions.values[name], self.axes)
        yield self._moved(f"{name} +=", "backward", size)

    def _accumulated(self, name: str | None, node: NamedNode) -> Iterator[Task]:
        """The gradient of a parameter is added to that of the micro-batches before, once it is complete."""
        plan = self.plan
        if name is None or self.first_use[name] != node.name or not self.graph.tensors[name].requires_grad:
            return
        tensor = self.graph.tensors[name]
        if tensor.kind == "param" and (plan.micro_batches > 1 or plan.gradient_dtype is not None):
            layout = plan.decisions.values[name] if name in plan.accumulated else plan.decisions.stored[name]
            count = local_bytes(self.graph, name, layout, self.axes) / tensor.dtype.itemsize
            added = (plan.gradient_dtype or plan.master_dtype or tensor.dtype).itemsize
            yield self._moved(f"{name}.grad +=", "backward", count * (tensor.dtype.itemsize + 2 * added))

    def _recomputed(self, layer: str, again: frozenset[str], works: Mapping[str, OpWork]) -> Iterator[Task]:
        """The forward of a layer once more: all of it, or what is cheap."""
        for node in self.graph.nodes:
            if node.name in again and self.layer_of[node.name][0] == layer:
                yield from self._forward(node, works[node.name], "recompute", parameters=False)

    def _task(self, name: str, direction: Direction, work: Work) -> Iterator[Task]:
        if work is not NOTHING and work.seconds:
            host = work.launches * self.launch
            yield Task(name, "compute", direction, work.seconds, bytes=work.bytes, flops=work.flops, host_seconds=host)

    def _moved(self, name: str, direction: Direction, size: float) -> Task:
        """An op that does nothing but read and write."""
        seconds = seconds_of_bytes(size, self.device)
        return Task(name, "compute", direction, seconds, bytes=size, host_seconds=self.launch if size else 0.0)

    # -- communication

    def _value(self, one: Inserted, way: str, direction: Direction | None = None) -> Iterator[Task]:
        if way == "backward" and not one.differentiable:
            return
        for step in one.reshard.forward if way == "forward" else one.reshard.backward:
            size = float(step.numel * one.itemsize)
            told: Direction = direction or ("forward" if way == "forward" else "backward")
            if step.local:
                moved = 2.0 * one.itemsize * max(prod(shape_of(one, layout)) for layout in (step.before, step.after))
                yield self._moved(one.tensor, told, moved)._replace(kind="copy", axes=step.axes)
            else:
                seconds, host = self.network.seconds(step.kind.value, step.axes, size), self._host(step)
                yield Task(one.tensor, step.kind.value, told, seconds, step.axes, size, host_seconds=host)

    def _bucket(self, bucket: Bucket, way: Literal["forward", "backward"]) -> Iterator[Task]:
        """The steps of all members at once."""
        first = bucket.members[0]
        if way == "backward" and not first.differentiable:
            return
        once = self.plan.resident if way == "forward" else self.plan.accumulated
        steps = [one.reshard.forward if way == "forward" else one.reshard.backward for one in bucket.members]
        for together in zip(*steps, strict=True):
            step = together[0]
            pairs = zip(bucket.members, together, strict=True)
            size = float(sum(each.numel * self._itemsize(one, way) for one, each in pairs))
            name = first.tensor if len(bucket.members) == 1 else f"{first.tensor} and {len(bucket.members) - 1} more"
            seconds = 0.0 if step.local else self.network.seconds(step.kind.value, step.axes, size)
            kind = "copy" if step.local else step.kind.value
            host = self._host(step)
            yield Task(name, kind, way, seconds, step.axes, size, 0.0, True, first.tensor in once, host)

    def _host(self, step: Step) -> float:
        return self.launch if step.local else self.cluster.library.host_seconds.get(step.kind.value, self.launch)

    def _itemsize(self, one: Inserted, way: str) -> int:
        dtype = self.plan.gradient_dtype
        return one.itemsize if way == "forward" or dtype is None else dtype.itemsize

    # -- the whole

    def _optimizer(self) -> tuple[Task, ...]:
        if not self.graph.exported.grad_enabled:
            return ()
        total = 0.0
        states = optimizer_of(self.plan.optimizer)
        for tensor in self.graph.parameters:
            if tensor.requires_grad:
                count = local_bytes(self.graph, tensor.name, self.plan.decisions.stored[tensor.name], self.axes)
                numel = count / tensor.dtype.itemsize
                size = (self.plan.master_dtype or tensor.dtype).itemsize
                total += numel * size * states.passes
        return (self._moved("optimizer", "optimizer", total),)

    def _model_flops(self) -> float:
        """Of the whole model, whatever is split: forward, and backward where there is one."""
        total = 0.0
        found: dict[int, float] = {}
        for node in self.graph.nodes:
            footprint = self.graph.footprints[node.node]
            if id(footprint) not in found:
                whole = replace(self.plan.decisions.ops[node.name], choice=Choice())
                work = op_work(self.graph, node, whole, footprint, self.axes, self.device)
                found[id(footprint)] = work.forward.flops + work.backward.flops
            total += found[id(footprint)]
        return total
