"""The held tensors of a model: how inputs, parameters and buffers may be stored, and what that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autopar.ir.values import NamedNode, NamedTensor
from autopar.sharding.sharding import Sharding, atoms_of
from autopar.solver.arrays import Floats
from autopar.solver.candidates import StorageOption, stored_of
from autopar.solver.model.builder import ModelBuilder, parts_of
from autopar.solver.model.cost_tables import CostTable, Parts, ValueUse, Wants
from autopar.solver.model.model import Factor
from autopar.solver.model.objective import Sum

__all__ = ["StorageVariables"]


class StorageVariables(ModelBuilder):
    def _held(self, tensor: NamedTensor) -> None:
        users = self.setting.users.get(tensor.name, ())
        wants = [self._wants(node, tensor.name) for node in users]
        stored = self._stored(tensor, self._uses(wants))
        parts = self._held_parts(tensor, stored)
        if tensor.kind == "param" and len(users) > 1:
            stored, parts = self._with_shared(tensor, stored, parts, users, wants)
        place = self._add("held", tensor.name, stored, parts)
        cut = self.tables.cut(tensor)
        for number, (node, want) in enumerate(zip(users, wants, strict=True)):
            if tensor.kind == "param":
                first = number == 0 and cut.trained and self._accumulates()
                kept = (node.name, tensor.name) in self.kept.operands
                handled = self.tables.handled(tensor, kept, later=number > 0, measured=node is self.product)
                accumulates = self._accumulated_bytes(tensor) if first else None
                table = self.tables.parameters(cut, stored, want, handled, accumulates)
                self.factors.append(Factor((place, self.place["op", node.name]), table))
                if number == 0 and cut.trained and len(users) > 1:
                    self._add_gradients(tensor, node, want, len(users) - 1)
            else:
                self._add_taken(place, tensor, stored, node, want)

    def _add_taken(
        self, place: int, tensor: NamedTensor, stored: Sequence[StorageOption], node: NamedNode, wants: Sequence[Wants]
    ) -> None:
        """An input or a buffer, as an op takes it."""
        cut, layouts = self.tables.cut(tensor), [one.layout for one in stored]
        kept = (node.name, tensor.name) in self.kept.operands
        again = self.again.flags(node.name)

        def table(mode: int) -> CostTable:
            return self.tables.values(cut, layouts, wants, ValueUse(again[mode], kept))

        self._add_pairs(place, self.place["op", node.name], node, table)

    def _uses(self, wants: Sequence[Sequence[Wants]]) -> tuple[Sharding, ...]:
        """The layouts in which ops take a tensor, as values."""
        key = "uses", tuple(map(id, wants))
        if key not in self.known:
            found = (want.value for each in wants for one in each for want in one if want is not None)
            self.known[key] = self._same(tuple(dict.fromkeys(found)))
        uses: tuple[Sharding, ...] = self.known[key]
        return uses

    def _stored(self, tensor: NamedTensor, uses: tuple[Sharding, ...]) -> tuple[StorageOption, ...]:
        key = "stored", tensor.kind, self._cut(tensor), id(uses), self.bound_layout.stored_key(tensor)
        if key not in self.known:
            self.known[key] = stored_of(self.setting, self.bound_layout, tensor, uses, self.regather, self.lasting)
        found: tuple[StorageOption, ...] = self.known[key]
        return found

    def _with_shared(
        self,
        tensor: NamedTensor,
        stored: tuple[StorageOption, ...],
        parts: tuple[Parts, ...],
        users: Sequence[NamedNode],
        wants: Sequence[tuple[Wants, ...]],
    ) -> tuple[tuple[StorageOption, ...], tuple[Parts, ...]]:
        """A parameter that several ops take: converted once for those that take it in one layout."""
        counts: dict[Sharding, int] = {}
        for each in wants:
            for want in dict.fromkeys(want for option in each for want in option if want is not None):
                counts[want] = counts.get(want, 0) + 1
        common = [None, *(want for want, count in counts.items() if count > 1)]
        states = tuple(
            replace(one, shared=want) for one in stored for want in common if want is None or want != one.layout
        )
        rows = np.array([stored.index(replace(one, shared=None)) for one in states])
        spread = [{key: values[rows] for key, values in part.items()} for part in parts]
        kept = any((node.name, tensor.name) in self.kept.operands for node in users)
        once = self.tables.shared(self.tables.cut(tensor), states, self.tables.handled(tensor, kept))
        return states, (*spread, once)

    def _held_parts(self, tensor: NamedTensor, stored: tuple[StorageOption, ...]) -> tuple[Parts, ...]:
        key = "held", tensor.kind, self._cut(tensor), id(stored), tuple(self.handed.get(tensor.name, ()))
        if key not in self.known:
            sums = np.zeros((len(Sum), len(stored)))
            options = self.setting.options
            for i, one in enumerate(stored):
                if tensor.kind == "param" and tensor.requires_grad and self.setting.trains:
                    prices = self.setting.prices
                    size = prices.optimizer_bytes(tensor.name, one.layout, options.optimizer, options.master_dtype)
                    sums[Sum.OPTIMIZER, i] += size / prices.device.stream
                self._stored_memory(sums[:, i], tensor, one)
                if tensor.kind == "input" and not options.local_inputs:
                    whole = Sharding.replicated(atoms_of(tensor))
                    self._add_reshard(sums[:, i], tensor, whole, one.layout, backward=False)
                self._handed_out(sums[:, i], tensor, one.layout)
            self.known[key] = parts_of(sums)
        return (self.known[key],)

    def _stored_memory(self, sums: Floats, tensor: NamedTensor, one: StorageOption) -> None:
        options = self.setting.options
        size = self._gib(tensor.name, one.layout)
        if tensor.kind != "param":
            whole = Sharding.replicated(atoms_of(tensor))
            inputs = size if options.local_inputs or tensor.kind != "input" else self._gib(tensor.name, whole)
            sums[Sum.KEPT_GIB] += inputs + (size if tensor.kind == "input" and one.layout != whole else 0.0)
            sums[Sum.STEP_GIB] += inputs
            return
        master = (options.master_dtype or tensor.dtype).itemsize / tensor.dtype.itemsize
        held = size * (master + (1.0 if options.master_dtype not in (None, tensor.dtype) else 0.0))
        if tensor.requires_grad and self.setting.trains:
            held += size * master * self.optimizer.states
            gradient = (options.gradient_dtype or options.master_dtype or tensor.dtype).itemsize / tensor.dtype.itemsize
            stays = self._accumulates() or not any(one.layout.splits)  # sums have a buffer of their own
            sums[Sum.KEPT_GIB] += size * gradient if stays else 0.0
            sums[Sum.STEP_GIB] += size * gradient
        sums[Sum.KEPT_GIB] += held
        sums[Sum.STEP_GIB] += held

    def _accumulates(self) -> bool:
        return self.setting.options.micro_batches > 1 or self.setting.options.gradient_dtype is not None

    def _accumulated_bytes(self, tensor: NamedTensor) -> Any:
        prices, master = self.setting.prices, self.setting.options.master_dtype
        return lambda layout: prices.gradient_accumulation(tensor.name, layout, master).bytes

    def _add_gradients(self, tensor: NamedTensor, node: NamedNode, wants: Sequence[Wants], times: int) -> None:
        """A parameter's gradients are added up in the layout in which its first user takes it."""
        key = "added", self._cut(tensor), tuple(each[0] for each in wants), times
        if key not in self.known:
            sums = np.zeros((len(Sum), len(wants)))
            for i, each in enumerate(wants):
                if each[0] is not None:
                    self._added(sums[:, i], tensor.name, each[0], times)
            self.known[key] = parts_of(sums)
        self._add_op_parts(node, self.known[key])
