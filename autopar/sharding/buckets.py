"""Buckets: reshards of parameters that run as one collective.

Gathers and reductions of many small parameters cost mostly their launches. Each bucket joins reshards of equal steps.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil, prod
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedTensor
from autopar.sharding.assignment import StepPlan
from autopar.sharding.reshard.reshard import Step, StepKind, goes_in_bucket
from autopar.sharding.reshard_insertion import InsertedReshard, ReshardPlan, gathered_in_float8
from autopar.sharding.sharding import Sharding

# Bytes of a full bucket: the default of DistributedDataParallel, at which launching a collective costs little. A block
# is gathered in equal parts, none of which is smaller.
BUCKET_BYTES = 25 * 2**20
# Bytes of the bucket that the forward uses first: no backward is left to overlap its gradients, which come last.
SMALL_BYTES = 2**20
# Bytes below which splitting a bucket costs more launch time than an earlier start saves.
LEAST_BYTES = 4 * 2**20
# Most bytes of a parameter that fills no bucket: alone it costs a launch, and next to nothing beside others.
TINY_BYTES = 64 * 2**10
# Least number of buckets of one kind, so that most gradients overlap the backward.
BUCKETS = 4


class BucketedReshards(Protocol):
    """Reshard of a parameter, as far as its bucket depends on it; `kind` holds the steps of both directions."""

    @property
    def kind(self) -> tuple[Any, ...]: ...
    @property
    def block(self) -> str: ...
    @property
    def bytes(self) -> int: ...


Member = TypeVar("Member", bound=BucketedReshards)


@dataclass(frozen=True)
class Bucket:
    """Reshards of parameters that run as one, before the first op that reads one of them."""

    members: tuple[InsertedReshard, ...]
    op: str
    # A single reshard that stays with its op, and is repeated where the op is recomputed.
    is_alone: bool = False

    @property
    def gathers(self) -> bool:
        return any(step.kind is StepKind.ALL_GATHER for step in self.members[0].reshard.forward)

    @property
    def is_sum(self) -> bool:
        """Return whether the backward only all-reduces, in one lasting buffer."""
        return all(
            one.differentiable and [step.kind for step in one.reshard.backward] == [StepKind.ALL_REDUCE]
            for one in self.members
        )

    @property
    def sum_bytes(self) -> int:
        """Return the bytes that the backward sums together."""
        return sum(one.bytes_of(step) for one in self.members for step in one.reshard.backward)


@dataclass(frozen=True)
class _Member:
    """Reshard with the keys by which the generated graph groups it."""

    inserted: InsertedReshard
    kind: tuple[Any, ...]
    block: str
    bytes: int


def buckets_of(graph: NamedGraph, plan: StepPlan, reshard_plan: ReshardPlan) -> tuple[Bucket, ...]:
    """Return the buckets of the generated graph, in the order of their first uses.

    A reshard that cannot be joined with others is a bucket by itself.
    """
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
            size = max(prod(shape_of(one, step.before)) for way in ways_of(one) for step in way) * one.itemsize
            handled = tuple(tensor.name in names for names in (plan.keep_gathered, plan.defer_reduction, plan.regather))
            narrow = tensor.name in gathered_in_float8(graph, plan.options.precision)
            # One flat buffer has one dtype, runs the same steps, and is freed and reduced at once.
            kind = steps, tensor.dtype, handled, narrow, tensor.requires_grad, tensor.frozen
            members.append(_Member(one, kind, block_of(tensor.name), round(size)))
    limits = gather_limits(graph.parameters)
    grouped = (tuple(member.inserted for member in group) for group in in_buckets(members, limits))
    place = {name: i for i, name in enumerate(reshard_plan.ops)}
    found = (*alone, *(Bucket(group, group[0].op) for group in grouped))
    return tuple(sorted(found, key=lambda bucket: place[bucket.op]))


def ways_of(one: InsertedReshard) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """Return the steps forward and backward; none backward where there is no gradient."""
    return one.reshard.forward, one.reshard.backward if one.differentiable else ()


def shape_of(one: InsertedReshard, sharding: Sharding) -> tuple[int, ...]:
    """Return the sizes of the local atoms on the rank with the largest shard."""
    return sharding.largest_sizes(one.reshard.atoms, one.reshard.axes)


def buffers_of(step: Step, one: InsertedReshard) -> float:
    """Return the bytes that a step allocates beside the tensors before and after it."""
    if step.local or step.kind is StepKind.ALL_REDUCE:
        return 0.0
    before, after = (prod(shape_of(one, end)) * one.itemsize for end in (step.before, step.after))
    if step.kind is StepKind.ALL_TO_ALL:
        return float(before + after)
    return copied(step, one) if step.kind is StepKind.REDUCE_SCATTER else copied(step, one) and float(after)


def copied(step: Step, one: InsertedReshard) -> float:
    """Return the bytes that a step copies to make its pieces contiguous."""
    if step.atom is None or step.kind is StepKind.ALL_REDUCE:
        return 0.0
    leading = shape_of(one, step.before)[: step.atom]
    return 0.0 if all(size == 1 for size in leading) else float(prod(shape_of(one, step.before)) * one.itemsize)


def block_of(name: str) -> str:
    """Return the repeated layer of a parameter, `layers.3` of `layers.3.linear.weight`: it is used as one."""
    found = re.match(r"(.*?\.\d+)\.", name)
    return found[1] if found else ""


def gather_limits(parameters: Iterable[NamedTensor], limit_bytes: int = BUCKET_BYTES) -> dict[str, int]:
    """Return the bytes of a full bucket of gathers of each block."""
    total: Counter[str] = Counter()
    for one in parameters:
        total[block_of(one.name)] += prod(one.shape) * one.dtype.itemsize
    return {block: gather_limit(size, limit_bytes) for block, size in total.items()}


def gather_limit(block_bytes: float, limit_bytes: int = BUCKET_BYTES) -> int:
    """Return the bytes of one of as many equal parts of a block as there are full buckets in it."""
    return max(limit_bytes, ceil(block_bytes / max(1, block_bytes // max(1, limit_bytes))))


def in_buckets(
    found: Iterable[Member], gathers: Mapping[str, int] = MappingProxyType({}), limit_bytes: int = BUCKET_BYTES
) -> Iterator[list[Member]]:
    """Yield buckets of reshards of one kind, in the order of their first use.

    `gathers` has the bytes of a full bucket of gathers, by block; `limit_bytes` are those of all others.
    Tiny reshards fill no bucket but one of their own, so that none of them is left alone between large ones.
    """
    found = list(found)
    sizes: dict[tuple[Any, ...], int] = {}
    for one in found:
        sizes[_key(one)] = sizes.get(_key(one), 0) + one.bytes
    # The limits of a kind: bytes of its first bucket, then of the others.
    small = min(SMALL_BYTES, limit_bytes)
    limits = {
        key: [small, min(limit_bytes, max(LEAST_BYTES, size // BUCKETS))]
        if key[1] is None
        else [gathers.get(key[1], limit_bytes)]
        for key, size in sizes.items()
    }
    open_buckets: dict[tuple[Any, ...], list[Member]] = {}
    for one in found:
        key = _key(one)
        members = open_buckets.setdefault(key, [])
        limit = limits[key][0]
        tiny = min(TINY_BYTES, limit // 16)
        alike = [member.bytes for member in members if (member.bytes <= tiny) == (one.bytes <= tiny)]
        if alike and sum(alike) + one.bytes > limit:
            yield list(members)
            members.clear()
            limits[key] = limits[key][1:] or limits[key]  # the first bucket alone may have a limit of its own
        members.append(one)
    yield from (members for members in open_buckets.values() if members)


def _key(one: BucketedReshards) -> tuple[Any, str | None]:
    # Gathers are not joined over blocks of layers: a copy that is gathered early takes memory for longer.
    gathers = any(step[0] is StepKind.ALL_GATHER for step in one.kind[0][0])
    return one.kind, one.block if gathers else None
