"""Simulate the storages of a forward and a backward of the generated graph, op by op, on the rank with most memory.

A value is alive until its last use, and until the backward if an op saves it; a view shares the storage of its base.
Saved operands, temporaries and gradients that an op passes on unchanged are found by running the op
(`autopar/ir/analysis/op_memory.py`). Reshards allocate the buffers of `autopar/lowering/collectives/local_steps.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.cost.lowered_step import LoweredStep, Version
from autopar.cost.memory.host_memory import HostStorages
from autopar.cost.memory.kept_copies import kept_copies
from autopar.cost.memory.local_memory import LiveState
from autopar.cost.memory.version_uses import differentiable_results
from autopar.ir.values import NamedNode, NamedTensor
from autopar.sharding.buckets import Bucket, copied
from autopar.sharding.options import sum_dtype
from autopar.sharding.reshard_insertion import InsertedReshard, OpReshards


class ForwardMemory(LiveState):
    """Forward of the generated graph, op by op."""

    def __init__(self, step: LoweredStep) -> None:
        super().__init__(step)
        self.host = HostStorages(step, self.storages)

    def forward(self) -> None:
        self._place_inputs()
        for tied in self.received:
            made = self.copied[f"{tied.version} of stage {tied.source}"] = self.storages.new(tied.bytes)
            self.values.setdefault(tied.version, self.storages.take(made))
        for name, size in kept_copies(self.graph, self.plan, self._bytes_in):
            self.copied[name] = self.storages.new(size)
        if self.graph.exported.grad_enabled:
            # Buffers of summed gradients are allocated once and live from step to step.
            sums = (one for of_op in self.schedule.of_op.values() for one in of_op if one.is_sum)
            for bucket in sums:
                for one in bucket.members if not self._defers_reduction(bucket.members[0].tensor) else ():
                    reduced = self.precision.reduced(self.graph.tensors[one.tensor].dtype)
                    self.sums[one.tensor] = self.storages.new(self._bytes_in((one.tensor, one.source), reduced))
        for node in self.nodes:
            self.storages.now = f"the forward of {node.name}"
            if node.name in self.runs:
                self._op_forward(node)
            else:
                self._receive(node)
        for one in self.reshard_plan.outputs:
            if (one.tensor, one.source) in self.values:
                self._reshard(one)
        for version in dict.fromkeys(self.reshard_plan.results):
            # The results of earlier micro-batches.
            if version is not None and self._times(version[0]) > 1:
                self.results_bytes += self._times(version[0]) * self._bytes(version)
                self.storages.new((self._times(version[0]) - 1) * self._bytes(version))

    def _place_inputs(self) -> None:
        """Allocate inputs, parameters and buffers, which the caller of the module keeps alive."""
        for name, tensor in self.graph.tensors.items():
            if tensor.kind == "activation":
                continue
            reshard = self.reshard_plan.inputs.get(name)
            version = name, self.plan.assignment.stored[name] if reshard is None else reshard.source
            # Parameters are stored in the dtype that the optimizer updates.
            dtype = tensor.stored_dtype(self.precision)
            self.values[version] = self.storages.new(self._bytes_in(version, dtype) * self._times(name))
            self.inputs[version] = self.storages.take(self.values[version])
            if reshard is not None:
                self._reshard(reshard)

    def _receive(self, node: NamedNode) -> None:
        """Allocate the results of another stage that this one reads."""
        for name, produced in zip(node.outputs, self.plan.assignment.ops[node.name].produced, strict=True):
            if name is None or produced is None:
                continue
            version = name, self.plan.assignment.values[name]
            if self.has(version):
                self.values[version] = self.storages.new(self._bytes(version))

    def _op_forward(self, node: NamedNode) -> None:
        reshards = self.reshard_plan.ops[node.name]
        footprint = self.footprints.of(node)
        self.host.begin(node.name)
        for bucket in self.schedule.of_op.get(node.name, ()):
            self._gather(bucket)
        for one in self._before(node):
            self._reshard(one)
        for operand in reshards.operands:
            if operand is not None and operand not in self.values:  # the bucket of a parameter of several stages
                self.values[operand] = self.storages.new(self._bytes(operand))
        halo_copies = self._halo_copies(reshards)
        outputs: list[Version | None] = []
        for name, produced, alias in zip(
            node.outputs, self.plan.assignment.ops[node.name].produced, footprint.aliases, strict=False
        ):
            if name is None or produced is None:
                outputs.append(None)
                continue
            source = None if alias is None else reshards.operands[alias]
            version = name, produced
            if source is None:
                self.values[version] = self.storages.new(self._bytes(version))
                if node.name in self.recomputed:
                    self.made.setdefault(self._layer(node), set()).add(self.values[version])
            else:
                self.values[version] = self.storages.take(self.values[source])
            outputs.append(version)
        internal = footprint.internal_bytes
        self.storages.touch(footprint.forward_bytes + internal)
        if self._trains(node):
            self._save(node, reshards, outputs, internal, halo_copies)
        self._keep_entering(node, reshards)
        for copy in halo_copies.values():
            self.storages.drop(copy)
        for one in reshards.after:
            self._reshard(one)
        self._free(node, reshards)
        self.host.end(node.name)

    def _save(
        self,
        node: NamedNode,
        reshards: OpReshards,
        outputs: list[Version | None],
        internal: float,
        halo_copies: Mapping[int, int],
    ) -> None:
        """Save the tensors that the op keeps for its backward."""
        footprint = self.footprints.of(node)
        pairs: list[tuple[int, Version | None]] = []
        for i in footprint.keeps:
            version = reshards.operands[i]
            if i in halo_copies:
                pairs.append((halo_copies[i], None))
            elif version is not None:
                regathered = version[0] in self.plan.regather and version in self.schedule.versions
                if regathered and self.values[version] not in self.made.get(self._layer(node), ()):
                    continue
                pairs.append((self.values[version], version))
        made = [version for i in footprint.keeps_outputs if (version := outputs[i]) is not None]
        pairs += [(self.values[version], version) for version in made]
        inner = self.storages.new(internal) if internal and node.name not in self.recomputed else None
        found = self.host.move(node.name, pairs if inner is None else [*pairs, (inner, None)])
        layer = self._layer(node)
        inside = self.made.get(layer, set())
        lost = self.lost.setdefault(layer, [])
        lost += [(node.name, one) for one in found if one in inside]
        self.saved[node.name] = [self.storages.take(one) for one in found if one not in inside]
        if node.name in self.recomputed and internal:
            again = self.storages.new(internal)
            lost.append((node.name, again))
            self.storages.drop(again)
        elif inner is not None:
            self.storages.drop(inner)

    def _free(self, node: NamedNode, reshards: OpReshards) -> None:
        """Free versions whose last use is this op, and those it makes that no op uses."""
        made = [(one.tensor, one.target) for one in (*reshards.before, *reshards.after)]
        pairs = zip(node.outputs, self.plan.assignment.ops[node.name].produced, strict=True)
        made += [(name, sharding) for name, sharding in pairs if name is not None and sharding is not None]
        for version in (*self.ends.get(node.name, ()), *(version for version in made if version not in self.last)):
            if version in self.values:
                self.storages.drop(self.values.pop(version))

    def _reshard(self, one: InsertedReshard) -> None:
        """Run a reshard that no bucket joins: a chain of steps with their buffers."""
        source, made = self.values[one.tensor, one.source], self._reshard_value(one)
        if made != source and one.op in self.recomputed:
            self.made.setdefault(self.layers[one.op][0], set()).add(made)

    def _reshard_value(self, one: InsertedReshard) -> int:
        source = self.values[one.tensor, one.source]
        made = self.values[one.tensor, one.target] = self._steps(source, one.reshard.forward, one)
        return made

    def _is_kept(self, bucket: Bucket) -> bool:
        """Return whether a call gathered the parameters of a bucket before its first micro-batch."""
        return self.call is not None and all(one.tensor in self.copied for one in bucket.members)

    def _gather(self, bucket: Bucket) -> None:
        """Gather a bucket: copy its shards into one buffer, gather ahead, copy the parameters out."""
        if self._is_kept(bucket):
            for one in bucket.members:
                self.values[one.tensor, one.target] = self.storages.take(self.copied[one.tensor])
        elif bucket.is_alone:
            self._reshard(bucket.members[0])
        elif len(bucket.members) == 1 or not bucket.members[0].reshard.forward:
            for one in bucket.members:
                self._reshard_value(one)
                if one.gathers_in_float8(self.graph, self.precision):
                    self.storages.touch(self._sent_bytes(one, one.target))
        else:
            flat = self.flat.pop(bucket, None)
            flat = self._start_gather(bucket) if flat is None else flat
            for one in bucket.members:
                size = self._bytes((one.tensor, one.target))
                self.values[one.tensor, one.target] = self.storages.new(size)
            self.storages.drop(flat)
        if bucket in self.schedule.inside:
            made = [self.values[one.tensor, one.target] for one in bucket.members]
            self.made.setdefault(self.schedule.inside[bucket], set()).update(made)
            self.gathered.setdefault(self.schedule.inside[bucket], []).append(made)
        for other in self.schedule.ahead.get(bucket.op, ()):
            if other is not bucket and other not in self.flat and not self._is_kept(other):
                self.flat[other] = self._start_gather(other)


class StepMemory(ForwardMemory):
    """Forward of the generated graph, and the backward after it."""

    def __init__(self, step: LoweredStep) -> None:
        super().__init__(step)
        # Gradients of an op's operands before they are added to those of other uses.
        self.pending: dict[Version, list[int]] = {}
        self.regathered: dict[Bucket, int] = {}
        # Buckets whose gradients are reduced when the backward leaves a checkpoint.
        self.waiting: list[Bucket] = []
        # Operands of put-off gradients, and their bytes at the end of the backward.
        self.late_weights = step.late_weights
        self.put_off: list[int] = []
        self.late_bytes = 0.0
        # Parameters by the op that uses them first, where their gradients are complete.
        self.first_uses: dict[str, list[NamedTensor]] = {}
        seen = (node for node in self.nodes if node.name in self.runs)
        first = {name: node.name for node in reversed(list(seen)) for name in node.operands if name is not None}
        for tensor in self.graph.parameters:
            if tensor.name in first:
                self.first_uses.setdefault(first[tensor.name], []).append(tensor)

    def backward(self) -> None:
        if self.accumulates:
            self._place_gradients()
        for tied in self.received:
            self.storages.new(tied.gradient_bytes)
        for version in differentiable_results(self.graph, self.reshard_plan):
            self.gradients[version] = self.storages.new(self._bytes(version))
        for one in reversed(self.reshard_plan.outputs):
            self._reshard_gradient(one)
        inside = 0
        for node in reversed(self.nodes):
            if node.name not in self.runs:
                self._send_gradients(node)
                continue
            layer = self._layer(node)
            if layer != inside:
                self._leave(inside)
            self.storages.now = f"the backward of {node.name}"
            if layer != inside:
                self._recompute(layer)
            self.host.begin_backward(node.name, self.saved)
            inside = layer
            self._op_backward(node)
        self._leave(inside)
        kept = self.storages.live
        for storage in self.put_off:
            self.storages.drop(storage)
        self.late_bytes = kept - self.storages.live

    def gradient_bytes(self) -> float:
        """Return the bytes of the gradients of parameters after the backward."""
        names = {tensor.name for tensor in self.graph.parameters}
        return sum(self.storages.sizes[one] for (name, _), one in self.gradients.items() if name in names)

    def _send_gradients(self, node: NamedNode) -> None:
        """Free received values and their gradients, which go back to the stage that made them."""
        for name in node.outputs:
            if name is not None:
                version = name, self.plan.assignment.values[name]
                for held in (self.gradients, self.values):
                    if version in held:
                        self.storages.drop(held.pop(version))

    def _op_backward(self, node: NamedNode) -> None:
        reshards, footprint = self.reshard_plan.ops[node.name], self.footprints.of(node)
        for name in self.crossing.intersection(node.outputs):
            crossed = name, self.plan.assignment.values[name]
            if crossed in self.values:
                self.storages.drop(self.values.pop(crossed))
            if crossed not in self.gradients and self.graph.tensors[name].requires_grad:
                self.gradients[crossed] = self.storages.new(self._bytes(crossed))
        for bucket in self.schedule.regathered.get(node.name, ()):
            self._regather(bucket)
        for one in reversed(reshards.after):
            self._reshard_gradient(one)
        outputs = zip(node.outputs, self.plan.assignment.ops[node.name].produced, strict=True)
        versions = [(name, sharding) for name, sharding in outputs if name is not None and sharding is not None]
        given = [self.gradients.pop(version) for version in versions if version in self.gradients]
        if given and self._trains(node):
            # The gradients of operands are alive together; autograd adds them to those of other uses after the op.
            for i, version in enumerate(reshards.operands):
                if version is not None and self.graph.tensors[version[0]].requires_grad:
                    passed = i in footprint.passes
                    made = self.storages.take(given[0]) if passed else self.storages.new(self._bytes(version))
                    self.pending.setdefault(version, []).append(made)
            # The gradient of a received parameter, before it is added to that of other uses.
            received = sum(
                one.bytes for one in self.received if one.gradient_bytes and one.version in reshards.operands
            )
            self.storages.touch(footprint.backward_bytes + received)
        used = (*given, *self.saved.pop(node.name, ()))
        if node.name in self.late_weights:
            self.put_off += used
        else:
            for storage in used:
                self.storages.drop(storage)
        for version in dict.fromkeys(version for version in reshards.operands if version is not None):
            for made in self.pending.pop(version, ()):
                self._accumulate(version, made)
        for one in reversed(self._before(node)):
            self._reshard_gradient(one)
        complete = {tensor.name for tensor in self.first_uses.get(node.name, ())}
        for version in reshards.operands:
            if version is not None and version[0] in complete:
                self._add_to_earlier(version)
        for bucket in self.schedule.of_op.get(node.name, ()):
            if self._layer(node) in self.whole and bucket not in self.schedule.inside and not bucket.is_alone:
                self.waiting.append(bucket)
            else:
                self._reduce(bucket)
        for tensor in self.first_uses.get(node.name, ()):
            self._cast_gradient(tensor)

    def _add_to_earlier(self, version: Version) -> None:
        """Add a gradient that is reduced after the last micro-batch to those of earlier ones."""
        name, _ = version
        stored = name, self.plan.assignment.stored[name]
        if version in self.gradients and version != stored and self._defers_reduction(name):
            self._accumulate(stored, self.gradients.pop(version))

    def _cast_gradient(self, tensor: NamedTensor) -> None:
        """Replace the gradient of a parameter by one in the dtype in which the parameter is stored."""
        version = tensor.name, self.plan.assignment.stored[tensor.name]
        size = self._bytes_in(version, tensor.stored_dtype(self.precision))
        found = self.gradients.get(version)
        if found is not None and not self.accumulates and self.storages.sizes[found] != size:
            self.gradients[version] = self.storages.new(size)
            self.storages.drop(found)

    def _accumulate(self, version: Version, made: int) -> None:
        """Add a gradient to that of other uses."""
        before = self.gradients.get(version)
        if before is None:
            self.gradients[version] = made
            return
        # Autograd adds in place only where nothing else refers to the first gradient.
        if not self.storages.alone(before):
            self.gradients[version] = self.storages.new(self.storages.sizes[before])
            self.storages.drop(before)
        self.storages.drop(made)

    def _reshard_gradient(self, one: InsertedReshard) -> None:
        found = self.gradients.pop((one.tensor, one.target), None)
        if found is not None:
            made = self._steps(found, one.reshard.backward, one)
            self.storages.drop(found)
            self._accumulate((one.tensor, one.source), made)

    def _reduce(self, bucket: Bucket) -> None:
        self._reduce_members(bucket)
        for one in bucket.members:
            self._cast_gradient(self.graph.tensors[one.tensor])

    def _reduce_members(self, bucket: Bucket) -> None:
        """Reduce the gradients of a bucket in one buffer; the results are views of a second buffer."""
        if bucket in self.regathered:
            self.storages.drop(self.regathered.pop(bucket))
        members = [one for one in bucket.members if (one.tensor, one.target) in self.gradients]
        if not members or not members[0].reshard.backward or self._defers_reduction(members[0].tensor):
            for one in members:
                if self._defers_reduction(one.tensor):
                    whole_gradient = self.gradients.pop((one.tensor, one.target))
                    self._accumulate((one.tensor, one.source), whole_gradient)
                else:
                    self._reshard_gradient(one)
            return
        if bucket.is_sum and len(members) == len(bucket.members):
            # Gradients are copied into the buffer that lives for the whole step, and are views of it from then on.
            for one in bucket.members:
                self.storages.drop(self.gradients.pop((one.tensor, one.target)))
                self._accumulate((one.tensor, one.source), self.storages.take(self.sums[one.tensor]))
            return
        given = [self.gradients.pop((one.tensor, one.target)) for one in members]
        reduced = self.precision.reduced(self.graph.tensors[members[0].tensor].dtype)
        whole = sum(self._bytes_in((one.tensor, one.target), reduced) for one in members)
        cast = sum(self.storages.sizes[storage] for storage in given) != whole
        prepared = sum(copied(one.reshard.backward[0], one) for one in members if self.has((one.tensor, one.target)))
        flat = self.storages.new(whole)
        self.storages.touch(prepared + (whole if cast else 0.0))
        made = [self.storages.new(self._bytes_in((one.tensor, one.source), reduced)) for one in members]
        for storage in (flat, *given):
            self.storages.drop(storage)
        for one, storage in zip(members, made, strict=True):
            self._accumulate((one.tensor, one.source), storage)

    def _place_gradients(self) -> None:
        """Allocate the gradients of earlier micro-batches."""
        for tensor in self.graph.parameters:
            if tensor.requires_grad:
                stored = tensor.name, self.plan.assignment.stored[tensor.name]
                whole = tensor.name, self.plan.assignment.values[tensor.name]
                version = whole if self._defers_reduction(tensor.name) else stored
                self.gradients[stored] = self.storages.new(self._bytes_in(version, sum_dtype(tensor.dtype)))

    def _recompute(self, layer: int) -> None:
        """Allocate the saved tensors of a recomputed layer; each op keeps its own until its backward."""
        lost = self.lost.pop(layer, [])
        made: dict[int, int] = {}
        due = {one for _, one in lost}
        # The regathers precede the recomputed ops; parameters that share a bucket come out of a buffer.
        for members in self.gathered.pop(layer, []):
            made.update((one, self.storages.new(self.storages.sizes[one])) for one in members if one in due)
            self.storages.touch(sum(self.storages.sizes[one] for one in members) if len(members) > 1 else 0.0)
        for op, one in lost:
            if one not in made:
                made[one] = self.storages.new(self.storages.sizes[one])
            self.saved.setdefault(op, []).append(self.storages.take(made[one]))
        if layer and layer not in self.whole:
            self._free_entering(layer)
        for one in made.values():
            self.storages.drop(one)

    def _leave(self, layer: int) -> None:
        """Free the kept inputs of a layer, then reduce the gradients of parameters gathered outside it."""
        self._free_entering(layer)
        for bucket in self.waiting:
            self._reduce(bucket)
        self.waiting.clear()

    def _free_entering(self, layer: int) -> None:
        for storage in self.entering.pop(layer, ()):
            self.storages.drop(storage)

    def _regather(self, bucket: Bucket) -> None:
        """Regather a bucket into one buffer, copy its parameters out, and start the next bucket."""
        flat = self.flat.pop(bucket, None)
        flat = self._start_gather(bucket) if flat is None else flat
        following = self.schedule.next_regathered.get(bucket)
        if following is not None:
            self.flat[following] = self._start_gather(following)
        self.regathered[bucket] = self.storages.new(
            sum(self._bytes((one.tensor, one.target)) for one in bucket.members)
        )
        self.storages.touch(self.storages.sizes[flat] if len(bucket.members) > 1 else 0.0)
        self.storages.drop(flat)
