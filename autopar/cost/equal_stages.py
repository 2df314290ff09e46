"""Stages of a pipeline that run equal ops on equal tensors: times and memory of one are those of all.

Two stages are equal if their ops are the same calls, in one order, in the same shardings, recompute modes, buckets and
reshards, and read and make tensors in the same places. Names do not matter: tensors, layers and buckets are numbered as
they come.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from autopar.cost.lowered_step import LoweredStep
from autopar.ir.values import NamedNode
from autopar.sharding.buckets import Bucket
from autopar.sharding.reshard_insertion import InsertedReshard

__all__ = ["equal_stages", "stage_key"]


def equal_stages(step: LoweredStep) -> tuple[int, ...]:
    """Return for each stage the first one that is equal to it."""
    pipelining = step.plan.assignment.pipelining
    assert pipelining is not None, "a pipeline has stages"
    firsts: dict[Hashable, int] = {}
    return tuple(firsts.setdefault(stage_key(step.at(stage)), stage) for stage in range(pipelining.stages))


def stage_key(step: LoweredStep) -> Hashable:
    """Return a key of what a stage does with one micro-batch; equal keys mean equal times and memory.

    A stage that sends or receives tied values, offloads tensors, or has results of the model is like no other one.
    """
    assert step.stage is not None, "a stage of a pipeline"
    results = {version[0] for version in step.reshard_plan.results if version is not None}
    results.update(one.tensor for one in step.reshard_plan.outputs)
    is_tied = bool(step.received) or any(one.source == step.stage for one in step.tied)
    if is_tied or not results.isdisjoint(step.tensors_here) or not step.ops_here.isdisjoint(step.offloaded):
        return step.stage
    return _StageKey(step).found()


class _StageKey:
    def __init__(self, step: LoweredStep) -> None:
        self.step, self.assignment = step, step.plan.assignment
        self.tensors: dict[str, int] = {}
        self.layers: dict[int, int] = {}
        self.buckets: dict[Bucket, int] = {}
        self.crossing = {name for name, _, _ in step.crossing}

    def found(self) -> Hashable:
        step = self.step
        ops = [self._op(node) for node in step.nodes_here]
        for tensor in step.graph.parameters:
            if tensor.name in step.tensors_here:
                self._tensor(tensor.name)
        following = step.schedule.next_regathered
        # Number those that come after the ones that are known.
        chain = [self._bucket(following[one]) for one in list(self.buckets) if one in following]
        buckets = [
            (one.is_alone, tuple(map(self._reshard, one.members)), self._layer(step.schedule.inside.get(one, 0)))
            for one in self.buckets
        ]
        return tuple(ops), tuple(chain), tuple(buckets), tuple(map(self._properties, self.tensors))

    def _tensor(self, name: str | None) -> int | None:
        return None if name is None else self.tensors.setdefault(name, len(self.tensors))

    def _layer(self, number: int) -> int:
        return self.layers.setdefault(number, len(self.layers)) if number else -1

    def _bucket(self, bucket: Bucket) -> int:
        return self.buckets.setdefault(bucket, len(self.buckets))

    def _reshard(self, one: InsertedReshard) -> Hashable:
        return self._tensor(one.tensor), one.source, one.target, one.itemsize, one.differentiable

    def _op(self, node: NamedNode) -> Hashable:
        step, name = self.step, node.name
        layer, mode = step.layers.get(name, (0, "none"))
        reshards = step.reshard_plan.ops[name]
        schedule = step.schedule
        return (
            name in step.ops_here,
            id(step.graph.footprints[node.node]),
            node.op,
            self.assignment.ops[name],
            (self._layer(layer), mode, name in step.recomputed, name in step.reading),
            tuple(map(self._tensor, step.late_weights.get(name, ()))),
            tuple(map(self._tensor, node.operands)),
            tuple(map(self._tensor, node.outputs)),
            tuple(tuple(map(self._reshard, each)) for each in (reshards.before, reshards.inside, reshards.after)),
            tuple(
                tuple(map(self._bucket, each.get(name, ())))
                for each in (schedule.of_op, schedule.ahead, schedule.regathered)
            ),
        )

    def _properties(self, name: str) -> Hashable:
        step, tensor = self.step, self.step.graph.tensors[name]
        elsewhere = [one for op, one in step.resharded.get(name, ()) if op not in step.ops_here]
        own: list[Any] = [tensor.kind, tensor.dtype, tensor.element_bytes, tensor.shape]
        own += [tensor.requires_grad, tensor.frozen, name in step.tensors_here, name in self.crossing]
        own += [self.assignment.values.get(name), self.assignment.stored.get(name)]
        own += [self.assignment.gather_policies.get(name)]
        return (*own, *((one.source, one.target) for one in elsewhere))
