"""The storages that live in a forward and a backward of the generated graph, op by op, on the rank that holds most.

A value lives until its last use, and on to the backward if some op keeps it; a view shares the storage that it is a
view of. Which operands an op keeps, what it holds in between and which gradients it passes on as they are has been seen
by running it (`autopar/ir/analysis/op_memory.py`). Conversions hold their buffers as
`autopar/lowering/collectives/local_steps.py` makes them.
"""

from __future__ import annotations

from autopar.cost.memory.forward import ForwardMemory
from autopar.cost.memory.last_uses import Version, results_of
from autopar.cost.step.lowered_step import LoweredStep
from autopar.ir.values import NamedNode
from autopar.sharding.buckets import Bucket, copied
from autopar.sharding.reshard_insertion import InsertedReshard, OpReshards

__all__ = ["StepMemory"]


class StepMemory(ForwardMemory):
    """A forward (`autopar/cost/memory/forward.py`) and the backward after it."""

    def __init__(self, wired: LoweredStep) -> None:
        super().__init__(wired)
        self.pending: dict[Version, list[int]] = {}
        """What an op has found, before it is added to the gradients that other uses have left."""
        self.refilled: dict[Bucket, int] = {}
        """What has been gathered again."""
        self.waiting: list[Bucket] = []
        """Those whose gradients are reduced when a checkpoint has been left."""

    def backward(self) -> None:
        if self.later:
            self._earlier_gradients()
        for version in results_of(self.graph, self.reshard_plan):
            self.gradients[version] = self.storages.new(self._bytes(version))
        for one in reversed(self.reshard_plan.outputs):
            self._convert_back(one)
        inside = 0
        for node in reversed(self.graph.nodes):
            layer = self._layer(node)
            if layer != inside:
                self._leave(inside)
            self.storages.now = f"the backward of {node.name}"
            if layer != inside:
                self._make_again(layer)
            inside = layer
            self._op_backward(node)
        self._leave(inside)

    def gradient_bytes(self) -> float:
        """What the gradients of parameters take once the backward is over."""
        names = {tensor.name for tensor in self.graph.parameters}
        return sum(self.storages.sizes[one] for (name, _), one in self.gradients.items() if name in names)

    def _op_backward(self, node: NamedNode) -> None:
        wired, footprint = self.reshard_plan.ops[node.name], self.local.of(node)
        for bucket in self.schedule.again.get(node.name, ()):
            self._refill(bucket)
        for one in reversed(wired.after):
            self._convert_back(one)
        op_assignment = self.plan.assignment.ops[node.name]
        outputs = [
            (name, layout)
            for name, layout in zip(node.outputs, op_assignment.produced, strict=True)
            if name is not None and layout is not None
        ]
        given = [self.gradients.pop(version) for version in outputs if version in self.gradients]
        if given and self._trains(node):
            self._op_gradients(node, wired, given)
            self.storages.touch(footprint.backward_bytes)
        for storage in given:
            self.storages.drop(storage)
        for storage in self.kept.pop(node.name, ()):
            self.storages.drop(storage)
        for version in dict.fromkeys(version for version in wired.operands if version is not None):
            self._add(version)
        for one in reversed(wired.before):
            if (one.tensor, one.reshard.target) not in self.schedule.versions:
                self._convert_back(one)
        for bucket in self.schedule.of_op.get(node.name, ()):
            if self._layer(node) in self.whole and bucket not in self.schedule.inside and not bucket.is_alone:
                self.waiting.append(bucket)
            else:
                self._reduce(bucket)

    def _op_gradients(self, node: NamedNode, wired: OpReshards, given: list[int]) -> None:
        """The gradients of the operands, beside those that are there; `_add` adds them up."""
        footprint = self.local.of(node)
        for i, version in enumerate(wired.operands):
            if version is None:
                continue
            if not self.graph.tensors[version[0]].requires_grad:
                continue
            passed = i in footprint.passes
            made = self.storages.take(given[0]) if passed else self.storages.new(self._bytes(version))
            self.pending.setdefault(version, []).append(made)

    def _add(self, version: Version) -> None:
        """Add what an op has found to the gradient that other uses have left."""
        for made in self.pending.pop(version, ()):
            self._accumulate(version, made)

    def _accumulate(self, version: Version, made: int) -> None:
        before = self.gradients.get(version)
        if before is None:
            self.gradients[version] = made
            return
        if not self.storages.alone(before):  # others read it: the sum is another tensor
            self.gradients[version] = self.storages.new(self.storages.sizes[before])
            self.storages.drop(before)
        self.storages.drop(made)

    def _convert_back(self, one: InsertedReshard) -> None:
        found = self.gradients.pop((one.tensor, one.reshard.target), None)
        if found is None:
            return
        made = self._steps(found, one.reshard.backward, one)
        self.storages.drop(found)
        self._accumulate((one.tensor, one.reshard.source), made)

    def _reduce(self, bucket: Bucket) -> None:
        """The gradients of parameters are laid into one buffer and reduced; what comes back are views of another."""
        if bucket in self.refilled:
            self.storages.drop(self.refilled.pop(bucket))
        members = [one for one in bucket.members if (one.tensor, one.reshard.target) in self.gradients]
        if not members or not members[0].reshard.backward or self._waits(members[0].tensor):
            for one in members:
                if self._waits(one.tensor):
                    self._accumulate(
                        (one.tensor, one.reshard.source), self.gradients.pop((one.tensor, one.reshard.target))
                    )
                else:
                    self._convert_back(one)
            return
        if bucket.is_sum and len(members) == len(bucket.members):
            self._sum(bucket)
            return
        given = [self.gradients.pop((one.tensor, one.reshard.target)) for one in members]
        whole = sum(self.storages.sizes[storage] for storage in given)
        prepared = sum(copied(one.reshard.backward[0], one) for one in members)
        flat = self.storages.new(whole)
        self.storages.touch(prepared)
        made = [self.storages.new(self._bytes((one.tensor, one.reshard.source))) for one in members]
        self.storages.drop(flat)
        for storage in given:
            self.storages.drop(storage)
        for one, storage in zip(members, made, strict=True):
            self._accumulate((one.tensor, one.reshard.source), storage)

    def _sum(self, bucket: Bucket) -> None:
        """Gradients are copied into the buffer, whose parts they are from then on."""
        for one in bucket.members:
            self.storages.drop(self.gradients.pop((one.tensor, one.reshard.target)))
            self._accumulate((one.tensor, one.reshard.source), self.storages.take(self.sums[one.tensor]))

    def _earlier_gradients(self) -> None:
        for tensor in self.graph.parameters:
            if tensor.requires_grad:
                stored = tensor.name, self.plan.assignment.stored[tensor.name]
                whole = tensor.name, self.plan.assignment.values[tensor.name]
                dtype = self.plan.gradient_dtype or self.plan.master_dtype or tensor.dtype
                size = self._bytes(whole if self._waits(tensor.name) else stored) / tensor.dtype.itemsize
                self.gradients[stored] = self.storages.new(size * dtype.itemsize)

    def _make_again(self, layer: int) -> None:
        """What the ops of a layer keep, made once more; each holds it until its backward."""
        lost = self.lost.pop(layer, [])
        made: dict[int, int] = {}
        gathered = self.gathered.pop(layer, {})
        for one in dict.fromkeys(one for _, one in lost if one in gathered):  # first, through a buffer
            made[one] = self.storages.new(self.storages.sizes[one])
        self.storages.touch(sum(gathered.values()))
        for op, one in lost:
            if one not in made:
                made[one] = self.storages.new(self.storages.sizes[one])
            self.kept.setdefault(op, []).append(self.storages.take(made[one]))
        if layer and layer not in self.whole:
            self._left(layer)
        for one in made.values():
            self.storages.drop(one)

    def _leave(self, layer: int) -> None:
        """What entered is let go of; then the gradients of what was gathered outside are reduced."""
        self._left(layer)
        for bucket in self.waiting:
            self._reduce(bucket)
        self.waiting.clear()

    def _left(self, layer: int) -> None:
        for storage in self.entering.pop(layer, ()):
            self.storages.drop(storage)

    def _refill(self, bucket: Bucket) -> None:
        """Gathered into one buffer, taken out, and copied to where it was; the next bucket is begun."""
        flat = self.flat.pop(bucket, None)
        flat = self._start(bucket) if flat is None else flat
        following = self.schedule.next_again.get(bucket)
        if following is not None:
            self.flat[following] = self._start(following)
        self.refilled[bucket] = self.storages.new(self.storages.sizes[flat])
        self.storages.touch(self.storages.sizes[flat] if len(bucket.members) > 1 else 0.0)
        self.storages.drop(flat)
