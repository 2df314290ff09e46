"""A bound in which a reshard for several ops counts once, as in `evaluate`; the model counts it for each op.

Each op that takes a tensor in one sharding pays a share of the reshard. If no set of ops pays more than all of it
together, the least sum of the model is a lower bound. Shares are multipliers: the best ones give the highest bound.
They follow the minimum by subgradients with the steps of Polyak. The minimum of the model itself is at least as high
as any such bound, and ends the steps.

Two kinds of sets need no shares. If all ops take a value in one sharding, it may as well be kept so: that state then
costs what the cheapest way to it costs, a reshard from another kept sharding included. A parameter has states that are
resharded once for all ops. So shares matter to values of three ops and more, and to parameters of four and more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from autopar.solver import Flags, Floats
from autopar.solver.model.cost_tables import weigh
from autopar.solver.model.model import FactorByMode, Model
from autopar.solver.model.objective import MEMORY, Sum
from autopar.solver.model.shared_reshards import SharedTensor, shared_tensors
from autopar.solver.search.shared_prices import SharedPrices, at_mode
from autopar.solver.search.simplex import lifted, on_simplex
from autopar.solver.search.ways_to_keep import WaysToKeep

__all__ = ["ReshardShares"]

# Sums of what is saved: memory, and copies to the host and back.
_IS_SAVING = np.isin(np.arange(len(Sum)), (*MEMORY, Sum.COPIES))
# Shares, and differences of them, that count as zero.
TINY = 1e-12


@dataclass(eq=False)
class ReshardShares:
    """Shares of the shared reshards of a model.

    `is_whole`: the minimum is that of all assignments. In a part of them, a value may not be kept in another sharding.
    """

    model: Model
    is_whole: bool = True
    groups: tuple[_SharingGroup, ...] = field(init=False)

    def __post_init__(self) -> None:
        found: dict[object, _SharingGroup] = {}
        numbers: dict[int, list[int]] = {}
        for number, factor in enumerate(self.model.factors):
            for node in factor.scope:
                numbers.setdefault(node, []).append(number)
        for one in shared_tensors(self.model):
            incident = numbers.get(one.place, [])
            tables = tuple(id(self.model.factors[number].table) for number in incident)
            uses = tuple(
                (
                    *(use.factor is None, use.again, use.saves, use.moves, use.is_behind),
                    id(self.model.variables[use.place].states),
                )
                for use in one.uses
            )
            layer = one.is_in_layer, one.is_made_in_layer
            key = one.tensor.kind, self.model.costs.kinds[one.place], tables, uses, layer, one.returned
            ways = WaysToKeep.of(self.model, one, incident)
            if key not in found:
                found[key] = _SharingGroup(self.model, one, ways if self.is_whole else None)
            found[key].members.append((one, ways))
        self.groups = tuple(group for group in found.values() if group.matters)

    def discount(self, costs: list[Floats], tables: list[Floats], weights: Floats) -> None:
        """Replace weighted costs and tables by those in which no reshard counts more than once."""
        for group in self.groups:
            group.discount(costs, tables, weights)

    def counted_again(self, chosen: Sequence[int]) -> Floats:
        """Return what the sums of an assignment count for the second op and later ones of a shared reshard."""
        total = np.zeros(len(Sum))
        for group in self.groups:
            group.add_counted_again(total, chosen)
        return total

    def best_kept(
        self, chosen: Sequence[int], weights: Floats, costs_of: Callable[[int, Sequence[int]], Floats]
    ) -> list[int]:
        """Return an assignment whose shared tensors are kept as is best beside the others, each reshard paid once.

        `costs_of` returns the costs of all states of a variable beside the others.
        """
        found = list(chosen)
        for group in self.groups:
            for one in (one for one, _ in group.members):
                total = costs_of(one.place, found) - group.counted_again(one, found, weights)
                if total.min() < total[found[one.place]] - TINY:
                    found[one.place] = int(total.argmin())
        return found

    def begin(self, chosen: Sequence[int]) -> None:
        """Give the shares to the ops that take a tensor in one sharding in a good assignment."""
        for group in self.groups:
            for (want, row), takes in group.taken(chosen).items():
                group.set_shares(want, row, takes / takes.sum())

    def improve(self, chosen: Sequence[int], weights: Floats, missing: float) -> bool:
        """Move shares along a subgradient at a minimum that is below the target by `missing`.

        A minimum shows one state of each tensor. The others have much the same shares, so they move with it.
        Return False if no move raises the minimum.
        """
        moves = [
            (group, want, row, direction)
            for group in self.groups
            for (want, row), direction in group.directions(chosen, weights).items()
        ]
        norm = sum(float(direction @ direction) for *_, direction in moves)
        for group, want, _, direction in moves:
            move = missing / norm * direction
            for row in range(len(group.states)):
                group.set_shares(want, row, on_simplex(group.shares[want][:, row] + move))
        return norm > 0.0


class _SharingGroup:
    """Tensors whose costs are equal: one set of shares serves all."""

    def __init__(self, model: Model, one: SharedTensor, ways: WaysToKeep | None) -> None:
        self.model = model
        self.one = one
        self.members: list[tuple[SharedTensor, WaysToKeep | None]] = []
        self.wants = one.wants
        self.takes = [
            np.array([[want in each for each in use.wants] for want in self.wants], dtype=float).reshape(
                len(self.wants), len(use.wants)
            )
            for use in one.uses
        ]
        self.states = model.variables[one.place].states
        self.takers: Flags = np.stack([takes.any(axis=1) for takes in self.takes])
        self.homes = {} if ways is None or one.tensor.kind == "param" else self._homes()
        self.largest = [self._largest_set(number) for number in range(len(self.wants))]
        self.returned: Flags = np.array(
            [[want in each for want in self.wants] for each in one.returned], dtype=np.bool_
        )
        self.prices = SharedPrices(model, one, self.wants, self.returned)
        self.active = [want for want, most in enumerate(self.largest) if most > 1 or self.returned[:, want].any()]
        counts = self.takers.sum(axis=0)
        self.shares = [
            np.repeat((own / count)[:, None], len(self.states), axis=1)
            for own, count in zip(self.takers.T.astype(float), counts, strict=True)
        ]
        self.paid = [
            np.repeat(
                lifted(shares[:, 0], self.takers[:, number], self.largest[number])[:, None], shares.shape[1], axis=1
            )
            for number, shares in enumerate(self.shares)
        ]

    @property
    def matters(self) -> bool:
        return bool(self.homes or self.active)

    def _homes(self) -> dict[int, int]:
        """Return the state that is each sharding which all ops may take."""
        if any(len(each) > 1 for use in self.one.uses for each in use.wants):
            return {}
        is_value = self.one.tensor.kind == "activation"
        places = {one if is_value else one.layout: i for i, one in enumerate(self.states)}
        every = [want for i, want in enumerate(self.wants) if self.takers[:, i].all()]
        return {self.wants.index(want): places[want] for want in every if want in places}

    def _largest_set(self, want: int) -> int:
        """Return the size of the largest set of ops whose shares may sum to no more than one."""
        count = len(self.one.uses)
        most = int(self.takers[:, want].sum())
        if want in self.homes:
            return count - 1
        takes_one = all(len(each) < 2 for use in self.one.uses for each in use.wants)
        # The largest set of ops has a state of its own.
        return min(most, count // 2) if self.one.tensor.kind == "param" and takes_one else most

    # -- weighted costs

    def discount(self, costs: list[Floats], tables: list[Floats], weights: Floats) -> None:
        if self.homes:
            self._discount_homes(costs, tables, weights)
        prices = {flag: self.prices.alone_and_together(weights, flag) for flag in self.prices.reshards if self.active}
        for i, use in enumerate(self.one.uses):
            own = [want for want in self.active if self.takers[i, want]]
            if use.factor is None or not own:
                continue
            old = tables[use.factor]
            count = len(old) if old.ndim == 3 else 1
            less = [self._discounted(i, own, prices, mode) for mode in range(count)]
            new = old - (np.stack(less) if old.ndim == 3 else less[0])
            self._set_table(i, tables, new)

    def _discounted(self, i: int, wants: list[int], prices: Mapping[bool, tuple[Floats, Floats]], mode: int) -> Floats:
        """Return by how much less an op pays in a mode, for each state of the tensor and each of its options."""
        flag = i > 0 if self.one.tensor.kind == "param" else at_mode(self.one.uses[i].again, mode)
        alone, once = prices[flag][0][:, wants], prices[at_mode(self.prices.least, mode)][1][:, wants]
        paid = np.array([self.paid[want][i] for want in wants]).T
        # What the ops gain together, each may gain alone.
        less = alone - np.where(once < 0.0, once, paid * once)
        return np.asarray(less @ self.takes[i][wants])

    def _discount_homes(self, costs: list[Floats], tables: list[Floats], weights: Floats) -> None:
        """Let each state cost what it costs to keep the tensor otherwise, and to reshard it once for all ops."""
        _, ways = self.members[0]
        assert ways is not None, "contracts bear on no tensor with ways"
        own, by_mode = costs[self.one.place], [tables[number] for number in ways.modes]
        old = None if ways.maker is None else tables[ways.maker]
        via = self._via(own, by_mode, ways, weights, len(old) if old is not None and old.ndim == 3 else 1)
        homes = list(self.homes.values())
        if self._saver is not None:
            self._discount_unsaved(self._saver, tables, weights)
        # The memory of the value where the recompute of another layer keeps it.
        by_reader = np.zeros((0, len(own))) if ways.crossing is None else tables[ways.crossing].copy()
        if old is None:
            new = own.copy()
            least = np.minimum(0.0, via.min(axis=(0, 1)))
            new[homes] += least
            for place, home in enumerate(homes):
                more = by_reader - by_reader[:, [home]]
                by_reader[:, home] += np.minimum(0.0, (via[:, :, place].min(axis=0) + more).min(axis=-1)) - least[place]
            for other, _ in self.members:
                costs[other.place] = new
        else:
            new = old.copy()
            for place, home in enumerate(homes):
                others = via[:, :, place] if old.ndim == 3 else via[:, :, place].min(axis=0)
                every = old + others[..., None, :]
                new[..., home] = np.minimum(old[..., home], every.min(axis=-1))
                for mode, row in enumerate(by_reader - by_reader[:, [home]]):
                    here = np.minimum(old[..., home], (every + row).min(axis=-1))
                    by_reader[mode, home] += (here - new[..., home]).min()
        for _, one in self.members:
            assert one is not None, "members have equal factors"
            if old is not None:
                assert one.maker is not None, "members have equal factors"
                tables[one.maker] = new
            if one.crossing is not None:
                tables[one.crossing] = by_reader

    def _via(self, own: Floats, by_mode: list[Floats], ways: WaysToKeep, weights: Floats, modes: int) -> Floats:
        """Return by how much more it costs to keep the tensor in each state and to reshard it once than in each home.

        The first axis is the mode of the op that makes it. Where an op saves what it takes, the copy in the sharding
        of the home is saved, whatever is kept.
        """
        numbers, homes = list(self.homes), list(self.homes.values())
        saving = np.where(_IS_SAVING, weights, 0.0)
        kept = self._kept(weights)
        rerun = np.maximum(self._kept(np.where(np.arange(len(Sum)) == Sum.RERUN_GIB, weights, 0.0)), 0.0)
        kept_by_mode = [self.model.factors[number].table.weighted(saving) for number in ways.modes]
        # All ops but one add their gradients as they take the value.
        added = (len(self.one.uses) - 1) * self.prices.added(weights)[:, numbers]
        found = []
        for mode in range(max([modes, *map(len, by_mode)])):
            direct = total = own + sum(table[mode] for table in by_mode)
            copies: float | Floats = 0.0
            if self._saver is not None or self._is_saved(mode):
                kept_here = kept + sum(table[mode] for table in kept_by_mode)
                total, copies = total - kept_here, kept_here[homes]
                if not self._is_moved(mode):
                    copies = self._saved_copies(homes, weights)
            else:  # of a recomputed layer the copy may be smaller than what is kept
                total = total - rerun
            prices, is_inside = self.prices, self.one.is_made_in_layer
            flag = at_mode(prices.least, mode) if is_inside else prices.least_of_all
            once = prices.unpaid(weights, flag)[:, numbers]
            found.append(once + added + total[:, None] + copies - direct[None, homes])
        return np.stack(found)

    @cached_property
    def _saver(self) -> int | None:
        """Return an op of another layer than the one that makes the value, in some of whose modes the value is saved.

        Its table tells the mode; that of the op that makes the value does not.
        """
        _, ways = self.members[0]
        if ways is None or ways.modes or self.one.is_made_in_layer or not self.one.is_in_layer:
            return None
        saved = [self._is_saved_in(mode) for mode in range(max(len(use.saves) for use in self.one.uses))]
        by_mode = (i for i, use in enumerate(self.one.uses) if self._is_by_mode(use.factor))
        return next(by_mode, None) if any(saved) and not all(saved) else None

    def _is_by_mode(self, factor: int | None) -> bool:
        return factor is not None and isinstance(self.model.factors[factor].table, FactorByMode)

    def _discount_unsaved(self, saver: int, tables: list[Floats], weights: Floats) -> None:
        """Let homes take the least memory of any state in modes in which no op saves the value as it takes it.

        A recompute that takes it from another state reshards it again.
        """
        factor = self.one.uses[saver].factor
        assert factor is not None, self.one.tensor.name
        kept, new, homes = self._kept(weights), tables[factor].copy(), list(self.homes.values())
        for mode in range(len(new)):
            if not self._is_saved_in(mode):
                least = (kept[:, None] + self._again(mode, weights)).min(axis=0)
                new[mode, homes] -= (kept[homes] - least)[:, None]
        self._set_table(saver, tables, new)

    def _again(self, mode: int, weights: Floats) -> Floats:
        """Return what one more reshard from each state to each home costs, if a recompute in this mode has it.

        It has the reshard if it brings it to the first op that takes the value, as `evaluate` counts it.
        """
        numbers = list(self.homes)
        if not at_mode(self.one.uses[0].again, mode) or self.prices.least_of_all:
            return np.zeros((len(self.states), len(numbers)))
        return (self.prices.reshard(weights, True) - self.prices.reshard(weights, False))[:, numbers]

    def _kept(self, weights: Floats) -> Floats:
        """Return the weighted memory of each state alone."""
        saving = np.where(_IS_SAVING, weights, 0.0)
        parts = self.model.variables[self.one.place].parts
        return sum((weigh(each, saving) for each in parts), np.zeros(len(self.states)))

    def _set_table(self, use: int, tables: list[Floats], table: Floats) -> None:
        """Replace the table of an op in all equal tensors."""
        for other, _ in self.members:
            number = other.uses[use].factor
            assert number is not None, other.tensor.name
            tables[number] = table

    def _is_saved_in(self, mode: int) -> bool:
        return any(at_mode(use.saves, mode) for use in self.one.uses)

    def _is_saved(self, mode: int) -> bool:
        """Return whether an op saves what it takes, in a mode of the layer or in all modes where layers differ."""
        if self.one.is_made_in_layer:
            return self._is_saved_in(mode)
        return any(all(use.saves) for use in self.one.uses)

    def _is_moved(self, mode: int) -> bool:
        return any(at_mode(use.moves, mode) if self.one.is_made_in_layer else any(use.moves) for use in self.one.uses)

    def _saved_copies(self, homes: list[int], weights: Floats) -> Floats:
        """Return the weighted memory of a saved copy in the sharding of each home."""
        made, setting = self.model.cost_tables, self.model.setting
        cut = made.cut(self.one.tensor)
        is_value = self.one.tensor.kind == "activation"
        layouts = [self.states[home] if is_value else self.states[home].layout for home in homes]
        sizes = [made.ways.gib(cut, layout) for layout in layouts]
        price = weights[Sum.KEPT_GIB]
        if all(use.is_behind for use in self.one.uses if any(use.saves)):
            price -= weights[Sum.RERUN_GIB]  # the copy is gone when the last layer is recomputed
        return np.asarray(price * setting.saved_share * np.array(sizes))

    def add_counted_again(self, total: Floats, chosen: Sequence[int]) -> None:
        parts = self.prices.reshards[self.prices.least_of_all]
        for one, _ in self.members:
            row, takers = chosen[one.place], self._taken_by(one, chosen).sum(axis=0)
            for want in np.flatnonzero(takers).tolist():
                again = takers[want] - 1
                for key, values in parts.items():
                    total[key] += (again + self.returned[row, want]) * values[row, want]
                for key, values in self.prices.additions.items():
                    total[key] -= again * values[row, want]

    def counted_again(self, one: SharedTensor, chosen: Sequence[int], weights: Floats) -> Floats:
        """Return what `add_counted_again` adds for each state of a tensor, weighted."""
        takers = self._taken_by(one, chosen).sum(axis=0)
        again = np.maximum(takers - 1, 0)
        reshards = (again + self.returned * (takers > 0)) * self.prices.reshard(weights, self.prices.least_of_all)
        return np.asarray((reshards - again * self.prices.added(weights)).sum(axis=1))

    # -- shares

    def _taken_by(self, one: SharedTensor, chosen: Sequence[int]) -> Floats:
        """Return which shardings each op takes."""
        return np.array([takes[:, chosen[use.place]] for takes, use in zip(self.takes, one.uses, strict=True)])

    def taken(self, chosen: Sequence[int]) -> dict[tuple[int, int], Floats]:
        """Return how often each op takes a sharding of which it pays a share, by the sharding and the kept state."""
        found: dict[tuple[int, int], Floats] = {}
        for one, _ in self.members if self.active else ():
            takes = self._taken_by(one, chosen)
            for want in self.active:
                key = want, chosen[one.place]
                if takes[:, want].any() and self.largest[want] > 1 and not self.returned[key[1], want]:
                    found[key] = found.get(key, 0.0) + takes[:, want]
        return found

    def directions(self, chosen: Sequence[int], weights: Floats) -> dict[tuple[int, int], Floats]:
        """Return the subgradients of the minimum, without what would leave the simplex."""
        taken = self.taken(chosen)
        if not taken:
            return {}
        _, together = self.prices.alone_and_together(weights, self.prices.least_of_all)
        prices = np.maximum(together, 0.0)
        found = {}
        for (want, row), takes in taken.items():
            gains = prices[row, want] * takes
            moves = self.takers[:, want].copy()
            while True:
                direction = np.where(moves, gains - gains[moves].mean(), 0.0)
                stays = moves & (self.shares[want][:, row] <= TINY) & (direction < 0)
                if not stays.any():
                    break
                moves &= ~stays
            if np.abs(direction).max() > TINY * gains.max():
                found[want, row] = direction
        return found

    def set_shares(self, want: int, row: int, shares: Floats) -> None:
        self.shares[want][:, row] = shares
        self.paid[want][:, row] = lifted(shares, self.takers[:, want], self.largest[want])
