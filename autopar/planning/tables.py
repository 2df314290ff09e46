"""What conversions take, as tables: a row for each layout that a tensor may have, a column for each that is wanted.

A table holds the sums of `totals` apart, so that one table serves at all prices. Equal tables are one object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autopar.cost.compute import seconds_of_bytes
from autopar.layout.state import Layout
from autopar.planning.candidates import Stored
from autopar.planning.routes import Leg, Routes
from autopar.planning.setting import Setting
from autopar.planning.totals import Sum
from autopar.reshard import StepKind
from autopar.rewrite.buckets import BUCKET_BYTES, BUCKETS, SMALL_BYTES, goes_in_bucket
from autopar.search.problem import Floats, Ints

__all__ = ["Parts", "Table", "Tables"]

Parts = Mapping[Sum, Floats]
"""By sum, an array of one shape; sums that are not there are zero."""

Wants = tuple[Layout | None, ...]
"""The layouts in which one op takes one tensor, at all its places; None: as it is."""


@dataclass(frozen=True, eq=False)
class Table:
    """Costs of pairs, spread out from those of distinct layouts: entry [i, j] is parts[·][rows[i], columns[j]]."""

    parts: Parts
    rows: Ints
    columns: Ints

    def weighed(self, weights: Floats) -> Floats:
        return np.asarray(weigh(self.parts, weights)[np.ix_(self.rows, self.columns)])

    def at(self, row: int, column: int) -> Floats:
        """The sums of one pair."""
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


@dataclass
class Tables:
    """The tables of one setting."""

    setting: Setting
    routes: Routes
    known: dict[Any, Any] = field(default_factory=dict)
    prices: dict[Any, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tensors = self.setting.graph.parameters
        total = sum(float(np.prod(tensor.shape)) * tensor.dtype.itemsize for tensor in tensors)
        self.gathered_bytes = float(min(BUCKET_BYTES, total))
        self.reduced_bytes = float(max(SMALL_BYTES, min(BUCKET_BYTES, total / BUCKETS)))

    # -- values

    def values(
        self,
        sizes: tuple[int, ...],
        itemsize: int,
        trained: bool,
        sources: Sequence[Layout],
        wants: Sequence[Wants],
        again: bool = False,
    ) -> Table:
        """A value in some layout, wanted in others; `again`: it is converted once more in the backward."""
        distinct = dict.fromkeys(want for each in wants for want in each if want is not None)
        rows, row_of = _numbered(sources)
        columns, column_of = _numbered(tuple(dict.fromkeys(each) for each in wants))

        def made() -> Parts:
            names = list(distinct)
            device, host = self._pairs(sizes, itemsize, trained, rows, names, again)
            place = {name: i for i, name in enumerate(names)}
            return {
                Sum.DEVICE: _summed(device, columns, place, len(rows)),
                Sum.HOST: _summed(host, columns, place, len(rows)),
            }

        key = "values", sizes, itemsize, trained, again, tuple(rows), tuple(map(tuple, columns))
        return self._table(key, made, row_of, column_of)

    def _pairs(
        self,
        sizes: tuple[int, ...],
        itemsize: int,
        trained: bool,
        sources: Sequence[Layout],
        targets: Sequence[Layout],
        again: bool,
    ) -> tuple[Floats, Floats]:
        times = 2 if again else 1
        there = self._ways(sizes, itemsize, [s.value for s in sources], [t.value for t in targets])
        if not trained:
            return times * there[0], times * there[1]
        back = self._ways(sizes, itemsize, [t.gradient.value for t in targets], [s.gradient.value for s in sources])
        return times * there[0] + back[0].T, times * there[1] + back[1].T

    def _ways(
        self, sizes: tuple[int, ...], itemsize: int, sources: Sequence[Layout], targets: Sequence[Layout]
    ) -> tuple[Floats, Floats]:
        """One direction: what the device and what the host takes, each pair of layouts worked out once."""
        rows, row_of = _numbered(sources)
        columns, column_of = _numbered(targets)
        found = np.zeros((2, len(rows), len(columns)))
        for i, source in enumerate(rows):
            for j, target in enumerate(columns):
                found[:, i, j] = self.way(sizes, itemsize, source, target)
        spread = np.ix_(row_of, column_of)
        return found[0][spread], found[1][spread]

    def way(self, sizes: tuple[int, ...], itemsize: int, source: Layout, target: Layout) -> tuple[float, float]:
        key = sizes, itemsize, source, target
        price = self.prices.get(key)
        if price is None:
            device = host = 0.0
            for leg in self.routes.of(sizes, source, target):
                seconds, launched = self._leg(leg, itemsize)
                device, host = device + seconds, host + launched
            price = self.prices[key] = (device, host)
        return price

    def _leg(self, leg: Leg, itemsize: int) -> tuple[float, float]:
        prices = self.setting.prices
        if leg.local:
            size = 2.0 * itemsize * leg.moved
            return seconds_of_bytes(size, prices.device), prices.launch if size else 0.0
        seconds = prices.network.seconds(leg.kind, leg.axes, leg.numel * itemsize)
        return seconds, prices.cluster.library.host_seconds.get(leg.kind, prices.launch)

    # -- parameters

    def parameters(
        self,
        sizes: tuple[int, ...],
        itemsize: int,
        trained: bool,
        stored: Sequence[Stored],
        wants: Sequence[Wants],
        accumulates: Callable[[Layout], float] | None = None,
    ) -> Table:
        """A parameter as it is stored, taken in other layouts: beside the computing, in buckets.

        `accumulates`: what it takes to add the gradient, in some layout, to that of earlier micro-batches.
        """
        rows, row_of = _numbered(stored)
        columns, column_of = _numbered(tuple(dict.fromkeys(each) for each in wants))

        def made() -> Parts:
            sums = np.zeros((len(Sum), len(rows), len(columns)))
            for i, one in enumerate(rows):
                for j, each in enumerate(columns):
                    for want in each:
                        if want is not None:
                            self._moved(sums[:, i, j], sizes, itemsize, trained, one, want)
                    first = next(iter(each), None)
                    if accumulates is not None and first is not None:
                        held = first if _is_deferred(one, first) else one.layout
                        self._accumulated(sums[:, i, j], accumulates(held))
            return {key: sums[key] for key in Sum if sums[key].any()} or {Sum.DEVICE: sums[Sum.DEVICE]}

        key = "parameters", sizes, itemsize, trained, tuple(rows), tuple(map(tuple, columns)), accumulates is not None
        return self._table(key, made, row_of, column_of)

    def _moved(
        self, sums: Floats, sizes: tuple[int, ...], itemsize: int, trained: bool, held: Stored, want: Layout
    ) -> None:
        there = self.routes.of(sizes, held.layout.value, want.value)
        back = self.routes.of(sizes, want.gradient.value, held.layout.gradient.value) if trained else ()
        together = goes_in_bucket(*(tuple(StepKind(leg.kind) for leg in way) for way in (there, back)))
        forward = sum(self._sent(leg, itemsize, together) for leg in there)
        sums[Sum.FORWARD_ONCE if held.lasting else Sum.FORWARD_EACH] += forward
        dtype = self.setting.options.gradient_dtype
        size = itemsize if dtype is None else dtype.itemsize
        backward = sum(self._sent(leg, size, together) for leg in back)
        sums[Sum.BACKWARD_ONCE if _is_deferred(held, want) else Sum.BACKWARD_EACH] += backward
        if held.again and self.setting.trains and any(leg.kind == "all_gather" for leg in there):
            sums[Sum.BACKWARD_EACH] += forward

    def _sent(self, leg: Leg, itemsize: int, together: bool) -> float:
        """In a bucket, its share of what the fullest bucket takes: no bucket sends a byte in less."""
        if leg.local:
            return 0.0
        size = leg.numel * itemsize
        network = self.setting.prices.network
        full = self.gathered_bytes if leg.kind == "all_gather" else max(self.reduced_bytes, self.gathered_bytes)
        if not together or size >= full or not size:
            return network.seconds(leg.kind, leg.axes, size)
        return network.seconds(leg.kind, leg.axes, full) * size / full

    def _accumulated(self, sums: Floats, size: float) -> None:
        prices = self.setting.prices
        seconds = seconds_of_bytes(size, prices.device)
        sums[Sum.DEVICE] += seconds
        sums[Sum.BACKWARD_ROOM] += seconds
        sums[Sum.HOST] += prices.launch if size else 0.0

    def _table(self, key: Any, made: Callable[[], Parts], rows: Ints, columns: Ints) -> Table:
        parts = self.known.get(key)
        if parts is None:
            parts = self.known[key] = made()
        whole = "table", id(parts), rows.tobytes(), columns.tobytes()
        table = self.known.get(whole)
        if table is None:
            table = self.known[whole] = Table(parts, rows, columns)
        assert isinstance(table, Table)
        return table


def _is_deferred(held: Stored, want: Layout) -> bool:
    """Whether a gradient may wait for the last micro-batch: it is stored as it is used, or the copy stays."""
    return held.lasting or held.layout.splits == want.splits


def _numbered(items: Sequence[Any]) -> tuple[list[Any], Ints]:
    """The distinct ones, and for each which one it is."""
    distinct: dict[Any, int] = {}
    places = [distinct.setdefault(item if not isinstance(item, dict) else tuple(item), len(distinct)) for item in items]
    return list(distinct), np.array(places, dtype=np.int64)


def _summed(pairs: Floats, columns: Sequence[Wants], place: Mapping[Layout, int], rows: int) -> Floats:
    """A column for each tuple of layouts: what its members take together."""
    found = np.zeros((rows, len(columns)))
    for j, each in enumerate(columns):
        for want in each:
            if want is not None:
                found[:, j] += pairs[:, place[want]]
    return found
