"""Reshard costs that begin as lower bounds and become exact where a search looks.

Memory is left out, and so are sums of gradients on the device, which only add to the seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.cost.compute.op_time import FLOAT8_LAUNCHES
from autopar.ir.values import NamedTensor
from autopar.sharding.sharding import Sharding
from autopar.solver import Floats, Ints
from autopar.solver.candidates import StorageOption
from autopar.solver.model.bucket_shares import Joinable
from autopar.solver.model.cost_tables import (
    CostTable,
    CostTables,
    ParameterUse,
    PartialSums,
    Parts,
    ValueUse,
    Wants,
    distinct_wants,
    numbered,
    summed_over_wants,
)
from autopar.solver.model.objective import MEMORY, Sum
from autopar.solver.model.reshard_bounds import LeastCosts, ReshardBounds
from autopar.solver.model.reshard_sums import TensorCut
from autopar.solver.model.shared_reshards import sum_parts
from autopar.solver.setting import PlanningProblem

__all__ = ["RelaxedCosts", "RelaxedTables"]


@dataclass(frozen=True, eq=False)
class RelaxedCosts:
    """Costs of pairs of shardings: lower bounds, and exact ones where they are asked for."""

    rows: Sequence[Any]
    columns: Sequence[Wants]
    parts: dict[Sum, Floats]
    is_exact: NDArray[np.bool_]
    exact: Callable[[Sequence[Any], Sequence[Wants]], Parts]

    def price(self, rows: Ints, columns: Ints) -> int:
        """Make all pairs of some rows and columns exact; return how many were not."""
        rows = rows[~self.is_exact[np.ix_(rows, columns)].all(axis=1)]
        if not len(rows):
            return 0
        at = np.ix_(rows, columns)
        count = int((~self.is_exact[at]).sum())
        found = self.exact([self.rows[i] for i in rows], [self.columns[j] for j in columns])
        for key, values in self.parts.items():
            values[at] = found.get(key, 0.0)
        self.is_exact[at] = True
        return count


class RelaxedTables(CostTables):
    """Cache of the relaxed tables of one planning problem."""

    def __init__(self, setting: PlanningProblem) -> None:
        super().__init__(setting)
        self.bounds = ReshardBounds(setting.prices.reshard_costs, tuple(setting.used))
        # By the identity of their parts.
        self.relaxed: dict[int, RelaxedCosts] = {}
        # By the identity of the relaxed costs.
        self.additions: dict[int, Parts | None] = {}

    def values(self, cut: TensorCut, sources: Sequence[Sharding], wants: Sequence[Wants], use: ValueUse) -> CostTable:
        sums = None if use.sums is None else PartialSums(use.sums.again, lives=False)
        return super().values(
            cut, sources, wants, use._replace(kept=False, instead=False, here=False, sums=sums, moved=False)
        )

    def added(self, tensor: NamedTensor, costs: RelaxedCosts) -> Parts | None:
        """Return `sum_parts` of a value for all rows and columns; None if they are all zero."""
        if id(costs) not in self.additions:
            wants = distinct_wants(costs.columns)
            place = {want: i for i, want in enumerate(wants)}
            parts = sum_parts(self, tensor, costs.rows, wants)
            over = {key: summed_over_wants(each, costs.columns, place, len(costs.rows)) for key, each in parts.items()}
            self.additions[id(costs)] = over or None
        return self.additions[id(costs)]

    def _made(
        self,
        key: Any,
        rows: Sequence[Any],
        columns: Sequence[Wants],
        made: Callable[[Sequence[Any], Sequence[Wants]], Parts],
        casts: NamedTensor | None = None,
    ) -> Parts:
        kind, cut, use, *_ = key
        shape = len(rows), len(columns)
        parts = {part: np.zeros(shape) for part in Sum if part not in MEMORY}
        if cut.roles:
            parts[Sum.FORBIDDEN] += self._unreached(cut, rows, columns)
        if not cut.by_share:
            if kind == "values":
                self._value_bounds(parts, cut, rows, columns, use)
            else:
                self._parameter_bounds(parts, cut, rows, columns, use, casts)
        is_exact = np.zeros(shape, dtype=bool)
        if kind == "values":  # a value that is taken as it is kept costs nothing
            place = {row: i for i, row in enumerate(rows)}
            for j, wants in enumerate(columns):
                for i in (place[want] for want in wants if want in place):
                    is_exact[i, j] = all(want in (rows[i], None) for want in wants)
        self.relaxed[id(parts)] = RelaxedCosts(rows, columns, parts, is_exact, made)
        return parts

    def _unreached(self, cut: TensorCut, rows: Sequence[Any], columns: Sequence[Wants]) -> Floats:
        """Return 1.0 for the pairs of routed rows that no steps join, whatever splits the other dims."""

        held = [getattr(one, "layout", one).routed(cut.roles) for one in rows]
        wanted = [tuple(want.routed(cut.roles) for want in each if want is not None) for each in columns]
        ends = set(held), {want for each in wanted for want in each}
        missing = {pair for pair in product(*ends) if cut.steps(self.ways.routes, *pair) is None}
        return np.array([[float(any((one, want) in missing for want in each)) for each in wanted] for one in held])

    def _value_bounds(
        self,
        parts: dict[Sum, Floats],
        cut: TensorCut,
        rows: Sequence[Sharding],
        columns: Sequence[Wants],
        use: ValueUse,
    ) -> None:
        wants = distinct_wants(columns)
        there = self.bounds.between(cut.sizes, cut.itemsize, [s.value for s in rows], [t.value for t in wants])
        share, again = min(1.0, use.share), float(use.again and (use.sums is None or use.sums.again))
        forward, host = share * (there.seconds + there.latency), share * (1.0 + again) * there.host_seconds
        backward = again * forward
        if cut.trained:
            back = self._back(cut, rows, wants, cut.itemsize)
            backward, host = backward + back.seconds + back.latency, host + back.host_seconds
        at = {want: i for i, want in enumerate(wants)}
        # Two messages of a half take at least as long as one of both.
        ways = (Sum.FORWARD_EACH, Sum.BACKWARD_EACH) if cut.halved else (Sum.DEVICE, Sum.DEVICE)
        for key, seconds in (*zip(ways, (forward, backward), strict=True), (Sum.HOST, host)):
            parts[key] += summed_over_wants(seconds, columns, at, len(rows))

    def _parameter_bounds(
        self,
        parts: dict[Sum, Floats],
        cut: TensorCut,
        rows: Sequence[StorageOption],
        columns: Sequence[Wants],
        use: ParameterUse,
        casts: NamedTensor | None,
    ) -> None:
        wants = distinct_wants(columns)
        stored, place = numbered([one.layout for one in rows])
        there = self.bounds.between(cut.sizes, cut.gathered, [s.value for s in stored], [t.value for t in wants])
        back = self._back(cut, stored, wants, cut.reduced) if cut.trained else None
        fills, share = self._bucket_share(cut, stored, wants, there, back, use.gathered)
        _, splits = numbered([one.splits for one in (*stored, *wants)])
        own, taken = splits[: len(stored)], splits[len(stored) :]
        lasting = np.array([one.lasting for one in rows])[:, None]
        deferred = (own[place][:, None] == taken[None, :]) | lasting
        waits = deferred | use.later

        at = {want: i for i, want in enumerate(wants)}

        def add(each: Sum, once: Sum, least: LeastCosts, is_once: NDArray[np.bool_]) -> None:
            seconds = (np.where(fills, least.seconds, 0.0) + share * least.latency)[place]
            host = (share * least.host_seconds)[place]
            parts[each] += summed_over_wants(np.where(is_once, 0.0, seconds), columns, at, len(rows))
            parts[once] += summed_over_wants(np.where(is_once, seconds, 0.0), columns, at, len(rows))
            parts[Sum.HOST] += summed_over_wants(np.where(is_once, 0.0, host), columns, at, len(rows))
            parts[Sum.HOST_ONCE] += summed_over_wants(np.where(is_once, host, 0.0), columns, at, len(rows))

        add(Sum.FORWARD_EACH, Sum.FORWARD_ONCE, there, np.broadcast_to(lasting, waits.shape))
        if back is not None:
            add(Sum.BACKWARD_EACH, Sum.BACKWARD_ONCE, back, waits)
        if casts is not None and wants:
            firsts = [next(iter(each), None) for each in columns]
            first = [0 if one is None else at[one] for one in firsts]
            self._add_casts(parts, casts, rows, firsts, deferred[:, first])

    def _add_casts(
        self,
        parts: dict[Sum, Floats],
        tensor: NamedTensor,
        rows: Sequence[StorageOption],
        firsts: Sequence[Sharding | None],
        deferred: NDArray[np.bool_],
    ) -> None:
        """Add the casts of a parameter and of its gradient, as `ReshardSums` does for each pair.

        `firsts` has the first sharding of each column, and `deferred` whether the gradient waits for the last
        micro-batch.
        """
        prices, shape = self.setting.prices, deferred.shape
        taken = np.array([first is not None for first in firsts])
        lasting = np.array([one.lasting for one in rows])[:, None]
        stored = np.array([prices.cast_bytes(tensor.name, one.layout) for one in rows])[:, None]

        def add(sizes: Floats, room: Sum, once: NDArray[np.bool_], launches: int = 1) -> None:
            distinct, place = np.unique(np.where(taken, sizes, 0.0), return_inverse=True)
            for flag in (False, True):
                each = [self.ways.cast_sums(float(size), room, flag, launches) for size in distinct]
                for key in {key for sums in each for key in sums}:
                    values = np.array([sums.get(key, 0.0) for sums in each])[place].reshape(shape)
                    parts[key] += np.where(once == flag, values, 0.0)

        add(np.broadcast_to(stored, shape), Sum.FORWARD_ROOM, np.broadcast_to(lasting, shape))
        if prices.casts_apart(tensor.name):
            sizes = np.array([0.0 if one is None else prices.weight_cast_bytes(tensor.name, one) for one in firsts])
            for room in (Sum.FORWARD_ROOM, Sum.BACKWARD_ROOM)[: 1 + self.setting.trains]:
                add(np.broadcast_to(sizes, shape), room, deferred, FLOAT8_LAUNCHES)
        if not (tensor.requires_grad and self.setting.trains):
            return
        after = np.array([prices.stored_cast_bytes(tensor.name, one.layout) for one in rows])[:, None]
        before = np.array(
            [
                [0.0 if one is None else prices.reduced_cast_bytes(tensor.name, one, summed) for one in firsts]
                for summed in (False, self.setting.options.micro_batches > 1)
            ]
        )
        add(after + np.where(deferred, before[1], before[0]), Sum.BACKWARD_ROOM, deferred)

    def _bucket_share(
        self,
        cut: TensorCut,
        stored: Sequence[Sharding],
        wants: Sequence[Sharding],
        there: LeastCosts,
        back: LeastCosts | None,
        gathered: Joinable,
    ) -> tuple[NDArray[np.bool_], Floats]:
        """Return for each pair of shardings if a parameter fills a part of a bucket, and the least share of it.

        The share is 1.0 where it is in no bucket.
        """
        gathers = there.seconds > 0.0
        held, wanted = (
            np.array([prod(cut.sizes) / self.bounds.ranks[self.bounds.mask(one.axes)] for one in each])
            for each in (stored, wants)
        )
        sent = np.where(gathers, held[:, None], 0.0)
        if back is not None:
            sent = np.maximum(sent, np.where(back.seconds > 0.0, wanted[None, :], 0.0))
        whole = cut.itemsize * prod(cut.sizes)
        along = self._along(stored, wants, back is not None)
        ways = [(one, one.fills(cut.itemsize * sent, whole)) for one in (gathered, self.ways.summed)]
        share = np.where(gathers, *(one.shares(fills, along) for one, fills in ways))
        is_filled = np.where(gathers, *(fills > 0.0 for _, fills in ways))
        alone = self._alone(cut, stored, wants, there, back)
        return np.asarray(is_filled | alone), np.where(alone, 1.0, share)

    def _along(self, stored: Sequence[Sharding], wants: Sequence[Sharding], is_summed: bool) -> Ints:
        """Return for each pair the axes along which a parameter is gathered or its gradient summed."""

        def masks(each: Iterable[Iterable[str]]) -> Ints:
            return np.array([self.bounds.mask(axes) for axes in each], dtype=np.int64)

        gathered = masks(one.axes for one in stored)[:, None] & ~masks(one.axes for one in wants)[None, :]
        if not is_summed:
            return gathered
        summed = masks(one.broadcast for one in wants)[None, :] & ~masks(one.broadcast for one in stored)[:, None]
        return np.asarray(gathered | summed)

    def _alone(
        self,
        cut: TensorCut,
        stored: Sequence[Sharding],
        wants: Sequence[Sharding],
        there: LeastCosts,
        back: LeastCosts | None,
    ) -> NDArray[np.bool_]:
        """Return for which pairs a parameter is in no bucket: something is sent, and more than gathers and sums is due.

        Only gradients are summed, so the forward splits nothing further; the backward does along axes of sums.
        """
        before, after = self.bounds.beyond(cut.sizes, stored, wants)
        made = np.array([bool(want.partial) for want in wants], dtype=bool)[None, :]
        alone = (there.seconds > 0.0) & ((after != 0) | made)
        if back is None:
            return np.asarray(alone)
        summed = np.array([self.bounds.mask(want.broadcast) for want in wants], dtype=np.int64)[None, :]
        return np.asarray(alone | ((back.seconds > 0.0) & ((before & ~summed) != 0)))

    def _back(self, cut: TensorCut, rows: Sequence[Sharding], wants: Sequence[Sharding], itemsize: float) -> LeastCosts:
        """Return the bounds of the reshards of gradients, a row for each source."""
        gradients = [t.gradient.value for t in wants], [s.gradient.value for s in rows]
        return LeastCosts(*(values.T for values in self.bounds.between(cut.sizes, itemsize, *gradients)))
