"""Storages of offloaded layers in a simulated step: on the device until the next such layer has run, then on the host.

They follow `autopar/lowering/modules/host_copies.py`: the backward of a layer brings back its own tensors and those of
the layer before. A storage that two layers save is moved once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autopar.cost.lowered_step import LoweredStep, Version
from autopar.cost.memory.local_memory import Storages
from autopar.sharding.offload import LEAST_BYTES


class MovedStorage(NamedTuple):
    """Storage that one op of a layer saves, and that leaves the device."""

    op: str
    storage: int


class HostStorages:
    """Saved tensors of offloaded layers, by the number of the layer."""

    def __init__(self, step: LoweredStep, storages: Storages) -> None:
        self.step, self.storages = step, storages
        self.layers = step.offloaded
        here = [node.name for node in step.nodes_here if node.name in step.ops_here and node.name in self.layers]
        # The op of each layer that runs last.
        self.last = {self.layers[op]: op for op in here}
        # The first storage that a layer makes.
        self.first: dict[int, int] = {}
        self.saved: dict[int, list[MovedStorage]] = {}
        # By storage of the forward: where it is on the device, with a reference to it.
        self.on_device: dict[int, int] = {}
        self.previous: int | None = None
        self.before: dict[int, int] = {}
        # Copies to the host, in order: the op that first saves a storage, and its bytes.
        self.copies: dict[int, tuple[str, float]] = {}

    @property
    def bytes(self) -> float:
        """Return the bytes on the host when the forward has ended."""
        return sum(size for _, size in self.copies.values())

    @property
    def waiting_bytes(self) -> float:
        """Return the bytes of the last layer, which have not left the device when the forward has ended."""
        return sum(self.storages.sizes[one] for one in self.on_device.values())

    def begin(self, op: str) -> None:
        if op in self.layers:
            self.first.setdefault(self.layers[op], len(self.storages.sizes))

    def move(self, op: str, found: Sequence[tuple[int, Version | None]]) -> list[int]:
        """Record the storages that an op saves and a layer moves; return the others."""
        if op not in self.layers:
            return [storage for storage, _ in found]
        layer, stay = self.layers[op], []
        for storage, version in found:
            if not self._may_move(layer, storage, version):
                stay.append(storage)
                continue
            self.saved.setdefault(layer, []).append(MovedStorage(op, storage))
            if storage not in self.copies:
                self.copies[storage] = op, self.storages.sizes[storage]
                self.on_device[storage] = self.storages.take(storage)
        return stay

    def _may_move(self, layer: int, storage: int, version: Version | None) -> bool:
        if self.storages.sizes[storage] < LEAST_BYTES or version in self.step.schedule.versions:
            return False
        root = None if version is None else self.step.saved_roots[version[0]]
        if root is not None and self.step.graph.tensors[root].kind != "activation":
            return False
        return storage >= self.first[layer] or root in self.step.moved_inputs[layer]

    def end(self, op: str) -> None:
        """Free the layer before the one that ends with an op."""
        layer = self.layers.get(op)
        if layer is None or self.last[layer] != op or layer not in self.saved:
            return
        own = {one.storage for one in self.saved[layer]}
        if self.previous is not None:
            self.before[layer] = self.previous
            for storage in {one.storage for one in self.saved[self.previous]} - own:
                if storage in self.on_device:
                    self.storages.drop(self.on_device.pop(storage))
        self.previous = layer

    def begin_backward(self, op: str, saved: dict[str, list[int]]) -> None:
        """Bring back the storages of an op's layer and of the layer before; add them to those that each op saves."""
        layer = self.layers.get(op)
        if layer is None:
            return
        for one in (layer, self.before.get(layer, layer)):
            moved = self.saved.pop(one, [])
            if not moved:
                continue  # they are back already
            for storage in dict.fromkeys(each.storage for each in moved):
                if storage not in self.on_device:
                    self.on_device[storage] = self.storages.new(self.storages.sizes[storage])
            for each in moved:
                saved.setdefault(each.op, []).append(self.storages.take(self.on_device[each.storage]))
            left = {each.storage for others in self.saved.values() for each in others}
            for storage in {each.storage for each in moved} - left:
                self.storages.drop(self.on_device.pop(storage))
