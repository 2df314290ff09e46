"""What conversions take, as tables: a row for each layout that a tensor may have, a column for each that is wanted.

A table holds the sums of `totals` apart, so that one table serves at all prices. Equal tables are one object.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from autopar.cost.compute import seconds_of_bytes
from autopar.layout.state import Layout, longest
from autopar.planning.candidates import Stored
from autopar.planning.routes import Leg, Routes
from autopar.planning.setting import Setting
from autopar.planning.totals import Sum
from autopar.reshard import StepKind
from autopar.rewrite.buckets import BUCKET_BYTES, BUCKETS, LEAST_BYTES, goes_in_bucket
from autopar.search.problem import Floats, Ints

__all__ = ["Parts", "Table", "Tables", "block_of"]

Parts = Mapping[Sum, Floats]
"""By sum, an array of one shape; sums that are not there are zero."""

_Sent = tuple[Leg, int]
"""A step, and the bytes of an element."""

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
    known: dict[Any, Any] = field(default_factory=dict)
    prices: dict[Any, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.routes = Routes(self.setting.axes)
        self.blocks: dict[str, float] = {}
        self.total = 0.0
        for tensor in self.setting.graph.parameters:
            size = prod(tensor.shape) * tensor.dtype.itemsize
            self.total += size
            self.blocks[block_of(tensor.name)] = self.blocks.get(block_of(tensor.name), 0.0) + size

    # -- values

    def values(
        self,
        sizes: tuple[int, ...],
        itemsize: int,
        trained: bool,
        sources: Sequence[Layout],
        wants: Sequence[Wants],
        again: bool = False,
        kept: tuple[bool, bool] = (False, False),
        share: float = 1.0,
    ) -> Table:
        """A value in some layout, wanted in others; `again`: it is converted once more in the backward.

        `kept`: whether what is made of it lives until the backward; whether it does so itself, if it is not converted.
        `share`: what its sum over ranks is of a collective that adds up several.
        """
        return self._same(
            ("values", sizes, itemsize, trained, again, kept, share),
            sources,
            wants,
            lambda: self._values(sizes, itemsize, trained, sources, wants, again, kept, share),
        )

    def _values(
        self,
        sizes: tuple[int, ...],
        itemsize: int,
        trained: bool,
        sources: Sequence[Layout],
        wants: Sequence[Wants],
        again: bool,
        kept: tuple[bool, bool],
        share: float,
    ) -> Table:
        distinct = dict.fromkeys(want for each in wants for want in each if want is not None)
        rows, row_of = _numbered(sources)
        columns, column_of = _numbered(tuple(dict.fromkeys(each) for each in wants))

        def made() -> Parts:
            names = list(distinct)
            device, host = self._pairs(sizes, itemsize, trained, rows, names, again, share)
            place = {name: i for i, name in enumerate(names)}
            parts = {
                Sum.DEVICE: _summed(device, columns, place, len(rows)),
                Sum.HOST: _summed(host, columns, place, len(rows)),
            }
            if kept[0]:
                parts[Sum.KEPT_GIB] = self._kept(sizes, itemsize, rows, columns, kept[1])
            return parts

        key = "values", sizes, itemsize, trained, again, kept, share, tuple(rows), tuple(map(tuple, columns))
        return self._table(key, made, row_of, column_of)

    def _pairs(
        self,
        sizes: tuple[int, ...],
        itemsize: int,
        trained: bool,
        sources: Sequence[Layout],
        targets: Sequence[Layout],
        again: bool,
        share: float,
    ) -> tuple[Floats, Floats]:
        times = 2 if again else 1
        there = self._ways(sizes, itemsize, [s.value for s in sources], [t.value for t in targets], share)
        if not trained:
            return times * there[0], times * there[1]
        back = self._ways(sizes, itemsize, [t.gradient.value for t in targets], [s.gradient.value for s in sources])
        return times * there[0] + back[0].T, times * there[1] + back[1].T

    def _ways(
        self,
        sizes: tuple[int, ...],
        itemsize: int,
        sources: Sequence[Layout],
        targets: Sequence[Layout],
        share: float = 1.0,
    ) -> tuple[Floats, Floats]:
        """One direction: what the device and what the host takes, each pair of layouts worked out once."""
        rows, row_of = _numbered(sources)
        columns, column_of = _numbered(targets)
        found = np.zeros((2, len(rows), len(columns)))
        for i, source in enumerate(rows):
            for j, target in enumerate(columns):
                found[:, i, j] = self.way(sizes, itemsize, source, target, share)
        spread = np.ix_(row_of, column_of)
        return found[0][spread], found[1][spread]

    def way(
        self, sizes: tuple[int, ...], itemsize: int, source: Layout, target: Layout, share: float = 1.0
    ) -> tuple[float, float]:
        key = sizes, itemsize, source, target, share
        price = self.prices.get(key)
        if price is None:
            device = host = 0.0
            legs = self.routes.of(sizes, source, target)
            for leg in legs:
                seconds, launched = self._leg(leg, itemsize)
                times = share if len(legs) == 1 and leg.kind == StepKind.ALL_REDUCE.value else 1.0
                device, host = device + times * seconds, host + times * launched
            price = self.prices[key] = (device, host)
        return price

    def _leg(self, leg: Leg, itemsize: int) -> tuple[float, float]:
        prices = self.setting.prices
        if leg.local:
            size = 2.0 * itemsize * leg.larger
            return seconds_of_bytes(size, prices.device), prices.launch if size else 0.0
        seconds = prices.network.seconds(leg.kind, leg.axes, leg.numel * itemsize)
        return seconds, prices.cluster.library.host_seconds.get(leg.kind, prices.launch)

    def _kept(
        self, sizes: tuple[int, ...], itemsize: int, rows: Sequence[Layout], columns: Sequence[Wants], instead: bool
    ) -> Floats:
        """What conversions add to what is kept; `instead` of the value itself."""
        found = np.zeros((len(rows), len(columns)))
        for i, row in enumerate(rows):
            for j, each in enumerate(columns):
                for want in each:
                    if want is not None and want.value != row.value:
                        found[i, j] += self.gib(sizes, itemsize, want)
                        found[i, j] -= self.gib(sizes, itemsize, row) if instead else 0.0
        return found

    def gib(self, sizes: tuple[int, ...], itemsize: int, layout: Layout) -> float:
        """The largest shard."""
        key = "gib", sizes, layout.splits
        found = self.known.get(key)
        if found is None:
            cuts = (longest(size, axes, self.setting.axes) for size, axes in zip(sizes, layout.splits, strict=True))
            found = self.known[key] = prod(cuts) / 2**30
        return float(found * itemsize)

    # -- parameters

    def parameters(
        self,
        sizes: tuple[int, ...],
        itemsize: int,
        trained: bool,
        stored: Sequence[Stored],
        wants: Sequence[Wants],
        block: str,
        kept: bool,
        accumulates: Callable[[Layout], float] | None = None,
        later: bool = False,
    ) -> Table:
        """A parameter as it is stored, taken in other layouts: beside the computing, in buckets.

        `block`: the layers whose gathers go together; `kept`: whether some op keeps it; `accumulates`: what it takes to
        add the gradient, in some layout, to that of earlier micro-batches. Whether gradients wait for the last
        micro-batch is up to the first op that takes the parameter; of a `later` one they are counted as if they did.
        """
        gathered = self.blocks.get(block, 0.0)
        return self._same(
            ("parameters", sizes, itemsize, trained, gathered, kept, accumulates is not None, later),
            stored,
            wants,
            lambda: self._parameters(sizes, itemsize, trained, stored, wants, gathered, kept, accumulates, later),
        )

    def _parameters(
        self,
        sizes: tuple[int, ...],
        itemsize: int,
        trained: bool,
        stored: Sequence[Stored],
        wants: Sequence[Wants],
        gathered: float,
        kept: bool,
        accumulates: Callable[[Layout], float] | None,
        later: bool,
    ) -> Table:
        rows, row_of = _numbered(stored)
        columns, column_of = _numbered(tuple(dict.fromkeys(each) for each in wants))

        def made() -> Parts:
            sums = np.zeros((len(Sum), len(rows), len(columns)))
            for i, one in enumerate(rows):
                for j, each in enumerate(columns):
                    for want in each:
                        if want is not None and want != one.shared:
                            sums[Sum.KEPT_GIB, i, j] += self._kept_copy(sizes, itemsize, one, want, kept)
                            ways = self._ways_of(sizes, itemsize, trained, one, want)
                            self._moved(sums[:, i, j], ways, one, want, gathered, later)
                    first = next(iter(each), None)
                    if accumulates is not None and first is not None:
                        held = first if _is_deferred(one, first) else one.layout
                        self._accumulated(sums[:, i, j], accumulates(held))
            return {key: sums[key] for key in Sum if sums[key].any()} or {Sum.DEVICE: sums[Sum.DEVICE]}

        key = (
            "parameters",
            sizes,
            itemsize,
            trained,
            tuple(rows),
            tuple(map(tuple, columns)),
            kept,
            accumulates is not None,
            gathered,
            later,
        )
        return self._table(key, made, row_of, column_of)

    def shared(
        self,
        sizes: tuple[int, ...],
        itemsize: int,
        trained: bool,
        stored: Sequence[Stored],
        block: str,
        kept: bool,
    ) -> Parts:
        """What it takes to convert a parameter once for several ops, by the way it is held."""
        gathered = self.blocks.get(block, 0.0)
        sums = np.zeros((len(Sum), len(stored)))
        for i, one in enumerate(stored):
            if one.shared is not None:
                sums[Sum.KEPT_GIB, i] += self._kept_copy(sizes, itemsize, one, one.shared, kept)
                ways = self._ways_of(sizes, itemsize, trained, one, one.shared)
                self._moved(sums[:, i], ways, one, one.shared, gathered)
        return {key: sums[key] for key in Sum}

    def _kept_copy(self, sizes: tuple[int, ...], itemsize: int, held: Stored, want: Layout, kept: bool) -> float:
        """What is gathered of a parameter lives until the backward, or until the optimizer steps."""
        lives = (kept and not held.again) or held.lasting
        return self.gib(sizes, itemsize, want) if lives and want.splits != held.layout.splits else 0.0

    def _ways_of(
        self, sizes: tuple[int, ...], itemsize: int, trained: bool, held: Stored, want: Layout
    ) -> tuple[tuple[_Sent, ...], tuple[_Sent, ...]]:
        there = self.routes.of(sizes, held.layout.value, want.value)
        back = self.routes.of(sizes, want.gradient.value, held.layout.gradient.value) if trained else ()
        dtype = self.setting.options.gradient_dtype
        reduced = itemsize if dtype is None else dtype.itemsize
        return tuple((leg, itemsize) for leg in there), tuple((leg, reduced) for leg in back)

    def _moved(
        self,
        sums: Floats,
        ways: tuple[tuple[_Sent, ...], tuple[_Sent, ...]],
        held: Stored,
        want: Layout,
        gathered_bytes: float,
        later: bool = False,
    ) -> None:
        """In a bucket, a parameter takes its share of what the fullest bucket takes: no bucket sends a byte in less.

        `gathered_bytes` is what could be gathered together.
        """
        there, back = ways
        share = 1.0
        if (there or back) and goes_in_bucket(*(tuple(StepKind(leg.kind) for leg, _ in way) for way in ways)):
            gathers = any(leg.kind == "all_gather" for leg, _ in there)
            limit = min(float(BUCKET_BYTES), gathered_bytes if gathers else max(LEAST_BYTES, self.total / BUCKETS))
            share = min(1.0, max(leg.before * itemsize for leg, itemsize in (*there, *back)) / max(limit, 1.0))
        forward, backward = self._sent(there, share), self._sent(back, share)
        sums[Sum.FORWARD_ONCE if held.lasting else Sum.FORWARD_EACH] += forward[0]
        sums[Sum.HOST] += 0.0 if held.lasting else forward[1]
        deferred = later or _is_deferred(held, want)
        sums[Sum.BACKWARD_ONCE if deferred else Sum.BACKWARD_EACH] += backward[0]
        sums[Sum.HOST] += 0.0 if deferred else backward[1]
        if held.again and self.setting.trains and any(leg.kind == "all_gather" for leg, _ in there):
            sums[Sum.BACKWARD_EACH] += forward[0]
            sums[Sum.HOST] += forward[1]

    def _sent(self, way: tuple[_Sent, ...], share: float) -> tuple[float, float]:
        """What the links and what the host take for a share of a bucket."""
        prices = self.setting.prices
        seconds = host = 0.0
        for leg, itemsize in way if share else ():
            if leg.local:
                host += share * prices.launch
            else:
                seconds += share * prices.network.seconds(leg.kind, leg.axes, leg.numel * itemsize / share)
                host += share * prices.cluster.library.host_seconds.get(leg.kind, prices.launch)
        return seconds, host

    def _accumulated(self, sums: Floats, size: float) -> None:
        prices = self.setting.prices
        seconds = seconds_of_bytes(size, prices.device)
        sums[Sum.DEVICE] += seconds
        sums[Sum.BACKWARD_ROOM] += seconds
        sums[Sum.HOST] += prices.launch if size else 0.0

    def _same(self, key: Any, rows: Sequence[Any], columns: Sequence[Any], made: Callable[[], Table]) -> Table:
        """The table of before, if rows and columns are the same objects: sooner seen than that they are equal."""
        whole = key, id(rows), id(columns)
        if whole not in self.known:
            self.known[whole] = made(), rows, columns  # held, so that no other object takes their place
        table = self.known[whole][0]
        assert isinstance(table, Table)
        return table

    def _table(
        self,
        key: Any,
        made: Callable[[], Parts],
        rows: Ints,
        columns: Ints,
    ) -> Table:
        if key not in self.known:
            self.known[key] = made()
        parts = self.known[key]
        whole = "table", id(parts), rows.tobytes(), columns.tobytes()
        table = self.known.get(whole)
        if table is None:
            table = self.known[whole] = Table(parts, rows, columns)
        assert isinstance(table, Table)
        return table


def block_of(name: str) -> str:
    """The layer that a parameter is of, as buckets see it."""
    found = re.match(r"(.*?\.\d+)\.", name)
    return found[1] if found else ""


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
