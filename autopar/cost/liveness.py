"""The storages that live in a forward and a backward of the generated graph, op by op, on the rank that holds most.

A value lives until its last use, and on to the backward if some op keeps it; a view shares the storage that it is a
view of. Which operands an op keeps, what it holds in between and which gradients it passes on as they are has been seen
by running it (`autopar/tracing/footprint.py`). Conversions hold their buffers as `autopar/rewrite/moves.py` makes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

from autopar.conversions import Inserted, OpConversions, Wiring
from autopar.cost.buckets import Bucket, buckets_of, buffers_of, copied, shape_of
from autopar.cost.compute import local_bytes
from autopar.cost.layers import layers_of, reading
from autopar.cost.lowered import LocalFootprints
from autopar.cost.storages import Storages
from autopar.cost.versions import Version, last_uses, results_of
from autopar.decided import Plan
from autopar.reshard import Step, StepKind
from autopar.tracing.graph import NamedGraph, NamedNode

__all__ = ["Liveness"]


class Liveness:
    """One micro-batch. `again` are the ops that are computed again; `later`: gradients are there from the start."""

    def __init__(
        self, graph: NamedGraph, plan: Plan, wiring: Wiring, again: frozenset[str] = frozenset(), later: bool = False
    ) -> None:
        self.graph = graph
        self.plan = plan
        self.axes = plan.axes
        self.wiring = wiring
        self.again = again
        self.later = later
        self.storages = Storages()
        self.values: dict[Version, int] = {}
        self.gradients: dict[Version, int] = {}
        self.given: dict[Version, int] = {}
        """Inputs, parameters and buffers."""
        self.kept: dict[str, list[int]] = {}
        self.lost: dict[int, list[tuple[str, int]]] = {}
        """By layer: what each of its ops would keep and what is made again."""
        self.layers = layers_of(graph, plan) if again else {}
        self.whole = {layer for layer, mode in self.layers.values() if mode == "full"}
        """These are called through a checkpoint, which holds what enters until the backward has left."""
        self.reading = reading(graph, plan, again)
        """Ops that are computed again and whose operands must be there for it."""
        self.entering: dict[int, set[int]] = {}
        self.made: dict[int, set[int]] = {}
        """By layer: what enters it from outside; what its ops that are computed again have made."""
        self.gathered: dict[int, dict[int, float]] = {}
        """By layer: parameters that it gathers again itself, and what the buffer for each takes."""
        self.copied: dict[str, int] = {}
        """Copies of parameters that live for the whole step."""
        self.local = LocalFootprints(graph, plan, wiring)
        self.sums: dict[str, int] = {}
        """The parts of the buffers in which gradients are added up."""
        self.refills: dict[str, list[Bucket]] = {}
        self.next_refill: dict[Bucket, Bucket] = {}
        self.refilled: dict[Bucket, int] = {}
        self.pending: list[tuple[Version, int]] = []
        self.sizes: dict[Version, float] = {}
        self.buckets: dict[str, list[Bucket]] = {}
        self.starting: dict[str, list[Bucket]] = {}
        self.flat: dict[Bucket, int] = {}
        previous: Bucket | None = None
        found = tuple(buckets_of(graph, plan, wiring))
        self.inside = {bucket: layer for bucket in found if (layer := self._only_reader(bucket))}
        """Buckets that a layer gathers again when it is computed again."""
        for bucket in found:
            self.buckets.setdefault(bucket.op, []).append(bucket)
            if bucket.gathers and len(bucket.members) > 1 and bucket not in self.inside:
                ahead = bucket if previous is None else previous
                self.starting.setdefault(ahead.op, []).append(bucket)
                previous = bucket
        self.in_bucket = {
            (one.tensor, one.reshard.target) for of_op in self.buckets.values() for b in of_op for one in b.members
        }
        self.last = last_uses(graph, wiring)
        self._place_refills()

    # -- the forward

    def forward(self) -> None:
        self._place_inputs()
        self._place_copies()
        if self.graph.exported.grad_enabled:
            self._place_sums()
        for place, node in enumerate(self.graph.nodes):
            self.storages.now = f"the forward of {node.name}"
            self._op_forward(node, place)
        for one in self.wiring.outputs:
            self._convert(one)

    def _place_inputs(self) -> None:
        """Inputs, parameters and buffers, which whoever calls the module holds."""
        for name, tensor in self.graph.tensors.items():
            if tensor.kind == "activation":
                continue
            whole = self.wiring.inputs.get(name)
            given = name, self.plan.decisions.stored[name] if whole is None else whole.reshard.source
            self.values[given] = self.storages.new(self._stored_bytes(given))
            self.given[given] = self.storages.take(self.values[given])
            if whole is not None:
                self._convert(whole)

    def _place_copies(self) -> None:
        """What lives for the whole step: parameters in the dtype that is computed in, gathered ones that stay."""
        for tensor in self.graph.parameters:
            stays = tensor.name in self.plan.resident and self.plan.micro_batches > 1
            if stays or self._has_master(tensor.dtype):
                values, stored = self.plan.decisions.values[tensor.name], self.plan.decisions.stored[tensor.name]
                self.copied[tensor.name] = self.storages.new(self._bytes((tensor.name, values if stays else stored)))

    def _place_sums(self) -> None:
        """The buffers in which gradients are added up stay from step to step."""
        for of_op in self.buckets.values():
            for bucket in of_op:
                for one in bucket.members if bucket.is_sum and not self._waits(bucket.members[0].tensor) else ():
                    self.sums[one.tensor] = self.storages.new(self._bytes((one.tensor, one.reshard.source)))

    def _has_master(self, dtype: torch.dtype) -> bool:
        return self.plan.master_dtype not in (None, dtype)

    def _stored_bytes(self, version: Version) -> float:
        """A parameter is stored in the dtype that the optimizer updates."""
        tensor = self.graph.tensors[version[0]]
        size = self._bytes(version)
        if tensor.kind != "param" or self.plan.master_dtype is None:
            return size
        return size / tensor.dtype.itemsize * self.plan.master_dtype.itemsize

    def _op_forward(self, node: NamedNode, place: int) -> None:
        wired = self.wiring.ops[node.name]
        footprint = self.local.of(node)
        for bucket in self.buckets.get(node.name, ()):
            self._gather(bucket)
        for one in wired.before:
            if (one.tensor, one.reshard.target) not in self.in_bucket:
                self._convert(one)
        own = self._own_copies(wired)
        outputs: list[Version | None] = []
        for name, produced, alias in zip(
            node.outputs, self.plan.decisions.ops[node.name].produced, footprint.aliases, strict=False
        ):
            if name is None or produced is None:
                outputs.append(None)
                continue
            source = None if alias is None else wired.operands[alias]
            version = name, produced
            if source is None:
                self.values[version] = self.storages.new(self._bytes(version))
                if node.name in self.again:
                    self.made.setdefault(self._layer(node), set()).add(self.values[version])
            else:
                self.values[version] = self.storages.take(self.values[source])
            outputs.append(version)
        internal = footprint.internal_bytes
        self.storages.touch(footprint.forward_bytes + internal)
        if self._trains(node):
            self._keep(node, wired, outputs, internal, own)
        for copy in own.values():
            self.storages.drop(copy)
        for one in wired.after:
            self._convert(one)
        self._let_go(node, wired, place)

    def _own_copies(self, wired: OpConversions) -> dict[int, int]:
        """Windows put together what they read: the first operand with the edges of its neighbours."""
        kinds = {step.kind for one in wired.inside for step in one.reshard.forward}
        place = wired.operands[0] if wired.operands else None
        if StepKind.HALO_EXCHANGE not in kinds or place is None:
            return {}
        edges = sum(step.numel * one.itemsize for one in wired.inside for step in one.reshard.forward)
        return {0: self.storages.new(self._bytes(place) + edges)}

    def _keep(
        self,
        node: NamedNode,
        wired: OpConversions,
        outputs: list[Version | None],
        internal: float,
        own: Mapping[int, int],
    ) -> None:
        footprint = self.local.of(node)
        found: list[int] = []
        for i in footprint.keeps:
            version = wired.operands[i]
            if i in own:
                found.append(own[i])
            elif version is not None:
                gone = version[0] in self.plan.regather and version in self.in_bucket
                if gone and self.values[version] not in self.made.get(self._layer(node), ()):
                    continue
                found.append(self.values[version])
        found += [self.values[version] for i in footprint.keeps_outputs if (version := outputs[i]) is not None]
        layer = self._layer(node)
        inside = self.made.get(layer, set())
        lost = self.lost.setdefault(layer, [])
        lost += [(node.name, one) for one in found if one in inside]
        self.kept[node.name] = [self.storages.take(one) for one in found if one not in inside]
        if node.name in self.again and internal:
            made = self.storages.new(internal)
            lost.append((node.name, made))
            self.storages.drop(made)
        elif internal:
            self.kept[node.name].append(self.storages.new(internal))
        if node.name in self.reading:
            entering = self.entering.setdefault(layer, set())
            read = (version for version in wired.operands if version is not None and version not in self.in_bucket)
            for made in (self.values[version] for version in read):
                if made not in inside and made not in entering:
                    entering.add(self.storages.take(made))

    def _layer(self, node: NamedNode) -> int:
        return self.layers.get(node.name, (0, "none"))[0]

    def _let_go(self, node: NamedNode, wired: OpConversions, place: int) -> None:
        named = {version for version in wired.operands if version is not None}
        for one in (*wired.before, *wired.after):
            named |= {(one.tensor, one.reshard.source), (one.tensor, one.reshard.target)}
        pairs = zip(node.outputs, self.plan.decisions.ops[node.name].produced, strict=True)
        named |= {(name, layout) for name, layout in pairs if name is not None and layout is not None}
        for version in named:
            if self.last.get(version, -1) <= place and version in self.values:
                self._release(version)

    def _release(self, version: Version) -> None:
        self.storages.drop(self.values.pop(version))

    # -- conversions

    def _convert(self, one: Inserted) -> None:
        """A conversion by itself: a chain of steps, each with the buffers that it takes."""
        held = self.values[one.tensor, one.reshard.source]
        made = self.values[one.tensor, one.reshard.target] = self._steps(held, one.reshard.forward, one)
        if made != held and one.op in self.again:
            self.made.setdefault(self.layers[one.op][0], set()).add(made)

    def _steps(self, held: int, steps: tuple[Step, ...], one: Inserted) -> int:
        """What comes out of some steps; the caller keeps what went in."""
        now = self.storages.take(held)
        for step in steps:
            after = self.storages.new(prod(shape_of(one, step.after)) * one.itemsize)
            self.storages.touch(buffers_of(step, one))
            self.storages.drop(now)
            now = after
        return now

    def _gather(self, bucket: Bucket) -> None:
        """Parameters are laid into one buffer, which is gathered ahead, and then taken out."""
        if len(bucket.members) == 1 or not bucket.members[0].reshard.forward:
            for one in bucket.members:
                self._convert(one)
        else:
            flat = self.flat.pop(bucket, None)
            flat = self._start(bucket) if flat is None else flat
            for one in bucket.members:
                size = self._bytes((one.tensor, one.reshard.target))
                self.values[one.tensor, one.reshard.target] = self.storages.new(size)
            self.storages.drop(flat)
        if bucket in self.inside:
            made = [self.values[one.tensor, one.reshard.target] for one in bucket.members]
            self.made.setdefault(self.inside[bucket], set()).update(made)
            buffered = len(made) > 1
            sizes = {one: self.storages.sizes[one] if buffered else 0.0 for one in made}
            self.gathered.setdefault(self.inside[bucket], {}).update(sizes)
        for other in self.starting.get(bucket.op, ()):
            if other is not bucket and other not in self.flat:
                self.flat[other] = self._start(other)

    def _only_reader(self, bucket: Bucket) -> int:
        """The layer that is computed again and is the only one to read parameters that are gathered again."""
        if not bucket.gathers or bucket.members[0].tensor not in self.plan.regather:
            return 0
        made = {(one.tensor, one.reshard.target) for one in bucket.members}
        reading = {op for op, wired in self.wiring.ops.items() if not made.isdisjoint(wired.operands)}
        layers = {self.layers.get(op, (0, "none"))[0] for op in reading}
        return layers.pop() if len(layers) == 1 else 0

    def _start(self, bucket: Bucket) -> int:
        held = sum(self._bytes((one.tensor, one.reshard.source)) for one in bucket.members)
        flat = self.storages.new(sum(self._bytes((one.tensor, one.reshard.target)) for one in bucket.members))
        self.storages.touch(held)
        return flat

    # -- the backward

    def backward(self) -> None:
        if self.later:
            self._earlier_gradients()
        for version in results_of(self.graph, self.wiring):
            self.gradients[version] = self.storages.new(self._bytes(version))
        for one in reversed(self.wiring.outputs):
            self._convert_back(one)
        inside = 0
        for node in reversed(self.graph.nodes):
            layer = self._layer(node)
            self.storages.now = f"the backward of {node.name}"
            if layer != inside:
                self._left(inside)
                self._make_again(layer)
            inside = layer
            self._op_backward(node)
        self._left(inside)

    def gradient_bytes(self) -> float:
        """What the gradients of parameters take once the backward is over."""
        names = {tensor.name for tensor in self.graph.parameters}
        return sum(self.storages.sizes[one] for (name, _), one in self.gradients.items() if name in names)

    def _op_backward(self, node: NamedNode) -> None:
        wired, footprint = self.wiring.ops[node.name], self.local.of(node)
        for bucket in self.refills.get(node.name, ()):
            self._refill(bucket)
        for one in reversed(wired.after):
            self._convert_back(one)
        decision = self.plan.decisions.ops[node.name]
        outputs = [
            (name, layout)
            for name, layout in zip(node.outputs, decision.produced, strict=True)
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
            if (one.tensor, one.reshard.target) not in self.in_bucket:
                self._convert_back(one)
        for bucket in self.buckets.get(node.name, ()):
            self._reduce(bucket)

    def _op_gradients(self, node: NamedNode, wired: OpConversions, given: list[int]) -> None:
        """The gradients of the operands, beside those that are there; `_add` adds them up."""
        footprint = self.local.of(node)
        for i, version in enumerate(wired.operands):
            if version is None:
                continue
            if not self.graph.tensors[version[0]].requires_grad:
                continue
            passed = i in footprint.passes
            made = self.storages.take(given[0]) if passed else self.storages.new(self._bytes(version))
            self.pending.append((version, made))

    def _add(self, version: Version) -> None:
        """Add what an op has found to the gradient that other uses have left."""
        for made in [made for name, made in self.pending if name == version]:
            self._accumulate(version, made)
        self.pending = [pair for pair in self.pending if pair[0] != version]

    def _accumulate(self, version: Version, made: int) -> None:
        before = self.gradients.get(version)
        if before is None:
            self.gradients[version] = made
            return
        if not self.storages.alone(before):  # others read it: the sum is another tensor
            self.gradients[version] = self.storages.new(self.storages.sizes[before])
            self.storages.drop(before)
        self.storages.drop(made)

    def _convert_back(self, one: Inserted) -> None:
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

    def _waits(self, name: str) -> bool:
        """Whether a gradient is only added up: it is reduced in the last micro-batch."""
        return self.plan.micro_batches > 1 and name in self.plan.accumulated

    def _earlier_gradients(self) -> None:
        for tensor in self.graph.parameters:
            if tensor.requires_grad:
                stored = tensor.name, self.plan.decisions.stored[tensor.name]
                whole = tensor.name, self.plan.decisions.values[tensor.name]
                dtype = self.plan.gradient_dtype or self.plan.master_dtype or tensor.dtype
                size = self._bytes(whole if self._waits(tensor.name) else stored) / tensor.dtype.itemsize
                self.gradients[stored] = self.storages.new(size * dtype.itemsize)

    # -- layers that are computed again

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

    def _left(self, layer: int) -> None:
        for storage in self.entering.pop(layer, ()):
            self.storages.drop(storage)

    # -- parameters that are gathered again

    def _place_refills(self) -> None:
        """By op: the buckets that its backward is the first to read; by bucket: the one that comes next in it."""
        last = {version: op for op, wired in self.wiring.ops.items() for version in wired.operands if version}
        place = {name: i for i, name in enumerate(self.wiring.ops)}
        previous: Bucket | None = None
        for bucket in (bucket for of_op in self.buckets.values() for bucket in of_op):
            if bucket.gathers and bucket.members[0].tensor in self.plan.regather and bucket not in self.inside:
                readers = [last.get((one.tensor, one.reshard.target), one.op) for one in bucket.members]
                self.refills.setdefault(max(readers, key=place.__getitem__), []).append(bucket)
                if previous is not None:
                    self.next_refill[bucket] = previous
                previous = bucket

    def _refill(self, bucket: Bucket) -> None:
        """Gathered into one buffer, taken out, and copied to where it was; the next bucket is begun."""
        flat = self.flat.pop(bucket, None)
        flat = self._start(bucket) if flat is None else flat
        following = self.next_refill.get(bucket)
        if following is not None:
            self.flat[following] = self._start(following)
        self.refilled[bucket] = self.storages.new(self.storages.sizes[flat])
        self.storages.touch(self.storages.sizes[flat] if len(bucket.members) > 1 else 0.0)
        self.storages.drop(flat)

    # -- sizes and places

    def _bytes(self, version: Version) -> float:
        found = self.sizes.get(version)
        if found is None:
            found = self.sizes[version] = float(local_bytes(self.graph, *version, self.axes))
        return found

    def _trains(self, node: NamedNode) -> bool:
        made = any(name is not None and self.graph.tensors[name].requires_grad for name in node.outputs)
        return made and self.graph.exported.grad_enabled
