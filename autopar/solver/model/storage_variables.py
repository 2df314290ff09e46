"""Variables of stored tensors: the storage options of inputs, parameters and buffers, and their costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from autopar.cost.host_copies import exposed_state_seconds
from autopar.ir.values import NamedNode, NamedTensor
from autopar.sharding.bound_layout import BoundLayout
from autopar.sharding.options import sum_dtype
from autopar.sharding.sharding import Sharding, atoms_of
from autopar.solver import Floats
from autopar.solver.candidates import StorageOption, is_dtensor_sharding, options_of, stored_of
from autopar.solver.infeasible import no_option
from autopar.solver.model.builder import ModelBuilder, parts_of
from autopar.solver.model.cost_tables import CostTable, PartialSums, Parts, ValueUse, Wants
from autopar.solver.model.model import Factor
from autopar.solver.model.objective import Sum

__all__ = ["StorageVariables", "ValueVariables"]


class StorageVariables(ModelBuilder):
    def _held(self, tensor: NamedTensor) -> None:
        users = self.setting.users.get(tensor.name, ())
        wants = [self._wants(node, tensor.name) for node in users]
        stored = self._stored(tensor, self._uses(wants))
        parts = self._held_parts(tensor, stored)
        if tensor.kind == "param" and len(users) > 1 and self.has_shared_states:
            stored, parts = self._with_shared(tensor, stored, parts, users, wants)
        place = self._add("held", tensor.name, stored, parts)
        cut = self.tables.cut(tensor)
        for number, (node, want) in enumerate(zip(users, wants, strict=True)):
            if tensor.kind == "param":
                first = number == 0 and cut.trained and self._accumulates()
                kept = (node.name, tensor.name) in self.kept.operands
                behind = node.name in self.behind
                handled = self.tables.handled(tensor, kept, number > 0, node is self.product, behind)
                accumulates = self._accumulated_bytes(tensor) if first else None
                casts = tensor if number == 0 and cut.casts else None
                table = self.tables.parameters(cut, stored, want, handled, accumulates, casts)
                self.factors.append(Factor((place, self.place["op", node.name]), table))
                # Each half of a micro-batch has a gradient of each use.
                sums = (1 if self.setting.prices.half is None else 2) * len(users) - 1
                if number == 0 and cut.trained and sums:
                    self._add_gradients(tensor, node, want, sums)
            else:
                self._add_taken(place, tensor, stored, node, want)

    def _add_taken(
        self, place: int, tensor: NamedTensor, stored: Sequence[StorageOption], node: NamedNode, wants: Sequence[Wants]
    ) -> None:
        """Add the reshard of an input or a buffer for an op."""
        cut, layouts = self.tables.cut(tensor), [one.layout for one in stored]
        kept = (node.name, tensor.name) in self.kept.operands
        again = self.again.takes(node.name)

        def table(mode: int) -> CostTable:
            use = ValueUse(again[mode], kept, behind=node.name in self.behind)
            return self.tables.values(cut, layouts, wants, use)

        self._add_pairs(place, self.place["op", node.name], node, table)

    def _uses(self, wants: Sequence[Sequence[Wants]]) -> tuple[Sharding, ...]:
        """Return the shardings in which ops take a tensor, as values."""
        key = "uses", tuple(map(id, wants))
        if key not in self.known:
            found = (want.value for each in wants for one in each for want in one if want is not None)
            self.known[key] = self._same(tuple(dict.fromkeys(found)))
        uses: tuple[Sharding, ...] = self.known[key]
        return uses

    def _stored(self, tensor: NamedTensor, uses: tuple[Sharding, ...]) -> tuple[StorageOption, ...]:
        key = "stored", tensor.kind, self._cut(tensor), id(uses), self.bound_layout.stored_key(tensor)
        if key not in self.known:
            self.known[key] = stored_of(self.setting, self.bound_layout, tensor, uses, self.regather)
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
        """Return a parameter of several ops: it is resharded once for those that take it in one sharding."""
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
        behind = all(node.name in self.behind for node in users)
        once = self.tables.shared(self.tables.cut(tensor), states, self.tables.handled(tensor, kept, behind=behind))
        return states, (*spread, once)

    def _held_parts(self, tensor: NamedTensor, stored: tuple[StorageOption, ...]) -> tuple[Parts, ...]:
        key = "held", tensor.kind, self._cut(tensor), id(stored), tuple(self.handed.get(tensor.name, ()))
        if key not in self.known:
            sums = np.zeros((len(Sum), len(stored)))
            options = self.setting.options
            for i, one in enumerate(stored):
                if tensor.kind == "param" and tensor.requires_grad and self.setting.trains:
                    prices = self.setting.prices
                    size = prices.optimizer_bytes(tensor.name, one.layout, options.optimizer)
                    sums[Sum.OPTIMIZER, i] += size / prices.device.optimizer_stream
                    if options.offload_states:
                        states = prices.state_bytes(tensor.name, one.layout, options.optimizer)
                        sums[Sum.OPTIMIZER, i] += exposed_state_seconds(states, size, self.setting.cluster)
                self._stored_memory(sums[:, i], tensor, one)
                if tensor.kind == "input" and not options.local_inputs:
                    whole = Sharding.replicated(atoms_of(tensor))
                    self._add_reshard(sums[:, i], tensor, whole, one.layout, backward=False)
                self._handed_out(sums[:, i], tensor, one.layout)
            self.known[key] = parts_of(sums)
        return (self.known[key],)

    def _stored_memory(self, sums: Floats, tensor: NamedTensor, one: StorageOption) -> None:
        options = self.setting.options
        size = self._gib(tensor.name, one.layout) * (self.setting.stored_share if tensor.kind == "param" else 1.0)
        if tensor.kind != "param":
            whole = Sharding.replicated(atoms_of(tensor))
            inputs = size if options.local_inputs or tensor.kind != "input" else self._gib(tensor.name, whole)
            sums[Sum.KEPT_GIB] += inputs + (size if tensor.kind == "input" and one.layout != whole else 0.0)
            sums[Sum.STEP_GIB] += inputs
            return
        precision, numel = options.precision, size / tensor.dtype.itemsize
        stored = tensor.stored_dtype(precision)
        held = numel * stored.itemsize
        if tensor.requires_grad and self.setting.trains:
            on_device = 0 if options.offload_states else self.optimizer.states
            held += numel * precision.state(tensor.dtype).itemsize * on_device
            kind = sum_dtype(tensor.dtype) if self._accumulates() else stored
            gradient = kind.itemsize / tensor.dtype.itemsize
            stays = self._accumulates() or not any(one.layout.splits)  # sums have a buffer of their own
            sums[Sum.KEPT_GIB] += size * gradient if stays else 0.0
            sums[Sum.STEP_GIB] += size * gradient
        sums[Sum.KEPT_GIB] += held
        sums[Sum.STEP_GIB] += held

    def _accumulates(self) -> bool:
        return self.setting.options.micro_batches > 1

    def _accumulated_bytes(self, tensor: NamedTensor) -> Any:
        prices = self.setting.prices
        return lambda layout: prices.gradient_accumulation(tensor.name, layout).bytes

    def _add_gradients(self, tensor: NamedTensor, node: NamedNode, wants: Sequence[Wants], times: int) -> None:
        """Add the sum of a parameter's gradients, in the sharding of its first user."""
        key = "added", self._cut(tensor), tuple(each[0] for each in wants), times
        if key not in self.known:
            sums = np.zeros((len(Sum), len(wants)))
            for i, each in enumerate(wants):
                if each[0] is not None:
                    self._added(sums[:, i], tensor.name, each[0], times)
            self.known[key] = parts_of(sums)
        self._add_op_parts(node, self.known[key])


