"""What lives at a moment of a step, and what everything that happens then does with it."""

from __future__ import annotations

from math import prod

from autopar.cost.compute.op_time import local_bytes
from autopar.cost.memory.last_uses import Version, last_uses
from autopar.cost.memory.local_op_memory import LocalFootprints
from autopar.cost.memory.storages import Storages
from autopar.cost.step.bucket_schedule import schedule_of
from autopar.cost.step.lowered_step import LoweredStep
from autopar.ir.values import NamedNode
from autopar.sharding.buckets import Bucket, buffers_of, shape_of
from autopar.sharding.recompute import reading
from autopar.sharding.reshard.reshard import Step
from autopar.sharding.reshard_insertion import InsertedReshard

__all__ = ["LiveState"]


class LiveState:
    """One micro-batch."""

    def __init__(self, wired: LoweredStep) -> None:
        self.graph, self.plan, self.reshard_plan = wired.graph, wired.plan, wired.reshard_plan
        self.axes = self.plan.axes
        self.again = wired.again
        self.later = self.plan.micro_batches > 1 or self.plan.gradient_dtype is not None
        """Whether gradients are added to what other micro-batches, or another dtype, have made room for."""
        self.local = LocalFootprints(wired)
        self.last = last_uses(self.graph, self.reshard_plan)
        self.ends: dict[float, list[Version]] = {}
        """By the place of an op: what it is the last to use."""
        for version, place in self.last.items():
            self.ends.setdefault(place, []).append(version)
        self.layers = wired.layers if wired.again else {}
        self.whole = {layer for layer, mode in self.layers.values() if mode == "full"}
        """These are called through a checkpoint, which holds what enters until the backward has left."""
        self.reading = reading(self.graph, self.layers, self.again)
        """Ops that are computed again and whose operands must be there for it."""
        self.schedule = schedule_of(wired)
        self.sizes: dict[Version, float] = {}
        self.storages = Storages()
        self.values: dict[Version, int] = {}
        self.gradients: dict[Version, int] = {}
        self.given: dict[Version, int] = {}
        """Inputs, parameters and buffers."""
        self.copied: dict[str, int] = {}
        """Copies of parameters that live for the whole step."""
        self.sums: dict[str, int] = {}
        """The parts of the buffers in which gradients are added up."""
        self.flat: dict[Bucket, int] = {}
        """The buffers of buckets that have been begun."""
        self.kept: dict[str, list[int]] = {}
        self.lost: dict[int, list[tuple[str, int]]] = {}
        """By layer: what each of its ops would keep and what is made again."""
        self.entering: dict[int, set[int]] = {}
        self.made: dict[int, set[int]] = {}
        """By layer: what enters it from outside; what its ops that are computed again have made."""
        self.gathered: dict[int, dict[int, float]] = {}
        """By layer: parameters that it gathers again itself, and what the buffer for each takes."""

    def _bytes(self, version: Version) -> float:
        found = self.sizes.get(version)
        if found is None:
            found = self.sizes[version] = float(local_bytes(self.graph, *version, self.axes))
        return found

    def _trains(self, node: NamedNode) -> bool:
        made = any(name is not None and self.graph.tensors[name].requires_grad for name in node.outputs)
        return made and self.graph.exported.grad_enabled

    def _layer(self, node: NamedNode) -> int:
        return self.layers.get(node.name, (0, "none"))[0]

    def _waits(self, name: str) -> bool:
        """Whether a gradient is only added up: it is reduced in the last micro-batch."""
        return self.plan.micro_batches > 1 and name in self.plan.accumulated

    def _steps(self, held: int, steps: tuple[Step, ...], one: InsertedReshard) -> int:
        """What comes out of some steps; the caller keeps what went in."""
        now = self.storages.take(held)
        for step in steps:
            after = self.storages.new(prod(shape_of(one, step.after)) * one.itemsize)
            self.storages.touch(buffers_of(step, one))
            self.storages.drop(now)
            now = after
        return now

    def _start(self, bucket: Bucket) -> int:
        held = sum(self._bytes((one.tensor, one.reshard.source)) for one in bucket.members)
        flat = self.storages.new(sum(self._bytes((one.tensor, one.reshard.target)) for one in bucket.members))
        self.storages.touch(held)
        return flat
