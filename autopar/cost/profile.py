"""Tasks of one device in a step, in order: ops, reshards and collectives, each with its time.

The reshards are those of the generated graph (`autopar.sharding.reshard_insertion`), with parameters in the same
buckets. `profile` puts the tasks of a whole plan in order; `autopar.cost.tasks` prices each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from autopar.cost.compute.fusion import fused
from autopar.cost.compute.op_time import OpWork, op_work
from autopar.cost.gradient_sums import gradient_sums
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.host_copies import LayerCopies, copies_by_op, exposed_state_seconds, layer_copies
from autopar.cost.lowered_step import LoweredStep
from autopar.cost.parameter_passes import CODING_LAUNCHES
from autopar.cost.tasks import Direction, Task, TaskBuilder
from autopar.ir.values import NamedNode, NamedTensor
from autopar.sharding.assignment import Pipelining
from autopar.sharding.buckets import Bucket
from autopar.sharding.choices import Choice
from autopar.sharding.reshard_insertion import InsertedReshard, OpReshards
from autopar.sharding.sharding import Sharding


@dataclass(frozen=True)
class Profile:
    """Tasks of one micro-batch in their order, and those of the optimizer."""

    forward: tuple[Task, ...]
    backward: tuple[Task, ...]
    optimizer: tuple[Task, ...]
    # FLOPs of the whole model for one micro-batch, without recomputed ops.
    model_flops: float
    # Of each offloaded layer, in the order of the forward.
    copies: tuple[LayerCopies, ...] = ()

    def __iter__(self) -> Iterator[Task]:
        yield from (*self.forward, *self.backward, *self.optimizer)


def profile(step: LoweredStep, cluster: Cluster) -> Profile:
    """Return the tasks of the busiest rank."""
    return _Profiler(step, cluster).run()


def profile_parts(step: LoweredStep, cluster: Cluster, only: Sequence[int] | None = None) -> tuple[Profile, ...]:
    """Return the tasks of each part of a pipeline, on its busiest rank; `only` names some of the parts."""
    pipelining = step.plan.assignment.pipelining
    assert pipelining is not None, "a pipeline has parts"
    parts = range(pipelining.stages * pipelining.chunks) if only is None else only
    return _Profiler(step, cluster).parts(pipelining, parts)


def op_seconds(step: LoweredStep, cluster: Cluster) -> dict[str, float]:
    """Return the seconds of each op with its recompute and its reshards of values, in both directions."""
    return _Profiler(step, cluster).seconds()


@dataclass
class _Profiler:
    step: LoweredStep
    cluster: Cluster

    def __post_init__(self) -> None:
        plan = self.plan = self.step.plan
        self.graph, self.reshard_plan = self.step.graph, self.step.reshard_plan
        self.tasks = TaskBuilder.of(self.graph, self.cluster, plan.axes, plan.options, self.step.half)
        if plan.assignment.pipelining is not None:
            self.tasks.on_mesh(plan.assignment.pipelining.mesh)
        self.tied = {one.version[0] for one in self.step.tied}
        self.buckets: dict[str, list[Bucket]] = {}
        for bucket in self.step.buckets:
            self.buckets.setdefault(bucket.op, []).append(bucket)
        pipelining = self.plan.assignment.pipelining
        count = 1 if pipelining is None else pipelining.stages
        # Each stage of a pipeline adds up gradients of its own.
        self.stages = {op: frozenset(part % count for part in parts) for op, parts in self.step.parts_of.items()}
        self.first_use = {
            (name, self.stages[node.name]): node.name
            for node in reversed(self.graph.nodes)
            for name in node.operands
            if name
        }

    def run(self) -> Profile:
        inputs, outputs = self.reshard_plan.inputs.values(), self.reshard_plan.outputs
        forward, backward = self._ops(self.graph.nodes)
        before = [task for one in inputs for task in self.tasks.reshard(one, "forward", of_ops=False)]
        after = [task for one in outputs for task in self.tasks.reshard(one, "forward", of_ops=False)]
        first = [task for one in outputs for task in self.tasks.reshard(one, "backward", of_ops=False)]
        optimizer, copies = self._optimizer(self.graph.parameters), self._copies(self.graph.nodes)
        return Profile((*before, *forward, *after), (*first, *backward), optimizer, self._model_flops(), copies)

    def parts(self, pipelining: Pipelining, wanted: Sequence[int]) -> tuple[Profile, ...]:
        """Return the profile of each of these parts of a pipeline."""
        found = []
        stages = pipelining.stages
        nodes: dict[int, list[NamedNode]] = {}
        for node in self.graph.nodes:
            for part in self.step.parts_of[node.name]:
                nodes.setdefault(part, []).append(node)
        for part in wanted:
            forward, backward = self._ops(nodes.get(part, []))
            # The optimizer of a stage counts with its first part.
            held = ((one, pipelining.held[one.name]) for one in self.graph.parameters)
            parameters = [one for one, stage in held if part < stages and stage in (None, part)]
            flops = self._model_flops() if part == 0 else 0.0
            copies = self._copies(nodes.get(part, []))
            found.append(Profile(tuple(forward), tuple(backward), self._optimizer(parameters), flops, copies))
        return tuple(found)

    def seconds(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for node in self.graph.nodes:
            work = self._works[node.name]
            tasks = list(self._forward(node, work, "forward", parameters=False))
            tasks += self._rerun(node, work) if node.name in self.step.recomputed else ()
            tasks += self._backward(node, work) if self.graph.exported.grad_enabled else ()
            found[node.name] = sum(task.seconds for task in tasks if not task.overlapped)
        return found

    @cached_property
    def _works(self) -> Mapping[str, OpWork]:
        works = {node.name: self.tasks.work(node, self.plan.assignment.ops[node.name]) for node in self.graph.nodes}
        return fused(self.graph, works, self.cluster.device) if self.plan.options.compiled else works

    def _ops(self, nodes: Sequence[NamedNode]) -> tuple[list[Task], list[Task]]:
        """Return the tasks of some ops, forward and backward."""
        works, forward, backward = self._works, list[Task](), list[Task]()
        for node in nodes:
            forward += self._forward(node, works[node.name], "forward", parameters=True)
        layers: dict[int, list[NamedNode]] = {}
        for node in nodes:
            if node.name in self.step.recomputed:
                layers.setdefault(self.step.layers[node.name][0], []).append(node)
        inside = 0
        for node in reversed(nodes if self.graph.exported.grad_enabled else ()):
            layer, mode = self.step.layers.get(node.name, (0, "none"))
            if mode != "none" and layer != inside:
                # The backward enters the layer: the recomputed ops of its forward run first.
                for one in layers.get(layer, ()):
                    backward += self._rerun(one, works[one.name])
            inside = layer
            backward += self._backward(node, works[node.name])
        return forward, backward

    @cached_property
    def _moved(self) -> Mapping[str, tuple[int, float]]:
        return copies_by_op(self.step) if self.step.offloaded else {}

    def _copies(self, nodes: Sequence[NamedNode]) -> tuple[LayerCopies, ...]:
        """Return the copies of the offloaded layers among some ops."""
        return layer_copies(self.step.offloaded, nodes, self._works, self._moved, self.cluster, self.tasks.launch)

    # -- ops

    def _forward(self, node: NamedNode, work: OpWork, direction: Direction, parameters: bool) -> Iterator[Task]:
        reshards = self.reshard_plan.ops[node.name]
        for bucket in self.buckets.get(node.name, ()):
            if parameters:
                yield from self._bucket(bucket, "forward")
            elif bucket.is_alone:
                yield from (task._replace(direction=direction) for task in self._bucket(bucket, "forward"))
        if parameters:
            yield from self._casts(node)
        yield from self._taken(node, work, direction)
        yield from self.tasks.op(node.name, direction, work.forward)
        for one in reshards.after:
            yield from self.tasks.reshard(one, "forward", direction)

    def _taken(self, node: NamedNode, work: OpWork, direction: Direction) -> Iterator[Task]:
        reshards = self.reshard_plan.ops[node.name]
        for one in self._value_reshards(reshards):
            yield from self.tasks.reshard(one, "forward", direction)
        for one in reshards.inside:
            yield from self.tasks.message(one, "forward", work, direction)

    def _rerun(self, node: NamedNode, work: OpWork) -> Iterator[Task]:
        """Yield what the recompute of a layer runs of one op."""
        ends = self.step.rerun_ends
        if node.name not in ends.idle:
            for name in dict.fromkeys(node.operands):
                # A weight that each micro-batch gathers is cast anew.
                yield from (task for task in self._weight_cast(name, "recompute") if not task.once)
            yield from self._forward(node, work, "recompute", parameters=False)
        elif node.name not in ends.beyond:
            yield from self._taken(node, work, "recompute")

    def _backward(self, node: NamedNode, work: OpWork) -> Iterator[Task]:
        reshards = self.reshard_plan.ops[node.name]
        for one in reversed(reshards.after):
            yield from self.tasks.reshard(one, "backward")
        for bucket in self.buckets.get(node.name, ()):
            if bucket.gathers and any(one.tensor in self.plan.regather for one in bucket.members):
                for one in bucket.members:
                    yield from self._cast(one.tensor, "recompute")
                yield from (task._replace(direction="recompute") for task in self._bucket(bucket, "forward"))
        late = self.step.late_weights.get(node.name, ())
        yield from self.tasks.op(node.name, "backward", work.backward - work.weights if late else work.backward)
        for task in self.tasks.op(f"weights of {node.name}", "backward", work.weights) if late else ():
            yield task._replace(is_late=True)
        for one in reversed(reshards.inside):
            yield from self.tasks.message(one, "backward", work)
        for one in reversed(self._value_reshards(reshards)):
            yield from self.tasks.reshard(one, "backward")
        for name in dict.fromkeys(node.operands):
            if name is not None and self.graph.tensors[name].requires_grad:
                yield from (task._replace(is_late=name in late) for task in self._gradient_sums(name, node))
        for bucket in self.buckets.get(node.name, ()):
            yield from self._bucket(bucket, "backward")

    def _value_reshards(self, reshards: OpReshards) -> tuple[InsertedReshard, ...]:
        """Return the reshards of values before an op."""
        return tuple(one for one in reshards.before if self.graph.tensors[one.tensor].kind != "param")

    @cached_property
    def _sums(self) -> Mapping[tuple[str, str], Sequence[Sharding]]:
        return gradient_sums(self.graph, self.plan.assignment, self.stages)

    def _gradient_sums(self, name: str, node: NamedNode) -> Iterator[Task]:
        plan = self.plan
        for sharding in self._sums.get((node.name, name), ()):
            yield self.tasks.gradient_sum(name, sharding)
        if self.graph.tensors[name].kind != "param":
            return
        if self.step.half is not None:  # both halves have a gradient
            yield self.tasks.gradient_sum(name, plan.assignment.values[name])
        if self.first_use[name, self.stages[node.name]] != node.name:
            return
        yield from self._weight_cast(name, "backward")
        # At the first use the gradient is complete, and is added to that of earlier micro-batches.
        values, stored = plan.assignment.values[name], plan.assignment.stored[name]
        accumulates, deferred = plan.options.micro_batches > 1, name in plan.defer_reduction
        if accumulates:
            yield self.tasks.gradient_accumulation(name, values if deferred else stored)
        size = self.tasks.gradient_cast_bytes(name, values, stored, accumulates and deferred)
        if size:
            yield self.tasks.memory_op(f"{name}.grad cast", "backward", size)._replace(once=deferred)

    def _casts(self, node: NamedNode) -> Iterator[Task]:
        """Yield the casts of the parameters that an op is the first to use."""
        for name in dict.fromkeys(node.operands):
            if name is None or self.graph.tensors[name].kind != "param":
                continue
            if self.first_use[name, self.stages[node.name]] == node.name:
                yield from self._cast(name, "forward")
                yield from self._weight_cast(name, "forward")

    def _weight_cast(self, name: str | None, direction: Direction) -> Iterator[Task]:
        """Yield the cast of a weight to float8 that all its products share; nothing for other tensors."""
        if name is not None and self.graph.tensors[name].kind == "param" and self.tasks.casts_apart(name):
            task = self.tasks.weight_cast(name, self.plan.assignment.values[name], direction)
            yield task._replace(once=self.plan.keeps_between(name))

    def _cast(self, name: str, direction: Direction) -> Iterator[Task]:
        size = self.tasks.cast_bytes(name, self.plan.assignment.stored[name])
        if size:
            once = name in self.plan.keep_gathered
            yield self.tasks.memory_op(f"{name} cast", direction, size)._replace(once=once)

    def _bucket(self, bucket: Bucket, way: Literal["forward", "backward"]) -> Iterator[Task]:
        once = self.plan.keep_gathered if way == "forward" else self.plan.defer_reduction
        if way == "backward" and bucket.is_sum and not bucket.is_alone:
            yield from self._copies_into(bucket)
        if way == "forward":
            yield from self._coding(bucket)
        for task in self.tasks.bucket(bucket.members, way):
            is_tied = way == "backward" and any(one.tensor in self.tied for one in bucket.members)
            yield task._replace(once=bucket.members[0].tensor in once, is_tied=is_tied)

    def _coding(self, bucket: Bucket) -> Iterator[Task]:
        """Yield what gathers in float8 compute before and after their messages."""
        precision = self.plan.options.precision
        members = [one for one in bucket.members if one.gathers_in_float8(self.graph, precision)]
        size = sum(self.tasks.coding_bytes_of(one.tensor, one.source, one.target) for one in members)
        if size:
            task = self.tasks.memory_op(f"{members[0].tensor} in float8", "forward", size)
            host = CODING_LAUNCHES * len(members) * self.tasks.launch
            yield task._replace(once=members[0].tensor in self.plan.keep_gathered, host_seconds=host)

    def _copies_into(self, bucket: Bucket) -> Iterator[Task]:
        """Yield the copy of whole gradients into the buffer in which they are summed, where they stay."""
        deferred = bucket.members[0].tensor in self.plan.defer_reduction
        summed = self.plan.options.micro_batches > 1 and deferred
        size = sum(self.tasks.gradient_copy_bytes(one.tensor, one.target, summed) for one in bucket.members)
        if size:
            name, seconds = f"{bucket.members[0].tensor}.grad copy", size / self.tasks.device.stream
            host = self.tasks.launch
            yield Task(name, "compute", "backward", seconds, bytes=size, once=deferred, host_seconds=host)

    # -- the whole model

    def _optimizer(self, parameters: Sequence[NamedTensor]) -> tuple[Task, ...]:
        if not self.graph.exported.grad_enabled:
            return ()
        plan, stored = self.plan, self.plan.assignment.stored
        total = sum(
            self.tasks.optimizer_bytes(tensor.name, stored[tensor.name], plan.options.optimizer)
            for tensor in parameters
            if tensor.requires_grad
        )
        step = self.tasks.memory_op("optimizer", "optimizer", total, self.tasks.device.optimizer_stream)
        if not plan.options.offload_states:
            return (step,)
        copied = exposed = 0.0
        for tensor in (one for one in parameters if one.requires_grad):
            own = tensor.name, stored[tensor.name], plan.options.optimizer
            size = self.tasks.state_bytes(*own)
            copied += size
            exposed += exposed_state_seconds(size, self.tasks.optimizer_bytes(*own), self.cluster)
        return step, Task("optimizer states from the host", "copy", "optimizer", exposed, bytes=copied)

    def _model_flops(self) -> float:
        """Return the FLOPs of the unsharded model, forward and backward."""
        total = 0.0
        found: dict[int, float] = {}
        for node in self.graph.nodes:
            footprint = self.graph.footprints[node.node]
            if id(footprint) not in found:
                whole = replace(self.plan.assignment.ops[node.name], choice=Choice())
                work = op_work(self.graph, node, whole, footprint, self.plan.axes, self.cluster.device)
                found[id(footprint)] = work.forward.flops + work.backward.flops
            total += found[id(footprint)]
        return total
