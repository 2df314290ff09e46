"""Reshard costs as tables: a row for each sharding that a tensor may have, a column for each that is needed.

A table keeps the sums of `objective` apart, so one table serves all multipliers. Equal tables are one object.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Any, NamedTuple

import numpy as np

from autopar.cost.compute.op_time import seconds_of_bytes
from autopar.ir.values import NamedTensor
from autopar.sharding.buckets import BUCKET_BYTES, BUCKETS, LEAST_BYTES, goes_in_bucket
from autopar.sharding.reshard.reshard import ScaledReshards, StepKind, StepSize
from autopar.sharding.sharding import Sharding, atoms_of, longest, routing_excess
from autopar.solver import Floats, Ints
from autopar.solver.candidates import StorageOption
from autopar.solver.model.objective import Sum
from autopar.solver.setting import PlanningProblem

# -- prices of reshards ------------------------------------------------------------------------------------------------


# A step, and the bytes of an element.
_Sent = tuple[StepSize, float]


class TensorCut(NamedTuple):
    """Properties of a tensor that its reshards depend on. A tuple, as tables are looked up by it."""

    sizes: tuple[int, ...]
    itemsize: float
    # It has a gradient.
    trained: bool
    # Bytes of an element while its gradient is reduced.
    reduced: int
    # It is a parameter that is stored or reduced in another dtype than that of the compute.
    casts: bool
    # Atoms that axes with shares split by them.
    by_share: tuple[int, ...] = ()
    # Roles of the atoms of routed rows; empty for others.
    roles: str = ""

    @classmethod
    def of(cls, tensor: NamedTensor, setting: PlanningProblem) -> TensorCut:
        atoms = atoms_of(tensor)
        dtype, precision = tensor.dtype, setting.options.precision
        trained, is_param = tensor.requires_grad and setting.trains, tensor.kind == "param"
        reduced, stored = (precision.reduced(dtype), precision.stored(dtype)) if is_param else (dtype, dtype)
        casts = len({dtype, reduced, stored}) > 1
        return cls(atoms.sizes, tensor.element_bytes, trained, reduced.itemsize, casts, atoms.by_share, atoms.roles)

    def steps(self, routes: ScaledReshards, source: Sharding, target: Sharding) -> tuple[StepSize, ...] | None:
        """Return the steps between two shardings of the tensor; None if none lead there."""
        return routes.of(self.sizes, source, target, self.by_share, self.roles)


class _BucketShare(NamedTuple):
    """Share of a parameter in its bucket: seconds of links and host, forward and backward."""

    forward: tuple[float, float]
    backward: tuple[float, float]
    gathers: bool


class ReshardSums:
    """Reshards of one planning problem; each is priced once."""

    def __init__(self, setting: PlanningProblem) -> None:
        self.setting = setting
        self.costs = setting.prices.reshard_costs
        self.routes = ScaledReshards(setting.axes)
        self.prices: dict[Hashable, tuple[float, float]] = {}
        self.moved: dict[tuple[TensorCut, Sharding, Sharding, float], _BucketShare] = {}
        self.elements: dict[Hashable, float] = {}
        self.blocks: dict[str, float] = {}
        self.total = 0.0
        for tensor in setting.graph.parameters:
            size = prod(tensor.shape) * tensor.dtype.itemsize
            self.total += size
            self.blocks[block_of(tensor.name)] = self.blocks.get(block_of(tensor.name), 0.0) + size

    # -- values

    def way(self, cut: TensorCut, source: Sharding, target: Sharding, share: float = 1.0) -> tuple[float, float]:
        """Return device and host seconds of a reshard; infinite if no steps lead there."""
        key = cut.sizes, cut.by_share, cut.roles, cut.itemsize, source, target, share
        price = self.prices.get(key)
        if price is None:
            device = host = 0.0
            steps = cut.steps(self.routes, source, target)
            size = cut.itemsize * routing_excess(cut.roles, source, target)
            for cost in () if steps is None else self.costs.value_steps(steps, size, share):
                device, host = device + cost.seconds, host + cost.host_seconds
            price = self.prices[key] = (inf if steps is None else device, host)
        return price

    def gib(self, cut: TensorCut, layout: Sharding) -> float:
        """Return the largest shard."""
        key = cut.sizes, cut.by_share, layout.splits
        found = self.elements.get(key)
        if found is None:
            pairs = enumerate(zip(cut.sizes, layout.splits, strict=True))
            lengths = (longest(size, axes, self.setting.axes, i in cut.by_share) for i, (size, axes) in pairs)
            found = self.elements[key] = prod(lengths) / 2**30
        return found * cut.itemsize * (routing_excess(cut.roles, layout) if cut.roles else 1.0)

    # -- parameters

    def kept_copy(self, cut: TensorCut, held: StorageOption, want: Sharding, kept: bool) -> float:
        """Return the bytes of a gathered copy that lives until the backward, or until the optimizer steps."""
        lives = (kept and not held.again) or held.lasting
        if not lives or want.splits == held.layout.splits:
            return 0.0
        # In a call with micro-batches the gradient of the copy lives until it is reduced after the last one.
        copies = 2 if self.setting.call is not None and cut.trained and held.lasting else 1
        share = self.setting.stored_share if held.lasting else self.setting.saved_share
        return share * copies * self.gib(cut, want)

    def add_moved(
        self,
        sums: Floats,
        cut: TensorCut,
        held: StorageOption,
        want: Sharding,
        gathered_bytes: float,
        later: bool = False,
    ) -> None:
        """In a bucket, a parameter takes its share of what the fullest bucket takes: no bucket sends a byte in less.

        `gathered_bytes` is what could be gathered together.
        """
        forward, backward, gathers = self._moved(cut, held.layout, want, gathered_bytes)
        sums[Sum.FORWARD_ONCE if held.lasting else Sum.FORWARD_EACH] += forward[0]
        sums[Sum.HOST] += 0.0 if held.lasting else forward[1]
        deferred = later or held.defers(want)
        sums[Sum.BACKWARD_ONCE if deferred else Sum.BACKWARD_EACH] += backward[0]
        sums[Sum.HOST] += 0.0 if deferred else backward[1]
        if held.again and self.setting.trains and gathers:
            sums[Sum.BACKWARD_EACH] += forward[0]
            sums[Sum.HOST] += forward[1]

    def _moved(self, cut: TensorCut, stored: Sharding, want: Sharding, gathered_bytes: float) -> _BucketShare:
        key = cut, stored, want, gathered_bytes
        found = self.moved.get(key)
        if found is None:
            there, back = ways = self._ways_of(cut, stored, want)
            gathers, share = any(leg.kind == "all_gather" for leg, _ in there), 1.0
            if (there or back) and goes_in_bucket(*(tuple(StepKind(leg.kind) for leg, _ in way) for way in ways)):
                limit = min(float(BUCKET_BYTES), gathered_bytes if gathers else max(LEAST_BYTES, self.total / BUCKETS))
                share = min(1.0, max(leg.before * itemsize for leg, itemsize in (*there, *back)) / max(limit, 1.0))
            found = self.moved[key] = _BucketShare(self._sent(there, share), self._sent(back, share), gathers)
        return found

    def _ways_of(self, cut: TensorCut, stored: Sharding, want: Sharding) -> tuple[tuple[_Sent, ...], tuple[_Sent, ...]]:
        there = cut.steps(self.routes, stored.value, want.value)
        back = cut.steps(self.routes, want.gradient.value, stored.gradient.value) if cut.trained else ()
        assert there is not None, "parameters are stored in full"
        assert back is not None, "parameters are stored in full"
        return tuple((leg, cut.itemsize) for leg in there), tuple((leg, cut.reduced) for leg in back)

    def _sent(self, way: tuple[_Sent, ...], share: float) -> tuple[float, float]:
        """Return link and host seconds of a share of a bucket."""
        seconds = host = 0.0
        for leg, itemsize in way if share else ():
            cost = self.costs.bucket_step(leg, leg.numel * itemsize / share)
            seconds, host = seconds + share * cost.seconds, host + share * cost.host_seconds
        return seconds, host

    def add_accumulated(self, sums: Floats, size: float) -> None:
        """Add what it takes to add a gradient, of so many bytes read and written, to that of earlier micro-batches."""
        prices = self.setting.prices
        seconds = seconds_of_bytes(size, prices.device)
        sums[Sum.DEVICE] += seconds
        sums[Sum.BACKWARD_ROOM] += seconds
        sums[Sum.HOST] += prices.launch if size else 0.0

    def add_casts(self, tensor: NamedTensor, sums: Floats, held: StorageOption, want: Sharding) -> None:
        """Add the casts of a parameter to the dtype of the compute, and of its gradient."""
        prices, trains = self.setting.prices, tensor.requires_grad and self.setting.trains
        size = prices.cast_bytes(tensor.name, held.layout)
        self._add_cast(sums, size, Sum.FORWARD_ROOM, held.lasting)
        if size and want.splits == held.layout.splits:
            # Autograd saves the copy.
            sums[Sum.KEPT_GIB] += self.setting.stored_share * self.gib(TensorCut.of(tensor, self.setting), want)
        if not trains:
            return
        deferred = held.defers(want)
        summed = self.setting.options.micro_batches > 1 and deferred
        size = prices.gradient_cast_bytes(tensor.name, want, held.layout, summed)
        self._add_cast(sums, size, Sum.BACKWARD_ROOM, deferred)
        if held.again:
            self._add_cast(sums, prices.cast_bytes(tensor.name, held.layout), Sum.BACKWARD_ROOM, once=False)

    def _add_cast(self, sums: Floats, size: float, room: Sum, once: bool) -> None:
        prices = self.setting.prices
        seconds = seconds_of_bytes(size, prices.device)
        if once:
            sums[Sum.FORWARD_ONCE if room is Sum.FORWARD_ROOM else Sum.BACKWARD_ONCE] += seconds
        elif size:
            sums[[Sum.DEVICE, room]] += seconds
            sums[Sum.HOST] += prices.launch


def block_of(name: str) -> str:
    """Return the layer that a parameter is of, as buckets see it."""
    found = re.match(r"(.*?\.\d+)\.", name)
    return found[1] if found else ""


# An array for each sum, all of one shape; absent sums are zero.
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


class ValueUse(NamedTuple):
    """Use of a value by one op."""

    # Resharded once more in the backward.
    again: bool = False
    # The resharded value is saved.
    kept: bool = False
    # The value itself is saved if it is not resharded.
    instead: bool = False
    # Share of its sum in a collective that joins several sums.
    share: float = 1.0


class ParameterUse(NamedTuple):
    """Use of a parameter by one op."""

    # Bytes of the layers that are gathered together.
    gathered: float
    # Some op saves it.
    kept: bool
    # The first op that takes the parameter decides if gradients wait for the last micro-batch; for later ops
    # they count as if they did.
    later: bool = False
    # Memory is counted where the gradient is produced.
    measured: bool = False


class CostTables:
    """Cache of the tables of one planning problem."""

    def __init__(self, setting: PlanningProblem) -> None:
        self.setting = setting
        self.ways = ReshardSums(setting)
        self.known: dict[Any, Any] = {}

    def cut(self, tensor: NamedTensor) -> TensorCut:
        return TensorCut.of(tensor, self.setting)

    def handled(self, tensor: NamedTensor, kept: bool, later: bool = False, measured: bool = False) -> ParameterUse:
        return ParameterUse(self.ways.blocks.get(block_of(tensor.name), 0.0), kept, later, measured)

    def values(self, cut: TensorCut, sources: Sequence[Sharding], wants: Sequence[Wants], use: ValueUse) -> CostTable:
        """Return the table of a value: shardings that it has, shardings that are needed."""

        def made(rows: Sequence[Sharding], columns: Sequence[Wants]) -> Parts:
            distinct = list(dict.fromkeys(want for each in columns for want in each if want is not None))
            device, host = self._pairs(cut, rows, distinct, use)
            place = {layout: i for i, layout in enumerate(distinct)}
            unreached = np.isinf(device)
            device = np.where(unreached, 0.0, device)
            parts = {
                Sum.DEVICE: _summed(device, columns, place, len(rows)),
                Sum.HOST: _summed(host, columns, place, len(rows)),
            }
            if unreached.any():
                parts[Sum.FORBIDDEN] = _summed(unreached.astype(np.float64), columns, place, len(rows))
            if use.kept:
                parts[Sum.KEPT_GIB] = self.setting.saved_share * self._kept(cut, rows, columns, use.instead)
            return parts

        return self._table(("values", cut, use), sources, wants, made)

    def parameters(
        self,
        cut: TensorCut,
        stored: Sequence[StorageOption],
        wants: Sequence[Wants],
        handled: ParameterUse,
        accumulates: Callable[[Sharding], float] | None = None,
        casts: Callable[[Floats, StorageOption, Sharding], None] | None = None,
    ) -> CostTable:
        """Return the table of a parameter: shardings of its storage, shardings that ops need.

        With `accumulates`, the cost of adding the gradient to that of earlier micro-batches is included; with `casts`
        that of casting it between the dtypes of a step.
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
                    first = next(iter(each), None)
                    if accumulates is not None and first is not None:
                        held = first if one.defers(first) else one.layout
                        self.ways.add_accumulated(sums[:, i, j], accumulates(held))
                    if casts is not None and first is not None:
                        casts(sums[:, i, j], one, first)
            return {key: sums[key] for key in Sum if sums[key].any()} or {Sum.DEVICE: sums[Sum.DEVICE]}

        return self._table(
            ("parameters", cut, handled, accumulates is not None, casts is not None), stored, wants, made
        )

    def shared(self, cut: TensorCut, stored: Sequence[StorageOption], handled: ParameterUse) -> Parts:
        """Return the cost of resharding a parameter once for several ops, for each storage option."""
        sums = np.zeros((len(Sum), len(stored)))
        for i, one in enumerate(stored):
            if one.shared is not None:
                sums[Sum.KEPT_GIB, i] += self.ways.kept_copy(cut, one, one.shared, handled.kept)
                self.ways.add_moved(sums[:, i], cut, one, one.shared, handled.gathered)
        return {key: sums[key] for key in Sum}

    def _pairs(
        self, cut: TensorCut, sources: Sequence[Sharding], targets: Sequence[Sharding], use: ValueUse
    ) -> tuple[Floats, Floats]:
        times = 2 if use.again else 1
        there = self._each(cut, [s.value for s in sources], [t.value for t in targets], use.share)
        if not cut.trained:
            return times * there[0], times * there[1]
        back = self._each(cut, [t.gradient.value for t in targets], [s.gradient.value for s in sources], 1.0)
        return times * there[0] + back[0].T, times * there[1] + back[1].T

    def _each(self, cut: TensorCut, sources: Sequence[Sharding], targets: Sequence[Sharding], share: float) -> Floats:
        """Return device and host seconds of one direction; each pair of shardings is priced once."""
        rows, row_of = _numbered(sources)
        columns, column_of = _numbered(targets)
        key = "each", cut.sizes, cut.by_share, cut.roles, cut.itemsize, share, tuple(rows), tuple(columns)
        if key not in self.known:
            found = np.zeros((2, len(rows), len(columns)))
            for i, source in enumerate(rows):
                for j, target in enumerate(columns):
                    found[:, i, j] = self.ways.way(cut, source, target, share)
            self.known[key] = found
        return np.asarray(self.known[key][:, row_of[:, None], column_of])

    def _kept(self, cut: TensorCut, rows: Sequence[Sharding], columns: Sequence[Wants], instead: bool) -> Floats:
        """Return the saved bytes that reshards add; with `instead`, the bytes of the value itself are taken off."""
        found = np.zeros((len(rows), len(columns)))
        for i, row in enumerate(rows):
            for j, each in enumerate(columns):
                for want in each:
                    if want is not None and want.value != row.value:
                        found[i, j] += self.ways.gib(cut, want)
                        found[i, j] -= self.ways.gib(cut, row) if instead else 0.0
        return found

    def _table(
        self,
        key: Any,
        rows: Sequence[Any],
        columns: Sequence[Wants],
        made: Callable[[Sequence[Any], Sequence[Wants]], Parts],
    ) -> CostTable:
        # Comparing identity is faster than comparing values; the objects are held, so that no id is reused.
        whole = key, id(rows), id(columns)
        if whole not in self.known:
            self.known[whole] = self._equal(key, rows, columns, made), rows, columns
        table: CostTable = self.known[whole][0]
        return table

    def _equal(
        self,
        key: Any,
        rows: Sequence[Any],
        columns: Sequence[Wants],
        made: Callable[[Sequence[Any], Sequence[Wants]], Parts],
    ) -> CostTable:
        distinct, row_of = _numbered(rows)
        wanted, column_of = _numbered([tuple(dict.fromkeys(each)) for each in columns])
        named = key, tuple(distinct), tuple(wanted)
        if named not in self.known:
            self.known[named] = made(distinct, wanted)
        parts = self.known[named]
        whole = "table", id(parts), row_of.tobytes(), column_of.tobytes()
        table: CostTable | None = self.known.get(whole)
        if table is None:
            table = self.known[whole] = CostTable(parts, row_of, column_of)
        return table


def _numbered(items: Sequence[Any]) -> tuple[list[Any], Ints]:
    """Return the distinct items, and for each item the index of its equal."""
    distinct: dict[Any, int] = {}
    places = [distinct.setdefault(item, len(distinct)) for item in items]
    return list(distinct), np.array(places, dtype=np.int64)


def _summed(pairs: Floats, columns: Sequence[Wants], place: Mapping[Sharding, int], rows: int) -> Floats:
    """Return a column for each tuple of shardings: the sum over its members."""
    found = np.zeros((rows, len(columns)))
    for j, each in enumerate(columns):
        for want in each:
            if want is not None:
                found[:, j] += pairs[:, place[want]]
    return found
