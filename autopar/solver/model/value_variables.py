"""The values of a model: the layouts in which they are kept, and what brings them there and to the ops."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from autopar.ir.values import NamedNode, NamedTensor
from autopar.sharding.bound_layout import BoundLayout
from autopar.sharding.sharding import Sharding, atoms_of
from autopar.solver.candidates import can_be_held, options_of
from autopar.solver.infeasible.errors import no_option
from autopar.solver.model.builder import ModelBuilder, parts_of
from autopar.solver.model.cost_tables import CostTable, Parts, ValueUse, Wants
from autopar.solver.model.objective import Sum

__all__ = ["ValueVariables"]


class ValueVariables(ModelBuilder):
    def _value(self, tensor: NamedTensor) -> None:
        node, position = self.makers[tensor.name]
        maker = self.place["op", node.name]
        produced = self._produced(maker, position)
        users = self.setting.users.get(tensor.name, ())
        wants = [self._wants(user, tensor.name) for user in users]
        if not self._is_shared(tensor.name):
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
        cut, again, share = self.tables.cut(tensor), self.again.flags(node.name), self.setting.prices.share(tensor.name)

        def brought(mode: int) -> CostTable:
            return self.tables.values(cut, produced, into, ValueUse(again[mode], share=share))

        self._add_pairs(maker, place, node, brought)
        for user, want in zip(users, wants, strict=True):
            self._add_given(place, tensor, homes, user, want)

    def _add_given(
        self, place: int, tensor: NamedTensor, held: Sequence[Sharding], user: NamedNode, wants: Sequence[Wants]
    ) -> None:
        """A value, as an op takes it."""
        cut, again, share = self.tables.cut(tensor), self.again.flags(user.name), self.setting.prices.share(tensor.name)

        def table(mode: int) -> CostTable:
            return self.tables.values(
                cut, held, wants, ValueUse(again[mode], *self._kept_for(user, tensor.name, mode), share)
            )

        self._add_pairs(place, self.place["op", user.name], user, table)

    def _kept_for(self, user: NamedNode, name: str, mode: int) -> tuple[bool, bool]:
        """Whether an op keeps what is converted for it; whether the value itself is kept for no other."""
        if self.again.flags(user.name)[mode]:
            return False, False
        maker = self.makers[name][0]
        is_own = self.again.layers.get(maker.name) == self.again.layers.get(user.name)
        its = mode if is_own else 0
        only = self.kept.only_for(user.name, name) and self._lives(name, maker, its)
        only = only and not self._enters(self.kept.roots[name], maker, its)
        return (user.name, name) in self.kept.operands, only

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
                kept = [home for home in kept if can_be_held(home, atoms, self.setting.axes)]
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
        """Whether a value can be kept as another layout requires, however it is taken."""
        position = node.outputs.index(tensor.name)
        options = options_of(self.setting, bound_layout, node)
        found = [layout for option in options if (layout := option.produced[position]) is not None]
        found += [closed for layout in found for closed in bound_layout.close(tensor, layout)]
        atoms, is_handed = atoms_of(tensor), tensor.name in self.handed
        return any(
            bound_layout.allows_value(tensor, home) and (not is_handed or can_be_held(home, atoms, self.setting.axes))
            for home in found
        )

    def _home_parts(self, tensor: NamedTensor, homes: tuple[Sharding, ...], users: int, mode: int) -> Parts:
        kept = self._lives(tensor.name, self.makers[tensor.name][0], mode) or self._only_handed_out(tensor.name)
        key = "home", self._cut(tensor), id(homes), users, tuple(self.handed.get(tensor.name, ())), kept
        if key not in self.known:
            sums = np.zeros((len(Sum), len(homes)))
            for i, home in enumerate(homes):
                sums[Sum.KEPT_GIB, i] += self._gib(tensor.name, home) if kept else 0.0
                if tensor.requires_grad and self.setting.trains and users > 1:
                    self._added(sums[:, i], tensor.name, home, users - 1)
                self._handed_out(sums[:, i], tensor, home)
            self.known[key] = parts_of(sums)
        parts: Parts = self.known[key]
        return parts

    def _only_handed_out(self, name: str) -> bool:
        """Whether a value lives because it is a result, and for nothing else."""
        return name in self.handed and self.kept.roots[name] not in self.kept.keepers


def _resolved(layout: Sharding) -> list[Sharding]:
    """What a sum may be brought into: whole, or split along one of its dims."""
    found = [Sharding(layout.splits)]
    for axis in sorted(layout.partial):
        found = [
            made for one in found for made in (one, *(_with(one, place, axis) for place in range(len(layout.splits))))
        ]
    return found


def _with(layout: Sharding, place: int, axis: str) -> Sharding:
    return Sharding(tuple((*axes, axis) if i == place else axes for i, axes in enumerate(layout.splits)))