# -- shared values -----------------------------------------------------------------------------------------------------


class ValueVariables(ModelBuilder):
    def _value(self, tensor: NamedTensor) -> None:
        node, position = self.makers[tensor.name]
        maker = self.place["op", node.name]
        produced = self._produced(maker, position)
        users = self.setting.users.get(tensor.name, ())
        wants = [self._wants(user, tensor.name) for user in users]
        if not self._is_shared(tensor.name):
            self._add_beyond(maker, tensor, produced)
            self._add_crossing(maker, tensor, produced)
            for user, want in zip(users, wants, strict=True):
                self._add_given(maker, tensor, produced, user, want)
            return
        homes = self._homes(tensor, produced, wants)
        if not homes:
            raise no_option(
                self.bound_layout, node, self.setting.axes, lambda other: self._has_home(tensor, node, other)
            )
        parts = partial(self._home_parts, tensor, homes, len(users))
        place = self._add_by_mode("value", tensor.name, homes, node, parts)
        into = self._into(homes)
        cut, again, share = self.tables.cut(tensor), self.again.runs(node.name), self.setting.prices.share(tensor.name)

        def brought(mode: int) -> CostTable:
            return self.tables.values(cut, produced, into, ValueUse(again[mode], share=share))

        self._add_pairs(maker, place, node, brought)
        self._add_beyond(place, tensor, homes)
        self._add_crossing(place, tensor, homes)
        for user, want in zip(users, wants, strict=True):
            self._add_given(place, tensor, homes, user, want)

    def _add_given(
        self, place: int, tensor: NamedTensor, held: Sequence[Sharding], user: NamedNode, wants: Sequence[Wants]
    ) -> None:
        """Add the reshard of a value for an op."""
        cut, again, share = self.tables.cut(tensor), self.again.takes(user.name), self.setting.prices.share(tensor.name)

        def table(mode: int) -> CostTable:
            sums = None if self._is_shared(tensor.name) else self._partial_sums(user, tensor.name, mode)
            moves = self.again.moves(user.name, mode)
            behind, rerun = user.name in self.behind, self._rerun_for(user, tensor.name, mode)
            here = self._counts_at_user(tensor.name, mode)
            use = ValueUse(
                again[mode], *self._kept_for(user, tensor.name, mode), here, share, sums, moves, behind, rerun
            )
            return self.tables.values(cut, held, wants, use)

        self._add_pairs(place, self.place["op", user.name], user, table)

    def _add_beyond(self, place: int, tensor: NamedTensor, held: Sequence[Sharding]) -> None:
        """Add a value that another layer alone saves: on the device, or by the mode of that layer on the host."""
        keeper = self._keeper_beyond(tensor.name)
        if keeper is None:
            return
        flags = self.again.moved[keeper.name]
        key = "beyond", self._cut(tensor), id(held), flags
        if key not in self.known:
            sums = np.zeros((len(Sum), len(flags), len(held)))
            for mode, moves in enumerate(flags):
                for i, layout in enumerate(held):
                    self._add_kept(sums[:, mode, i], self._gib(tensor.name, layout), moves)
            parts = parts_of(sums)
            table = CostTable(parts, np.arange(len(flags)), np.arange(len(held)))
            self.known[key] = table, {part: rows[0] for part, rows in parts.items()}
        table, fixed = self.known[key]
        if keeper.name in self.again.layers:
            self.factors.append(Factor((self._mode(keeper), place), table))
        else:
            own = self.variables[place]
            self.variables[place] = replace(own, parts=(*own.parts, fixed))

    def _add_crossing(self, place: int, tensor: NamedTensor, held: Sequence[Sharding]) -> None:
        """Add a value that no op saves, and that a recompute of another layer than its maker's reads, by its mode."""
        layer, flags = self.crossing.get(tensor.name, ("", ()))
        if not layer or not self.regather or self.kept.is_kept(tensor.name) or tensor.name in self.handed:
            return
        # The recompute of the last layer reads its operands before all that it makes is there.
        is_last = layer == self.last_layer
        key = "crossing", self._cut(tensor), id(held), flags, is_last
        if key not in self.known:
            sums = np.zeros((len(Sum), len(flags), len(held)))
            for mode, reads in enumerate(flags):
                for i, layout in enumerate(held if reads else ()):
                    self._add_kept(sums[:, mode, i], self._gib(tensor.name, layout), moved=False, is_behind=is_last)
            self.known[key] = CostTable(parts_of(sums), np.arange(len(flags)), np.arange(len(held)))
        self.factors.append(Factor((self.place["recompute", layer], place), self.known[key]))

    def _kept_for(self, user: NamedNode, name: str, mode: int) -> tuple[bool, bool]:
        """Return whether an op saves the resharded value, and whether the value itself is saved for no other op."""
        if self.again.flags(user.name)[mode]:
            return False, False
        maker = self.makers[name][0]
        its = self._mode_of_maker(maker, user, mode)
        only = self.kept.only_for(user.name, name) and self._lives(name, maker, its)
        only = only and not self._enters(self.kept.roots[name], maker, its)
        return (user.name, name) in self.kept.operands, only

    def _rerun_for(self, user: NamedNode, name: str, mode: int) -> ValueUse | None:
        """Return what an op saves when it is recomputed as a part of the last layer; None if it is not."""
        if not self.regather or not self._reruns(user, mode):
            return None
        kept = (user.name, name) in self.kept.operands
        sums = None if self._is_shared(name) else self._partial_sums(user, name, 0)
        return ValueUse(kept=kept, instead=self.kept.only_for(user.name, name), sums=sums) if kept or sums else None

    def _partial_sums(self, user: NamedNode, name: str, mode: int) -> PartialSums | None:
        """Return what becomes of partial sums that an op of the same layer alone uses."""
        maker = self.makers[name][0]
        if not self.setting.shares_layer(maker.name, user.name):
            return None
        its = self._mode_of_maker(maker, user, mode)
        return PartialSums(self.again.runs(maker.name)[its], self._lives(name, maker, its))

    def _mode_of_maker(self, maker: NamedNode, user: NamedNode, mode: int) -> int:
        """Return the mode of a maker's layer, given that of a user's."""
        return mode if self.again.layers.get(maker.name) == self.again.layers.get(user.name) else 0

    def _produced(self, maker: int, position: int) -> tuple[Sharding, ...]:
        options = self.variables[maker].states
        key = "produced", id(options), position
        if key not in self.known:
            self.known[key] = tuple(option.produced[position] for option in options)
        found: tuple[Sharding, ...] = self.known[key]
        return found

    def _homes(
        self, tensor: NamedTensor, produced: tuple[Sharding, ...], wants: Sequence[tuple[Wants, ...]]
    ) -> tuple[Sharding, ...]:
        handed, token = tuple(self.handed.get(tensor.name, ())), self.bound_layout.stored_key(tensor)
        key = "homes", self._cut(tensor), id(produced), tuple(map(id, wants)), handed, token
        if key not in self.known:
            found = dict.fromkeys(produced)
            found.update(dict.fromkeys(want for each in wants for one in each for want in one if want is not None))
            is_handed = tensor.name in self.handed
            if is_handed or self.bound_layout.constrains(tensor):
                found.update(dict.fromkeys(resolved for layout in produced for resolved in _resolved(layout)))
                found.update(
                    dict.fromkeys(each for layout in produced for each in self.bound_layout.close(tensor, layout))
                )
            kept = [home for home in found if self.bound_layout.allows_value(tensor, home)]
            if is_handed:
                atoms = atoms_of(tensor)
                kept = [home for home in kept if is_dtensor_sharding(home, atoms, self.setting.axes)]
            self.known[key] = tuple(kept)
        homes: tuple[Sharding, ...] = self.known[key]
        return homes

    def _into(self, homes: tuple[Sharding, ...]) -> tuple[Wants, ...]:
        key = "into", id(homes)
        if key not in self.known:
            self.known[key] = tuple((home,) for home in homes)
        found: tuple[Wants, ...] = self.known[key]
        return found

    def _has_home(self, tensor: NamedTensor, node: NamedNode, bound_layout: BoundLayout) -> bool:
        """Return whether a value can be kept in the sharding that another statement requires."""
        position = node.outputs.index(tensor.name)
        options = options_of(self.setting, bound_layout, node)
        found = [layout for option in options if (layout := option.produced[position]) is not None]
        found += [closed for layout in found for closed in bound_layout.close(tensor, layout)]
        atoms, is_handed = atoms_of(tensor), tensor.name in self.handed
        if is_handed:
            found = [home for home in found if is_dtensor_sharding(home, atoms, self.setting.axes)]
        return any(bound_layout.allows_value(tensor, home) for home in found)

    def _home_parts(self, tensor: NamedTensor, homes: tuple[Sharding, ...], users: int, mode: int) -> Parts:
        maker = self.makers[tensor.name][0]
        kept, leaves = self._counts(tensor.name, maker, mode), self._leaves(tensor.name, maker, mode)
        # A returned value lives until the step ends, also if nothing saves it.
        kept = kept or (tensor.name in self.handed and self.kept.roots[tensor.name] not in self.kept.keepers)
        behind, back = self._is_behind(tensor.name), self.regather and self._comes_back(tensor.name, maker, mode)
        handed = tuple(self.handed.get(tensor.name, ()))
        key = "home", self._cut(tensor), id(homes), users, handed, kept, leaves, behind, back
        if key not in self.known:
            sums = np.zeros((len(Sum), len(homes)))
            for i, home in enumerate(homes):
                if kept:
                    self._add_kept(sums[:, i], self._gib(tensor.name, home), leaves, behind)
                if back:
                    self._add_rerun(sums[:, i], self._gib(tensor.name, home))
                if tensor.requires_grad and self.setting.trains and users > 1:
                    self._added(sums[:, i], tensor.name, home, users - 1)
                self._handed_out(sums[:, i], tensor, home)
            self.known[key] = parts_of(sums)
        parts: Parts = self.known[key]
        return parts


def _resolved(layout: Sharding) -> list[Sharding]:
    """Return the shardings that a partial value can be reduced to: whole, or split along one of its dims."""
    found = [Sharding(layout.splits)]
    for axis in sorted(layout.partial):
        further = []
        for one in found:
            every = ((*one.splits[:i], (*one.splits[i], axis), *one.splits[i + 1 :]) for i in range(len(one.splits)))
            further += [one, *map(Sharding, every)]
        found = further
    return found
