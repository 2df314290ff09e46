"""The storages that live in the forward: what ops make, what they keep for the backward, what is let go of."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autopar.cost.memory.last_uses import Version
from autopar.cost.memory.live_state import LiveState
from autopar.ir.values import NamedNode
from autopar.sharding.buckets import Bucket
from autopar.sharding.reshard.reshard import StepKind
from autopar.sharding.reshard_insertion import InsertedReshard, OpReshards

__all__ = ["ForwardMemory"]


class ForwardMemory(LiveState):
    """A forward of the generated graph, op by op."""

    def forward(self) -> None:
        self._place_inputs()
        self._place_copies()
        if self.graph.exported.grad_enabled:
            self._place_sums()
        for place, node in enumerate(self.graph.nodes):
            self.storages.now = f"the forward of {node.name}"
            self._op_forward(node, place)
        for one in self.reshard_plan.outputs:
            self._convert(one)

    def _place_inputs(self) -> None:
        """Inputs, parameters and buffers, which whoever calls the module holds."""
        for name, tensor in self.graph.tensors.items():
            if tensor.kind == "activation":
                continue
            whole = self.reshard_plan.inputs.get(name)
            given = name, self.plan.assignment.stored[name] if whole is None else whole.reshard.source
            self.values[given] = self.storages.new(self._stored_bytes(given))
            self.given[given] = self.storages.take(self.values[given])
            if whole is not None:
                self._convert(whole)

    def _place_copies(self) -> None:
        """What lives for the whole step: parameters in the dtype that is computed in, gathered ones that stay."""
        for tensor in self.graph.parameters:
            stays = tensor.name in self.plan.resident and self.plan.micro_batches > 1
            if stays or self._has_master(tensor.dtype):
                values, stored = self.plan.assignment.values[tensor.name], self.plan.assignment.stored[tensor.name]
                self.copied[tensor.name] = self.storages.new(self._bytes((tensor.name, values if stays else stored)))

    def _place_sums(self) -> None:
        """The buffers in which gradients are added up stay from step to step."""
        for of_op in self.schedule.of_op.values():
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
        wired = self.reshard_plan.ops[node.name]
        footprint = self.local.of(node)
        for bucket in self.schedule.of_op.get(node.name, ()):
            self._gather(bucket)
        for one in wired.before:
            if (one.tensor, one.reshard.target) not in self.schedule.versions:
                self._convert(one)
        own = self._own_copies(wired)
        outputs: list[Version | None] = []
        for name, produced, alias in zip(
            node.outputs, self.plan.assignment.ops[node.name].produced, footprint.aliases, strict=False
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

    def _own_copies(self, wired: OpReshards) -> dict[int, int]:
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
        wired: OpReshards,
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
                gone = version[0] in self.plan.regather and version in self.schedule.versions
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
            read = (version for version in wired.operands if version is not None and self._is_held(version, layer))
            for made in (self.values[version] for version in read):
                if made not in inside and made not in entering:
                    entering.add(self.storages.take(made))

    def _is_held(self, version: Version, layer: int) -> bool:
        """Whether what enters a layer that is computed again is held for it: of what buckets gather, only a checkpoint
        holds it all, and not what is gathered again."""
        return version not in self.schedule.versions or (layer in self.whole and version[0] not in self.plan.regather)

    def _let_go(self, node: NamedNode, wired: OpReshards, place: int) -> None:
        """What is used for the last time here, and what is made for nobody."""
        made = [(one.tensor, one.reshard.target) for one in (*wired.before, *wired.after)]
        pairs = zip(node.outputs, self.plan.assignment.ops[node.name].produced, strict=True)
        made += [(name, layout) for name, layout in pairs if name is not None and layout is not None]
        for version in (*self.ends.get(place, ()), *(version for version in made if version not in self.last)):
            if version in self.values:
                self._release(version)

    def _release(self, version: Version) -> None:
        self.storages.drop(self.values.pop(version))

    def _convert(self, one: InsertedReshard) -> None:
        """A conversion by itself: a chain of steps, each with the buffers that it takes."""
        held = self.values[one.tensor, one.reshard.source]
        made = self._converted(one)
        if made != held and one.op in self.again:
            self.made.setdefault(self.layers[one.op][0], set()).add(made)

    def _converted(self, one: InsertedReshard) -> int:
        held = self.values[one.tensor, one.reshard.source]
        made = self.values[one.tensor, one.reshard.target] = self._steps(held, one.reshard.forward, one)
        return made

    def _gather(self, bucket: Bucket) -> None:
        """Parameters are laid into one buffer, which is gathered ahead, and then taken out."""
        if bucket.is_alone:
            self._convert(bucket.members[0])
        elif len(bucket.members) == 1 or not bucket.members[0].reshard.forward:
            for one in bucket.members:
                self._converted(one)
        else:
            flat = self.flat.pop(bucket, None)
            flat = self._start(bucket) if flat is None else flat
            for one in bucket.members:
                size = self._bytes((one.tensor, one.reshard.target))
                self.values[one.tensor, one.reshard.target] = self.storages.new(size)
            self.storages.drop(flat)
        if bucket in self.schedule.inside:
            made = [self.values[one.tensor, one.reshard.target] for one in bucket.members]
            self.made.setdefault(self.schedule.inside[bucket], set()).update(made)
            buffered = len(made) > 1
            sizes = {one: self.storages.sizes[one] if buffered else 0.0 for one in made}
            self.gathered.setdefault(self.schedule.inside[bucket], {}).update(sizes)
        for other in self.schedule.ahead.get(bucket.op, ()):
            if other is not bucket and other not in self.flat:
                self.flat[other] = self._start(other)
