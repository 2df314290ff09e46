"""A plan as the generated graph runs it: reshards, buckets of parameters and the gathers of each, recomputed ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from autopar.cost.compute.op_time import local_bytes
from autopar.ir.analysis.float8_products import in_float8
from autopar.ir.analysis.op_memory import Footprint
from autopar.ir.analysis.saved_values import SavedValues
from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode
from autopar.sharding.assignment import StepPlan
from autopar.sharding.buckets import Bucket, buckets_of
from autopar.sharding.layout.syntax import Recompute
from autopar.sharding.offload import moved_inputs, offloaded
from autopar.sharding.options import sum_dtype
from autopar.sharding.pipelining import late_weights
from autopar.sharding.recompute import (
    RecomputeRegion,
    RerunEnds,
    layered,
    reading,
    recompute_regions,
    recomputed_ops,
    rerun_ends,
)
from autopar.sharding.reshard_insertion import InsertedReshard, ReshardPlan, insert_reshards
from autopar.sharding.schedules import StageOrders, orders
from autopar.sharding.sharding import Sharding
from autopar.sharding.shares import marked_for
from autopar.sharding.time_slice import gathered_once, slice_in_time, slice_of_half

# What the stages of a pipeline have in common, whatever they recompute.
IN_PARTS = "tasks", "parts_of", "crossing", "stage_with", "tied", "late_weights", "nodes_of_stages", "makers"
# A value in one of its shardings.
Version = tuple[str, Sharding]


@dataclass(frozen=True)
class TiedValue:
    """Value from before the micro-batches that one stage of a pipeline has and sends to others, as a tied parameter."""

    version: Version
    source: int
    targets: tuple[int, ...]
    bytes: float
    # Bytes of the gradient that comes back; none for a frozen parameter.
    gradient_bytes: float


@dataclass(frozen=True, eq=False)
class LoweredStep:
    """Lowering of a plan; every part is computed once and serves the time and the memory of the step."""

    graph: NamedGraph
    plan: StepPlan
    # The graph of all micro-batches of a call, where `graph` is that of one of them.
    call: NamedGraph | None = None
    # The stage whose memory is asked for; None for a rank that runs all ops.
    stage: int | None = None
    # The graph of half a micro-batch, where its halves run side by side.
    half: NamedGraph | None = None

    @cached_property
    def reshard_plan(self) -> ReshardPlan:
        return insert_reshards(
            self.graph, self.plan.assignment, self.plan.options.outputs, self.plan.options.local_inputs
        )

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        found = buckets_of(self.graph, self.plan, self.reshard_plan)
        pipelining = self.plan.assignment.pipelining
        if pipelining is None:
            return found
        places = {node.name: place for place, node in enumerate(self.graph.nodes)}
        # The first op of each part, and the first one that reads a version.
        first: dict[tuple[Version | None, int], str] = {}
        for op, parts in ((node.name, self.parts_of[node.name]) for node in self.graph.nodes):
            for version in (None, *self.reshard_plan.ops[op].operands):
                first.update(((version, part), op) for part in parts if (version, part) not in first)
        # A part has buckets of its own.
        apart: list[Bucket] = []
        for bucket in found:
            groups: dict[frozenset[int], list[InsertedReshard]] = {}
            for one in bucket.members:
                groups.setdefault(self.parts_of_parameter(one), []).append(one)
            for where, group in groups.items():
                for part in sorted(where):
                    ops = {first.get(((one.tensor, one.target), part), first[None, part]) for one in group}
                    apart.append(replace(bucket, members=tuple(group), op=min(ops, key=places.__getitem__)))
        return tuple(sorted(apart, key=lambda bucket: places[bucket.op]))

    @cached_property
    def parts_of(self) -> Mapping[str, frozenset[int]]:
        """Return the parts of a pipeline that run each op: its own, or those that read what it makes."""
        pipelining = self.plan.assignment.pipelining
        parts = {} if pipelining is None else pipelining.parts
        last = max(parts.values(), default=0)
        readers: dict[str, set[int]] = {}
        found: dict[str, frozenset[int]] = {}
        for node in reversed(self.graph.nodes):
            read = set().union(*(readers.get(name, ()) for name in node.outputs if name is not None))
            own = frozenset((parts[node.name],) if node.name in parts else read or (last,))
            stages = {self.stage_with[name] for name in filter(None, node.operands) if name in self.stage_with}
            if node.name not in parts and stages:
                # The other stages that read the result receive it.
                own = frozenset(stages)
            found[node.name] = own
            for name in node.operands:
                if name is not None:
                    readers.setdefault(name, set()).update(own)
        return found

    @cached_property
    def stage_with(self) -> Mapping[str, int]:
        """Return the stage of parameters that one stage has, and of values that are computed from them once."""
        pipelining = self.plan.assignment.pipelining
        if pipelining is None:
            return {}
        found = {name: stage for name, stage in pipelining.held.items() if stage is not None}
        for node in self.graph.nodes:
            stages = [found[name] for name in node.operands if name in found]
            if stages and node.name not in pipelining.parts:
                found.update((name, stages[0]) for name in node.outputs if name is not None)
        return found

    @cached_property
    def tied(self) -> tuple[TiedValue, ...]:
        """Return the values that the stage which has them sends to other stages, once in a call."""
        pipelining = self.plan.assignment.pipelining
        targets: dict[Version, set[int]] = {}
        for op, part in {} if pipelining is None else pipelining.parts.items():
            assert pipelining is not None, "it has parts"
            stage = part % pipelining.stages
            for version in filter(None, self.reshard_plan.ops[op].operands):
                if self.stage_with.get(version[0], stage) != stage:
                    # Each micro-batch gathers a regathered parameter, on the stage that reads it.
                    again = version[0] in self.plan.regather
                    sent = (version[0], self.plan.assignment.stored[version[0]]) if again else version
                    targets.setdefault(sent, set()).add(stage)
        return tuple(self._tied(version, tuple(sorted(found))) for version, found in targets.items())

    def _tied(self, version: Version, targets: tuple[int, ...]) -> TiedValue:
        tensor = self.graph.tensors[version[0]]
        size = float(local_bytes(self.graph, *version, self.plan.axes))
        trains = tensor.requires_grad and self.graph.exported.grad_enabled
        wider = sum_dtype(tensor.dtype).itemsize / tensor.dtype.itemsize
        return TiedValue(version, self.stage_with[version[0]], targets, size, size * wider if trains else 0.0)

    def parts_of_parameter(self, one: InsertedReshard) -> frozenset[int]:
        """Return the parts in which a parameter is resharded: on the stage that stores it, if not in each micro-batch.

        Each part that reads a regathered parameter gathers it.
        """
        pipelining, parts = self.plan.assignment.pipelining, self.readers.get((one.tensor, one.target), frozenset())
        if pipelining is None or one.tensor not in self.stage_with or one.tensor in self.plan.regather:
            return parts or self.parts_of[one.op]
        stage = self.stage_with[one.tensor]
        return frozenset((min((part for part in parts if part % pipelining.stages == stage), default=stage),))

    @cached_property
    def readers(self) -> Mapping[Version, frozenset[int]]:
        """Return the parts of a pipeline that read each version."""
        found: dict[Version, frozenset[int]] = {}
        for op, reshards in self.reshard_plan.ops.items():
            for version in filter(None, reshards.operands):
                found[version] = found.get(version, frozenset()) | self.parts_of[op]
        return found

    @cached_property
    def crossing(self) -> tuple[tuple[str, int, frozenset[int]], ...]:
        """Return the values that later parts of a pipeline read: name, the part that makes it, parts that read it."""
        pipelining = self.plan.assignment.pipelining
        parts = {} if pipelining is None else pipelining.parts
        makers = {name: parts[node.name] for node in self.graph.nodes if node.name in parts for name in node.outputs}
        readers: dict[str, set[int]] = {}
        for node in self.graph.nodes:
            for name in node.operands:
                if name is not None and name in makers and parts.get(node.name, -1) > makers[name]:
                    readers.setdefault(name, set()).add(parts[node.name])
        return tuple((name, makers[name], frozenset(found)) for name, found in readers.items())

    def at(self, stage: int) -> LoweredStep:
        """Return the step as a stage of a pipeline sees it."""
        found = replace(self, stage=stage)
        saved = "layers", "recomputed", "reading", "offloaded", "moved_inputs", "saved_roots", "footprints"
        for name in ("reshard_plan", "buckets", "schedule", "resharded", *saved, *IN_PARTS):
            found.__dict__[name] = getattr(self, name)
        return found

    def recomputing(self, modes: Mapping[str, Recompute]) -> LoweredStep:
        """Return the step with layers in other recompute modes; reshards, buckets and stages are the same."""
        found = replace(self, plan=self.plan.with_recompute(modes))
        for name in ("reshard_plan", "buckets", "resharded", *IN_PARTS):
            found.__dict__[name] = getattr(self, name)
        return found

    def local_bytes(self, name: str) -> float:
        """Return the bytes of a value of one micro-batch on a rank, as its readers find it."""
        return float(local_bytes(self.graph, name, self.plan.assignment.values[name], self.plan.axes))

    @cached_property
    def nodes_of_stages(self) -> tuple[tuple[NamedNode, ...], ...]:
        """Return the ops that each stage runs, in order."""
        pipelining = self.plan.assignment.pipelining
        found: list[list[NamedNode]] = [[] for _ in range(1 if pipelining is None else pipelining.stages)]
        for node in self.graph.nodes:
            for stage in {part % len(found) for part in self.parts_of[node.name]}:
                found[stage].append(node)
        return tuple(map(tuple, found))

    @cached_property
    def makers(self) -> Mapping[str, NamedNode]:
        """Return the op that makes each value, in the order of the ops."""
        return {name: node for node in self.graph.nodes for name in node.outputs if name is not None}

    @cached_property
    def resharded(self) -> Mapping[str, Sequence[tuple[str, InsertedReshard]]]:
        """Return the reshards of each tensor before ops, with these ops, in order."""
        found: dict[str, list[tuple[str, InsertedReshard]]] = {}
        for node in self.graph.nodes:
            for one in self.reshard_plan.ops[node.name].before:
                found.setdefault(one.tensor, []).append((node.name, one))
        return found

    @cached_property
    def ops_here(self) -> frozenset[str]:
        """Return the ops that the stage runs."""
        nodes = self.graph.nodes if self.stage is None else self.nodes_of_stages[self.stage]
        return frozenset(node.name for node in nodes)

    @cached_property
    def nodes_here(self) -> tuple[NamedNode, ...]:
        """Return the ops that the stage runs, and those of other stages whose results it receives."""
        if self.stage is None:
            return self.graph.nodes
        received = {self.makers[name].name for name in self.tensors_here if name in self.makers} - self.ops_here
        if not received:
            return self.nodes_of_stages[self.stage]
        return tuple(node for node in self.graph.nodes if node.name in self.ops_here or node.name in received)

    @cached_property
    def tensors_here(self) -> frozenset[str]:
        """Return the tensors that the stage stores, makes or reads; each stage has all inputs."""
        pipelining = self.plan.assignment.pipelining
        held = {} if pipelining is None else pipelining.held
        nodes = self.graph.nodes if self.stage is None else self.nodes_of_stages[self.stage]
        read = {name for node in nodes for name in (*node.operands, *node.outputs) if name is not None}
        given = (name for name, tensor in self.graph.tensors.items() if tensor.kind not in ("param", "activation"))
        stored = (name for name, stage in held.items() if stage is None or stage == self.stage)
        elsewhere = {name for name, stage in self.stage_with.items() if stage != self.stage}
        return frozenset((*read, *given, *stored)) - elsewhere

    @cached_property
    def received(self) -> tuple[TiedValue, ...]:
        """Return the values that other stages send to this one before the micro-batches."""
        return tuple(one for one in self.tied if self.stage in one.targets)

    def has(self, version: Version) -> bool:
        """Return whether the stage has a version, in memory of its own."""
        name, sharding = version
        return (
            self.stage is None
            or name in self.tensors_here
            # A stage gathers a regathered parameter from the shard that it received.
            or (
                name in self.plan.regather
                and sharding != self.plan.assignment.stored[name]
                and any(one.version[0] == name for one in self.received)
            )
        )

    @cached_property
    def layers(self) -> Mapping[str, tuple[int, Recompute]]:
        """Return the layer and the recompute mode of each op in a layer with recompute."""
        return layered(self._regions)

    @cached_property
    def recomputed(self) -> frozenset[str]:
        """Return the ops that the backward recomputes."""
        return recomputed_ops(self.graph, self._regions)

    @cached_property
    def rerun_ends(self) -> RerunEnds:
        """Return the recomputed ops that the recompute of their layer does not reach."""
        found = rerun_ends(self.graph, self._regions, self.plan.options)
        # Products that put off gradients save their operands after they ran.
        return found._replace(idle=found.idle - (self.late_weights.keys() - found.beyond))

    @property
    def reduces_early(self) -> bool:
        """Return whether gradients that are sent once in a call are sent before the backward of the module."""
        is_half = any(tensor.dtype == torch.float16 for tensor in self.graph.parameters)
        return not is_half and self.plan.options.outputs not in ("local", "local_sum")

    @cached_property
    def offloaded(self) -> Mapping[str, int]:
        """Return the number of the layer of each op whose saved tensors go to the host."""
        return offloaded(self._regions) if self.graph.exported.grad_enabled else {}

    @cached_property
    def moved_inputs(self) -> Mapping[int, frozenset[str]]:
        """Return the values from outside that each offloaded layer may move."""
        return moved_inputs(self.graph, self._regions, self._saved)

    @cached_property
    def saved_roots(self) -> Mapping[str, str]:
        """Return the value whose storage each value shares."""
        return self._saved.roots

    @cached_property
    def _saved(self) -> SavedValues:
        return SavedValues.of(self.graph)

    @cached_property
    def footprints(self) -> dict[Any, Footprint]:
        """Return the footprints of ops on one rank that are known by now."""
        return {}

    @cached_property
    def tasks(self) -> StageOrders:
        """Return the tasks of each stage of a pipeline, in order."""
        one = self.plan.assignment.pipelining
        assert one is not None, "a pipeline has stages"
        return orders(one.stages, self.plan.options.micro_batches, one.schedule, one.chunks, one.more, halves=True)

    @cached_property
    def late_weights(self) -> Mapping[str, tuple[str, ...]]:
        """Return the products that put off the gradients of their weights, with the operands of these."""
        found, precision = late_weights(self.graph, self.plan.assignment), self.plan.options.precision
        # Linears in float8 compute both gradients at once.
        at_once = {node.name for node in self.graph.nodes if in_float8(node, self.graph.tensors, precision)}
        return {name: operands for name, operands in found.items() if name not in at_once}

    @cached_property
    def reading(self) -> frozenset[str]:
        """Return the recomputed ops whose operands are kept for it."""
        return reading(self.graph, self.layers if self.recomputed else {}, self.recomputed)

    @cached_property
    def schedule(self) -> BucketSchedule:
        """Return the ops at which the step gathers and regathers its buckets."""
        return bucket_schedule(self)

    @cached_property
    def _regions(self) -> tuple[RecomputeRegion, ...]:
        return recompute_regions(self.graph, self.plan.recompute)


def lower_step(graph: NamedGraph, plan: StepPlan) -> LoweredStep:
    """Return the lowering of a plan; of one with micro-batches, the lowering of one of them."""
    graph = marked_for(graph, plan.axes)
    if plan.micro is None:
        return LoweredStep(graph, plan)
    sliced = slice_in_time(graph, plan.micro)
    options = replace(plan.options, micro_batches=plan.micro.count)
    whole = StepPlan(sliced.fingerprint, gathered_once(plan.assignment), options)
    return LoweredStep(sliced, whole, graph, half=slice_of_half(graph, plan.micro))


@dataclass(frozen=True)
class BucketSchedule:
    """Ops at which buckets of parameters are gathered and regathered; keys are ops where not stated otherwise."""

    # Buckets that the op is the first to use.
    of_op: Mapping[str, Sequence[Bucket]]
    # Buckets whose gather starts with the op: each one bucket ahead of its use.
    ahead: Mapping[str, Sequence[Bucket]]
    # Parameters in the shardings that the buckets produce.
    versions: frozenset[Version]
    # The layer that regathers a bucket itself as part of its recompute, by bucket.
    inside: Mapping[Bucket, int]
    # Regathered buckets that the backward of the op is the first to read.
    regathered: Mapping[str, Sequence[Bucket]]
    # The bucket that is regathered next, by bucket.
    next_regathered: Mapping[Bucket, Bucket]


def bucket_schedule(step: LoweredStep) -> BucketSchedule:
    """Return the ops at which a step gathers and regathers its buckets."""
    buckets, plan, reshard_plan = step.buckets, step.plan, step.reshard_plan
    layers = {op: layer for op, (layer, _) in step.layers.items()} if step.recomputed else {}
    readers: dict[Version, list[str]] = {}
    for op, reshards in reshard_plan.ops.items() if plan.regather else ():
        for version in reshards.operands:
            if version is not None:
                readers.setdefault(version, []).append(op)
    inside = {bucket: layer for bucket in buckets if (layer := _only_reader(bucket, plan, readers, layers))}
    of_op: dict[str, list[Bucket]] = {}
    ahead: dict[str, list[Bucket]] = {}
    previous: Bucket | None = None
    for bucket in buckets:
        of_op.setdefault(bucket.op, []).append(bucket)
        if bucket.gathers and len(bucket.members) > 1 and bucket not in inside:
            ahead.setdefault((previous or bucket).op, []).append(bucket)
            previous = bucket
    in_order = [bucket for found in of_op.values() for bucket in found]
    regathered, next_regathered = _regathers(in_order, plan, reshard_plan, inside)
    versions = frozenset((one.tensor, one.target) for bucket in buckets for one in bucket.members)
    return BucketSchedule(of_op, ahead, versions, inside, regathered, next_regathered)


def _only_reader(
    bucket: Bucket, plan: StepPlan, readers: Mapping[Version, Sequence[str]], layers: Mapping[str, int]
) -> int:
    """Return the recomputed layer that alone reads the regathered parameters of a bucket; 0 if there is none."""
    if not bucket.gathers or bucket.members[0].tensor not in plan.regather:
        return 0
    produced = ((one.tensor, one.target) for one in bucket.members)
    found = {layers.get(op, 0) for version in produced for op in readers.get(version, ())}
    return found.pop() if len(found) == 1 else 0


def _regathers(
    buckets: Sequence[Bucket], plan: StepPlan, reshard_plan: ReshardPlan, inside: Mapping[Bucket, int]
) -> tuple[dict[str, list[Bucket]], dict[Bucket, Bucket]]:
    """Return the buckets that each op's backward reads first, and the next regathered bucket of each bucket."""
    # The backward runs in reverse, so the last reader of the forward is the first of the backward.
    last = {version: op for op, reshards in reshard_plan.ops.items() for version in reshards.operands if version}
    place = {name: i for i, name in enumerate(reshard_plan.ops)}
    first_read: dict[str, list[Bucket]] = {}
    following: dict[Bucket, Bucket] = {}
    previous: Bucket | None = None
    for bucket in buckets:
        if bucket.gathers and bucket.members[0].tensor in plan.regather and bucket not in inside:
            readers = [last.get((one.tensor, one.target), one.op) for one in bucket.members]
            first_read.setdefault(max(readers, key=place.__getitem__), []).append(bucket)
            if previous is not None:
                following[bucket] = previous
            previous = bucket
    return first_read, following
