"""Reshard costs as tables: a row for each sharding that a tensor may have, a column for each that is needed.

A table keeps the sums of `objective` apart, so one table serves all multipliers. Equal tables are one object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.cost.host_copies import host_copy_seconds
from autopar.ir.values import NamedTensor
from autopar.sharding.offload import LEAST_BYTES
from autopar.sharding.sharding import Sharding
from autopar.solver import Floats, Ints
from autopar.solver.candidates import StorageOption
from autopar.solver.model.bucket_shares import Joinable
from autopar.solver.model.objective import Sum
from autopar.solver.model.reshard_sums import ReshardSums, TensorCut, kept_early
from autopar.solver.setting import PlanningProblem

Parts = Mapping[Sum, Floats]

# Shardings in which one op takes one tensor, at all its places; None: as it is.
Wants = tuple[Sharding | None, ...]


@dataclass(frozen=True, eq=False)
class CostTable:
    """Costs of pairs, expanded from distinct shardings: entry [i, j] is parts[·][rows[i], columns[j]]."""

    parts: Parts
    rows: Ints
    columns: Ints

    def weighted(self, weights: Floats) -> Floats:
        return np.asarray(weigh(self.parts, weights)[np.ix_(self.rows, self.columns)])

    def at(self, row: int, column: int) -> Floats:
        """Return the sums of one pair."""
        found = np.zeros(len(Sum))
        for key, values in self.parts.items():
            found[key] = values[self.rows[row], self.columns[column]]
        return found


def weigh(parts: Parts, weights: Floats) -> Floats:
    total: Floats | None = None
    for key, values in parts.items():
        if weights[key]:
            total = weights[key] * values if total is None else total + weights[key] * values
    if total is None:
        total = np.zeros_like(next(iter(parts.values())))
    return total


class PartialSums(NamedTuple):
    """Partial sums that one op makes and another one alone uses."""

    # Made, and added up, once more in the backward.
    again: bool
    # The value lives until the backward, whoever saves it.
    lives: bool


class ValueUse(NamedTuple):
    """Use of a value by one op."""

    # Resharded once more in the backward.
    again: bool = False
    # The resharded value is saved.
    kept: bool = False
    # The value itself is saved if it is not resharded.
    instead: bool = False
    # The value itself counts here, and not where it is made.
    here: bool = False
    # Share of its sum in a collective that joins several sums.
    share: float = 1.0
    # Of a value that this op alone uses: what becomes of partial sums. They are added up where they are made.
    sums: PartialSums | None = None
    # The op saves on the host.
    moved: bool = False
    # The op is behind the last layer: what it saves is gone when the layer is recomputed.
    behind: bool = False
    # Use that decides what the op saves when it is recomputed as a part of the last layer.
    rerun: ValueUse | None = None


class ParameterUse(NamedTuple):
    """Use of a parameter by one op."""

    # Parameters that are gathered together.
    gathered: Joinable
    # Some op saves it.
    kept: bool
    # The first op that takes the parameter decides if gradients wait for the last micro-batch; for later ops
    # they count as if they did.
    later: bool = False
    # Memory is counted where the gradient is produced.
    measured: bool = False
    # The op is behind the last layer: the copy that it saves is gone when the layer is recomputed.
    behind: bool = False


class CostTables:
    """Cache of the tables of one planning problem."""

    def __init__(self, setting: PlanningProblem) -> None:
        self.setting = setting
        self.ways = ReshardSums(setting)
        self.known: dict[Any, Any] = {}

    def cut(self, tensor: NamedTensor) -> TensorCut:
        return TensorCut.of(tensor, self.setting)

    @property
    def rerun_share(self) -> float:
        """Return the saved tensors of a recomputed layer that count, at most those of one micro-batch."""
        return min(1.0, self.setting.saved_share)

    def handled(
        self, tensor: NamedTensor, kept: bool, later: bool = False, measured: bool = False, behind: bool = False
    ) -> ParameterUse:
        return ParameterUse(self.ways.gathered(tensor), kept, later, measured, behind)

    def values(self, cut: TensorCut, sources: Sequence[Sharding], wants: Sequence[Wants], use: ValueUse) -> CostTable:
        """Return the table of a value: shardings that it has, shardings that are needed."""

        def made(rows: Sequence[Sharding], columns: Sequence[Wants]) -> Parts:
            distinct = distinct_wants(columns)
            there, back = self._both_ways(cut, rows, distinct, use.share)
            place = {layout: i for i, layout in enumerate(distinct)}
            unreached = np.isinf(there[0]) | np.isinf(back[0])
            there, back = np.where(unreached, 0.0, there), np.where(unreached, 0.0, back)
            summed = self._summed_early(cut, rows, columns, use)
            again = use.again if use.sums is None else np.where(summed, use.sums.again, use.again)
            sent = [[summed_over_wants(one, columns, place, len(rows)) for one in way] for way in (there, back)]
            parts = {key: (1.0 + again) * sent[0][i] + sent[1][i] for i, key in ((0, Sum.DEVICE), (2, Sum.HOST))}
            added = self._added(cut, rows, columns)
            if added is not None:
                seconds, launches = added
                parts[Sum.DEVICE] = parts[Sum.DEVICE] + seconds
                parts[Sum.BACKWARD_ROOM], parts[Sum.HOST] = seconds, parts[Sum.HOST] + launches
            if cut.halved:
                parts[Sum.FORWARD_EACH], parts[Sum.BACKWARD_EACH] = sent[0][1], again * sent[0][1] + sent[1][1]
            if unreached.any():
                parts[Sum.FORBIDDEN] = summed_over_wants(unreached.astype(np.float64), columns, place, len(rows))
            if use.kept or use.here or (use.sums is not None and use.sums.lives):
                kept, moved = self._kept(cut, rows, columns, use, summed)
                parts[Sum.KEPT_GIB] = self.setting.saved_share * kept
                if use.behind:
                    parts[Sum.RERUN_GIB] = -parts[Sum.KEPT_GIB]
                if moved.any():
                    parts[Sum.COPIES] = host_copy_seconds(2.0**30, self.setting.cluster) * moved
            if use.rerun is not None:
                parts[Sum.RERUN_GIB] = self.rerun_share * self._kept(cut, rows, columns, use.rerun, summed)[0]
            return parts

        return self._table(("values", cut, use), sources, wants, made)

    def parameters(
        self,
        cut: TensorCut,
        stored: Sequence[StorageOption],
        wants: Sequence[Wants],
        handled: ParameterUse,
        accumulates: Callable[[Sharding], float] | None = None,
        casts: NamedTensor | None = None,
    ) -> CostTable:
        """Return the table of a parameter: shardings of its storage, shardings that ops need.

        With `accumulates`, the cost of adding the gradient to that of earlier micro-batches is included; with `casts`,
        the parameter, that of casting it between the dtypes of a step.
        """

        def made(rows: Sequence[StorageOption], columns: Sequence[Wants]) -> Parts:
            sums = np.zeros((len(Sum), len(rows), len(columns)))
            for i, one in enumerate(rows):
                for j, each in enumerate(columns):
                    for want in each:
                        if want is not None and want != one.shared:
                            sums[Sum.KEPT_GIB, i, j] += self.ways.kept_copy(cut, one, want, handled.kept)
                            if handled.measured and one.again and want.splits != one.layout.splits:
                                sums[Sum.PRODUCT_GIB, i, j] += self.ways.gib(cut, want)
                            self.ways.add_moved(sums[:, i, j], cut, one, want, handled.gathered, handled.later)
                        elif want is not None and not handled.later:
                            # The copy for all counts as that of a later op. If the first op takes it, it decides.
                            for sign, later in ((1.0, False), (-1.0, True)):
                                moved = np.zeros(len(Sum))
                                self.ways.add_moved(moved, cut, one, want, handled.gathered, later)
                                sums[:, i, j] += sign * moved
                    first = next(iter(each), None)
                    if accumulates is not None and first is not None:
                        held = first if one.defers(first) else one.layout
                        self.ways.add_accumulated(sums[:, i, j], accumulates(held))
                    if casts is not None and first is not None:
                        self.ways.add_casts(casts, sums[:, i, j], one, first)
            if handled.behind:
                sums[Sum.RERUN_GIB] -= sums[Sum.KEPT_GIB]
            return {key: sums[key] for key in Sum if sums[key].any()} or {Sum.DEVICE: sums[Sum.DEVICE]}

        return self._table(
            ("parameters", cut, handled, accumulates is not None, casts is not None), stored, wants, made, casts
        )

    def shared(self, cut: TensorCut, stored: Sequence[StorageOption], handled: ParameterUse) -> Parts:
        """Return the cost of resharding a parameter once for several ops, for each storage option."""
        sums = np.zeros((len(Sum), len(stored)))
        for i, one in enumerate(stored):
            if one.shared is not None:
                sums[Sum.KEPT_GIB, i] += self.ways.kept_copy(cut, one, one.shared, handled.kept)
                self.ways.add_moved(sums[:, i], cut, one, one.shared, handled.gathered, later=True)
        if handled.behind:
            sums[Sum.RERUN_GIB] -= sums[Sum.KEPT_GIB]
        return {key: sums[key] for key in Sum}

    def _both_ways(
        self, cut: TensorCut, sources: Sequence[Sharding], targets: Sequence[Sharding], share: float
    ) -> tuple[Floats, Floats]:
        """Return the seconds of each pair of shardings, as `ReshardSums.way` has them, forward and backward."""
        there = self._each(cut, [s.value for s in sources], [t.value for t in targets], share)
        if not cut.trained:
            return there, np.zeros_like(there)
        back = self._each(cut, [t.gradient.value for t in targets], [s.gradient.value for s in sources], 1.0)
        return there, back.transpose(0, 2, 1)

    def _added(
        self, cut: TensorCut, rows: Sequence[Sharding], columns: Sequence[Wants]
    ) -> tuple[Floats, Floats] | None:
        """Return the seconds that an op needs to add the gradients of a value that it takes in several shardings."""
        times = np.array(
            [[len({row if want is None else want for want in each}) - 1 for each in columns] for row in rows]
        )
        if not cut.trained or not times.any():
            return None
        tasks = [self.setting.prices.sum_of_gradients(2**30 * self.ways.gib(cut, row), cut.halved) for row in rows]
        seconds, launches = np.array([(task.seconds, task.host_seconds) for task in tasks]).T[:, :, None]
        return seconds * times, launches * times

    def _summed_early(
        self, cut: TensorCut, rows: Sequence[Sharding], columns: Sequence[Wants], use: ValueUse
    ) -> NDArray[np.bool_]:
        """Return for which pairs partial sums are added up where they are made."""
        found = np.zeros((len(rows), len(columns)), dtype=np.bool_)
        for i, row in enumerate(rows if use.sums is not None else ()):
            for j, wants in enumerate(columns if row.partial else ()):
                wanted = None if len(wants) != 1 else wants[0]
                found[i, j] = wanted is not None and kept_early(row, wanted, partial(self.ways.gib, cut))
        return found

    def _each(self, cut: TensorCut, sources: Sequence[Sharding], targets: Sequence[Sharding], share: float) -> Floats:
        """Return the seconds of one direction, as `ReshardSums.way` has them; each pair is priced once."""
        rows, row_of = numbered(sources)
        columns, column_of = numbered(targets)
        key = "each", cut.sizes, cut.by_share, cut.roles, cut.itemsize, cut.halved, share, tuple(rows), tuple(columns)
        if key not in self.known:
            priced = self.ways.priced(cut, share)
            found = np.array([priced(source, target) for source in rows for target in columns])
            self.known[key] = found.reshape(len(rows), len(columns), 3).transpose(2, 0, 1)
        return np.asarray(self.known[key][:, row_of[:, None], column_of])

    def _kept(
        self,
        cut: TensorCut,
        rows: Sequence[Sharding],
        columns: Sequence[Wants],
        use: ValueUse,
        summed: NDArray[np.bool_],
    ) -> Floats:
        """Return the saved GiB that reshards add, on the device and on the host.

        With `here`, those of the value itself too; with `instead`, they are taken off.
        """
        found = np.zeros((2, len(rows), len(columns)))
        wants = distinct_wants(columns)
        of_row, of_want = (np.array([self.ways.gib(cut, one) for one in each]) for each in (rows, wants))
        values = [row.value for row in rows]
        is_row = np.array([[want.value == value for want in wants] for value in values]).reshape(len(rows), len(wants))

        def add(times: Floats, gib: Floats, at: slice | int = slice(None)) -> None:
            for place, moves in enumerate((False, True)):
                is_moved = use.moved & (gib * 2**30 >= LEAST_BYTES)
                found[place][:, at] += np.where(is_moved == moves, times * gib, 0.0)

        lives = use.sums is not None and use.sums.lives
        if use.here:
            add(np.ones((len(rows), len(columns))), of_row[:, None])
        place = {want: i for i, want in enumerate(wants)}
        for j, each in enumerate(columns):
            for number in (place[want] for want in each if want is not None):
                moved = ~is_row[:, number]
                early, late = (np.where(moved & each, 1.0, 0.0) for each in (summed[:, j], ~summed[:, j]))
                add(early * (lives or use.kept) + late * use.kept, of_want[[number]], j)
                add(-early * lives - late * (use.kept and use.instead), of_row, j)
        return found

    def _table(
        self,
        key: Any,
        rows: Sequence[Any],
        columns: Sequence[Wants],
        made: Callable[[Sequence[Any], Sequence[Wants]], Parts],
        casts: NamedTensor | None = None,
    ) -> CostTable:
        # Comparing identity is faster than comparing values; the objects are held, so that no id is reused.
        whole = key, id(rows), id(columns)
        if whole not in self.known:
            self.known[whole] = self._equal(key, rows, columns, made, casts), rows, columns
        table: CostTable = self.known[whole][0]
        return table

    def _made(
        self,
        key: Any,
        rows: Sequence[Any],
        columns: Sequence[Wants],
        made: Callable[[Sequence[Any], Sequence[Wants]], Parts],
        casts: NamedTensor | None = None,
    ) -> Parts:
        """Return the sums of all pairs of distinct rows and columns; `casts` is the parameter that `made` casts."""
        return made(rows, columns)

    def _equal(
        self,
        key: Any,
        rows: Sequence[Any],
        columns: Sequence[Wants],
        made: Callable[[Sequence[Any], Sequence[Wants]], Parts],
        casts: NamedTensor | None = None,
    ) -> CostTable:
        distinct, row_of = numbered(rows)
        wanted, column_of = numbered([tuple(dict.fromkeys(each)) for each in columns])
        named = key, tuple(distinct), tuple(wanted)
        if named not in self.known:
            self.known[named] = self._made(key, distinct, wanted, made, casts)
        parts = self.known[named]
        whole = "table", id(parts), row_of.tobytes(), column_of.tobytes()
        table: CostTable | None = self.known.get(whole)
        if table is None:
            table = self.known[whole] = CostTable(parts, row_of, column_of)
        return table


def numbered(items: Sequence[Any]) -> tuple[list[Any], Ints]:
    """Return the distinct items, and for each item the index of its equal."""
    distinct: dict[Any, int] = {}
    places = [distinct.setdefault(item, len(distinct)) for item in items]
    return list(distinct), np.array(places, dtype=np.int64)


def distinct_wants(columns: Sequence[Wants]) -> list[Sharding]:
    return list(dict.fromkeys(want for each in columns for want in each if want is not None))


def summed_over_wants(pairs: Floats, columns: Sequence[Wants], place: Mapping[Sharding, int], rows: int) -> Floats:
    """Return a column for each tuple of shardings: the sum over its members."""
    found = np.zeros((rows, len(columns)))
    for j, each in enumerate(columns):
        for want in each:
            if want is not None:
                found[:, j] += pairs[:, place[want]]
    return found
