"""The conversions of parameters, as they are done together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, TypeVar

from autopar.ir.graph import NamedGraph
from autopar.sharding.assignment import StepPlan
from autopar.sharding.reshard.reshard import LOCAL, Step, StepKind
from autopar.sharding.reshard_insertion import InsertedReshard, ReshardPlan

BUCKET_BYTES = 25 * 2**20
"""What DistributedDataParallel has as its default: large enough that starting a collective costs little of it."""


SMALL_BYTES = 2**20
"""Of the bucket that the forward uses first, whose gradients come last: nothing is left to send it beside."""


LEAST_BYTES = 4 * 2**20
"""Others are not cut smaller: starting a collective then costs more than sending it earlier saves."""


BUCKETS = 4
"""In so many buckets at least, if they are not small, so that most gradients are sent beside the backward."""


_BUCKETED = frozenset((StepKind.ALL_REDUCE, StepKind.ALL_GATHER, StepKind.REDUCE_SCATTER))


class BucketedReshards(Protocol):
    """A parameter's conversion, as far as its bucket depends on it."""

    @property
    def kind(self) -> tuple[Any, ...]: ...
    @property
    def block(self) -> str: ...
    @property
    def bytes(self) -> int: ...


Member = TypeVar("Member", bound=BucketedReshards)


@dataclass(frozen=True)
class Bucket:
    """Conversions of parameters that are done as one, before the first op that wants one of them."""

    members: tuple[InsertedReshard, ...]
    op: str
    is_alone: bool = False
    """Whether it is no bucket: a conversion that stands with its op, and is done again with it."""

    @property
    def gathers(self) -> bool:
        return any(step.kind is StepKind.ALL_GATHER for step in self.members[0].reshard.forward)

    @property
    def is_sum(self) -> bool:
        """Whether gradients are only added up: in a buffer that stays, of which the gradients are views."""
        return all(
            one.differentiable and [step.kind for step in one.reshard.backward] == [StepKind.ALL_REDUCE]
            for one in self.members
        )


@dataclass(frozen=True)
class _Member:
    """A conversion as the generated graph groups them."""

    inserted: InsertedReshard
    kind: tuple[Any, ...]
    block: str
    bytes: int


def buckets_of(graph: NamedGraph, plan: StepPlan, reshard_plan: ReshardPlan) -> tuple[Bucket, ...]:
    """The buckets of the generated graph, in the order of their first uses; what it leaves alone is one by itself."""
    alone: list[Bucket] = []
    members: list[_Member] = []
    for op in reshard_plan.ops.values():
        for one in op.before:
            tensor = graph.tensors[one.tensor]
            if tensor.kind != "param" or not one.ways:
                continue
            steps = tuple(tuple((step.kind, step.axes) for step in way) for way in ways_of(one))
            if not goes_in_bucket(*(tuple(kind for kind, _ in way) for way in steps)):
                alone.append(Bucket((one,), one.op, is_alone=True))
                continue
            block = re.match(r"(.*?\.\d+)\.", tensor.name)
            size = max(prod(shape_of(one, step.before)) for way in ways_of(one) for step in way) * one.itemsize
            handled = tuple(tensor.name in names for names in (plan.keep_gathered, plan.defer_reduction, plan.regather))
            kind = steps, tensor.dtype, handled, tensor.requires_grad
            members.append(_Member(one, kind, block[1] if block else "", size))
    grouped = (tuple(member.inserted for member in group) for group in in_buckets(members))
    place = {name: i for i, name in enumerate(reshard_plan.ops)}
    found = (*alone, *(Bucket(group, group[0].op) for group in grouped))
    return tuple(sorted(found, key=lambda bucket: place[bucket.op]))


def ways_of(one: InsertedReshard) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """The steps forward and backward; none backward where there is no gradient."""
    return one.reshard.forward, one.reshard.backward if one.differentiable else ()


def shape_of(one: InsertedReshard, layout: Any) -> tuple[int, ...]:
    """The local atoms of the rank with the largest shard."""
    sizes: tuple[int, ...] = layout.largest_sizes(one.reshard.atoms, one.reshard.axes)
    return sizes


def buffers_of(step: Step, one: InsertedReshard) -> float:
    """What a step holds beside the tensors before and after it."""
    if step.local or step.kind is StepKind.ALL_REDUCE:
        return 0.0
    before, after = (prod(shape_of(one, layout)) * one.itemsize for layout in (step.before, step.after))
    if step.kind is StepKind.ALL_TO_ALL:
        return float(before + after)
    return copied(step, one) if step.kind is StepKind.REDUCE_SCATTER else copied(step, one) and float(after)


def copied(step: Step, one: InsertedReshard) -> float:
    """The copy that is made where pieces do not lie in memory one after the other."""
    if step.atom is None or step.kind is StepKind.ALL_REDUCE:
        return 0.0
    leading = shape_of(one, step.before)[: step.atom]
    return 0.0 if all(size == 1 for size in leading) else float(prod(shape_of(one, step.before)) * one.itemsize)


def goes_in_bucket(forward: tuple[StepKind, ...], backward: tuple[StepKind, ...]) -> bool:
    """Whether a conversion of such steps can be done together with others: each way is sent, or done by each rank."""
    ways = [kinds for kinds in (forward, backward) if not LOCAL.issuperset(kinds)]
    return bool(ways) and all(_BUCKETED.issuperset(kinds) for kinds in ways)


def in_buckets(found: Iterable[Member], limit_bytes: int = BUCKET_BYTES) -> Iterator[list[Member]]:
    """Of one kind, in the order of first use, of one block of layers; small blocks that follow each other together.

    Gathers are not joined over blocks: what is gathered early takes memory for longer.
    """
    found = list(found)
    sizes: dict[tuple[Any, ...], int] = {}
    for one in found:
        sizes[_key(one)] = sizes.get(_key(one), 0) + one.bytes
    limits = {key: _limits(key[1] is None, size, limit_bytes) for key, size in sizes.items()}
    open_buckets: dict[tuple[Any, ...], list[Member]] = {}
    for one in found:
        key = _key(one)
        members = open_buckets.setdefault(key, [])
        if members and sum(member.bytes for member in members) + one.bytes > limits[key][0]:
            yield list(members)
            members.clear()
            limits[key] = limits[key][1:] or limits[key]
        members.append(one)
    yield from (members for members in open_buckets.values() if members)


def _key(one: BucketedReshards) -> tuple[Any, str | None]:
    gathers = any(step[0] is StepKind.ALL_GATHER for step in one.kind[0][0])
    return one.kind, one.block if gathers else None


def _limits(reduces: bool, size: int, limit_bytes: int) -> list[int]:
    """How large the first bucket of a kind may be, and how large the others."""
    small = min(SMALL_BYTES, limit_bytes)
    return [small, min(limit_bytes, max(LEAST_BYTES, size // BUCKETS))] if reduces else [limit_bytes]
