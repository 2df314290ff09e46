"""The conversions of parameters, as they are done together."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import Any

from autopar.ir.graph import NamedGraph
from autopar.lowering.passes.bucket_parameters import goes_in_bucket, in_buckets
from autopar.sharding.assignment import Plan
from autopar.sharding.reshard.reshard import Step, StepKind
from autopar.sharding.reshard_insertion import Inserted, Wiring

__all__ = ["Bucket", "buckets_of", "buffers_of", "copied", "shape_of", "ways_of"]


@dataclass(frozen=True)
class Bucket:
    """Conversions of parameters that are done as one, before the first op that wants one of them."""

    members: tuple[Inserted, ...]
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

    inserted: Inserted
    kind: tuple[Any, ...]
    block: str
    bytes: int


def buckets_of(graph: NamedGraph, plan: Plan, wiring: Wiring) -> tuple[Bucket, ...]:
    """The buckets of the generated graph, in the order of their first uses; what it leaves alone is one by itself."""
    alone: list[Bucket] = []
    members: list[_Member] = []
    for op in wiring.ops.values():
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
            handled = tuple(tensor.name in names for names in (plan.resident, plan.accumulated, plan.regather))
            kind = steps, tensor.dtype, handled, tensor.requires_grad
            members.append(_Member(one, kind, block[1] if block else "", size))
    grouped = (tuple(member.inserted for member in group) for group in in_buckets(members))
    place = {name: i for i, name in enumerate(wiring.ops)}
    found = (*alone, *(Bucket(group, group[0].op) for group in grouped))
    return tuple(sorted(found, key=lambda bucket: place[bucket.op]))


def ways_of(one: Inserted) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """The steps forward and backward; none backward where there is no gradient."""
    return one.reshard.forward, one.reshard.backward if one.differentiable else ()


def shape_of(one: Inserted, layout: Any) -> tuple[int, ...]:
    """The local atoms of the rank with the largest shard."""
    sizes: tuple[int, ...] = layout.largest_sizes(one.reshard.atoms, dict(one.reshard.axes))
    return sizes


def buffers_of(step: Step, one: Inserted) -> float:
    """What a step holds beside the tensors before and after it."""
    if step.local or step.kind is StepKind.ALL_REDUCE:
        return 0.0
    before, after = (prod(shape_of(one, layout)) * one.itemsize for layout in (step.before, step.after))
    if step.kind is StepKind.ALL_TO_ALL:
        return float(before + after)
    return copied(step, one) if step.kind is StepKind.REDUCE_SCATTER else copied(step, one) and float(after)


def copied(step: Step, one: Inserted) -> float:
    """The copy that is made where pieces do not lie in memory one after the other."""
    if step.atom is None or step.kind is StepKind.ALL_REDUCE:
        return 0.0
    leading = shape_of(one, step.before)[: step.atom]
    return 0.0 if all(size == 1 for size in leading) else float(prod(shape_of(one, step.before)) * one.itemsize)
