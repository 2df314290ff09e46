"""A plan as the generated graph runs it: reshards, buckets of parameters and the gathers of each, recomputed ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.ir.graph import NamedGraph
from autopar.sharding.assignment import StepPlan
from autopar.sharding.buckets import Bucket, buckets_of
from autopar.sharding.options import Recompute
from autopar.sharding.recompute import RecomputeRegion, layered, recompute_regions, recomputed_ops
from autopar.sharding.reshard_insertion import ReshardPlan, insert_reshards
from autopar.sharding.sharding import Sharding

# A value in one of its shardings.
Version = tuple[str, Sharding]


@dataclass(frozen=True, eq=False)
class LoweredStep:
    """Lowering of a plan; every part is computed once and serves the time and the memory of the step."""

    graph: NamedGraph
    plan: StepPlan

    @cached_property
    def reshard_plan(self) -> ReshardPlan:
        return insert_reshards(
            self.graph, self.plan.assignment, self.plan.options.outputs, self.plan.options.local_inputs
        )

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        return buckets_of(self.graph, self.plan, self.reshard_plan)

    @cached_property
    def layers(self) -> Mapping[str, tuple[int, Recompute]]:
        """Return the layer and the recompute mode of each op in a layer with recompute."""
        return layered(self._regions)

    @cached_property
    def recomputed(self) -> frozenset[str]:
        """Return the ops that the backward recomputes."""
        return recomputed_ops(self.graph, self._regions)

    @cached_property
    def _regions(self) -> tuple[RecomputeRegion, ...]:
        return recompute_regions(self.graph, self.plan.recompute)


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
