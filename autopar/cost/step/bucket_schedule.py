"""When parameters are gathered in buckets, and gathered again: before which op each bucket is begun and taken out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.cost.memory.last_uses import Version
from autopar.cost.step.lowered_step import LoweredStep
from autopar.sharding.assignment import StepPlan
from autopar.sharding.buckets import Bucket
from autopar.sharding.reshard_insertion import ReshardPlan

__all__ = ["BucketSchedule", "schedule_of"]


@dataclass(frozen=True)
class BucketSchedule:
    """By op, unless it says otherwise."""

    of_op: Mapping[str, Sequence[Bucket]]
    """What it is the first to want."""
    ahead: Mapping[str, Sequence[Bucket]]
    """What begins to be gathered when it runs: one bucket ahead."""
    versions: frozenset[Version]
    """Parameters as they come out of all buckets."""
    inside: Mapping[Bucket, int]
    """The layer that gathers a bucket again itself when it is computed again."""
    again: Mapping[str, Sequence[Bucket]]
    """What its backward is the first to read of what is gathered again."""
    next_again: Mapping[Bucket, Bucket]
    """By bucket: the one that is gathered again after it."""


def schedule_of(wired: LoweredStep) -> BucketSchedule:
    buckets, plan, reshard_plan = wired.buckets, wired.plan, wired.reshard_plan
    layers = {op: layer for op, (layer, _) in wired.layers.items()} if wired.again else {}
    readers = _readers(reshard_plan) if plan.regather else {}
    inside = {bucket: layer for bucket in buckets if (layer := _only_reader(bucket, plan, readers, layers))}
    of_op: dict[str, list[Bucket]] = {}
    ahead: dict[str, list[Bucket]] = {}
    previous: Bucket | None = None
    for bucket in buckets:
        of_op.setdefault(bucket.op, []).append(bucket)
        if bucket.gathers and len(bucket.members) > 1 and bucket not in inside:
            ahead.setdefault((previous or bucket).op, []).append(bucket)
            previous = bucket
    again, next_again = _again([bucket for found in of_op.values() for bucket in found], plan, reshard_plan, inside)
    versions = frozenset((one.tensor, one.reshard.target) for bucket in buckets for one in bucket.members)
    return BucketSchedule(of_op, ahead, versions, inside, again, next_again)


def _readers(reshard_plan: ReshardPlan) -> dict[Version, list[str]]:
    """By what they take: the ops."""
    found: dict[Version, list[str]] = {}
    for op, wired in reshard_plan.ops.items():
        for version in wired.operands:
            if version is not None:
                found.setdefault(version, []).append(op)
    return found


def _only_reader(
    bucket: Bucket, plan: StepPlan, readers: Mapping[Version, Sequence[str]], layers: Mapping[str, int]
) -> int:
    """The layer that is computed again and is the only one to read parameters that are gathered again."""
    if not bucket.gathers or bucket.members[0].tensor not in plan.regather:
        return 0
    made = ((one.tensor, one.reshard.target) for one in bucket.members)
    found = {layers.get(op, 0) for version in made for op in readers.get(version, ())}
    return found.pop() if len(found) == 1 else 0


def _again(
    buckets: Sequence[Bucket], plan: StepPlan, reshard_plan: ReshardPlan, inside: Mapping[Bucket, int]
) -> tuple[dict[str, list[Bucket]], dict[Bucket, Bucket]]:
    """By op: the buckets that its backward is the first to read; by bucket: the one that comes next in it."""
    last = {version: op for op, wired in reshard_plan.ops.items() for version in wired.operands if version}
    place = {name: i for i, name in enumerate(reshard_plan.ops)}
    first_read: dict[str, list[Bucket]] = {}
    following: dict[Bucket, Bucket] = {}
    previous: Bucket | None = None
    for bucket in buckets:
        if bucket.gathers and bucket.members[0].tensor in plan.regather and bucket not in inside:
            readers = [last.get((one.tensor, one.reshard.target), one.op) for one in bucket.members]
            first_read.setdefault(max(readers, key=place.__getitem__), []).append(bucket)
            if previous is not None:
                following[bucket] = previous
            previous = bucket
    return first_read, following
