"""Lower bounds of reshard prices for all pairs of shardings at once.

An exact price takes a search for the cheapest steps. On three axes there are millions of pairs. A bound takes what any
steps have to send, at the least time of a byte:

* A set C of axes that change is crossed by collectives over an axis of C or more. All ranks that differ along other
  axes alone, the peers, hold a part of a target shard together; a rank has to receive the rest, and the peers as many
  rests as the target splits between them. A gather or a sum gives the peers along its axes the same elements, other
  collectives give each its own. A rank may receive a part across C, and the rest from its peers.
  Where an atom has the same axes in another order, some rank holds little of what it needs; a few ranks are looked at.
* Sums over axes D need D - 1 additions for each element, by collectives that reduce over an axis of D or more.
* Where the whole sum over an axis is needed, it is reduced at once, or scattered first and gathered then.

A collective of a buffer gives a rank at most as many elements as the buffer has. So the time is at least that of these
elements, and the least latency; the host launches one collective or more, or a local step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations, product
from math import inf, lcm, prod
from typing import Any, NamedTuple

import numpy as np

from autopar.cost.network import Network
from autopar.cost.reshard_costs import ReshardCosts
from autopar.sharding.reshard.reshard import StepKind
from autopar.sharding.sharding import Sharding, common_axes, longest
from autopar.solver import Floats, Ints

__all__ = ["ReshardBounds"]

SUMS = (StepKind.ALL_REDUCE.value, StepKind.REDUCE_SCATTER.value)
MOVES = StepKind.ALL_GATHER.value, StepKind.ALL_TO_ALL.value
KINDS = (*SUMS, *MOVES)
# Axes of sums, those that are crossed, and those that take part.
_At = tuple[Ints | int, Ints | int, Ints]
# Collectives after which all ranks have the same elements.
SAME = StepKind.ALL_REDUCE.value, StepKind.ALL_GATHER.value


class LeastCosts(NamedTuple):
    """Least seconds of each pair of shardings but for the latency, the latency, and the seconds of the host."""

    seconds: Floats
    latency: Floats
    host_seconds: Floats


@dataclass(eq=False)
class ReshardBounds:
    """Lower bounds on one mesh; sets of axes are bit masks."""

    costs: ReshardCosts
    axes: tuple[str, ...]
    # Product of the sizes of each set of axes.
    ranks: Floats = field(init=False)
    # Least latency of a collective over some of these axes.
    latency: Floats = field(init=False)
    # Prices of a byte by the axes of sums, those that it crosses, and those that take part: by any collective, and by a
    # sum that all ranks receive. A collective adds up along axes of sums alone.
    crossing: _ByteSeconds = field(init=False)
    reducing: _ByteSeconds = field(init=False)
    # Least seconds of a byte by the axes of sums and those that it is added up over: by any collective, and by one that
    # leaves each rank a part.
    adding: Floats = field(init=False)
    scattering: Floats = field(init=False)
    _known: dict[Any, LeastCosts] = field(default_factory=dict)
    _held: dict[tuple[int, int], tuple[Floats, Floats]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count, self.network = 1 << len(self.axes), self.costs.network
        launches, launch = self.network.cluster.library.host_seconds, self.costs.launch_seconds
        self.launch = min(launches.get(kind, launch) for kind in KINDS)
        names = [tuple(axis for i, axis in enumerate(self.axes) if mask >> i & 1) for mask in range(count)]
        self.ranks = np.array([float(prod(self.network.axes[axis] for axis in each)) for each in names])
        lines = {kind: [least_line(self.network, kind, each) for each in names] for kind in KINDS}
        self.latency = np.zeros(count)
        self.adding, self.scattering = np.zeros((2, count, count))
        self.crossing, self.reducing = (_ByteSeconds(np.zeros((3, count, count, count))) for _ in range(2))
        subsets = [[mask for mask in range(1, count) if mask & whole == mask] for whole in range(count)]
        for active in range(1, count):
            self.latency[active] = min(lines[kind][mask][0] for kind in KINDS for mask in subsets[active])
            for summed, cross in product((0, *subsets[active]), subsets[active]):
                moves = [(kind, mask) for kind in MOVES for mask in subsets[active]]
                sums = [(kind, mask) for kind in SUMS for mask in subsets[summed]]
                along = min((lines[kind][mask][1] for kind, mask in (*moves, *sums) if not mask & cross), default=inf)
                wholes = [(kind, mask) for kind, mask in sums if kind == StepKind.ALL_REDUCE.value]
                for seconds, kinds in ((self.crossing, (*moves, *sums)), (self.reducing, wholes)):
                    peers = active & ~cross
                    ways = [
                        (lines[kind][mask][1], self.ranks[peers & ~mask if kind in SAME else peers])
                        for kind, mask in kinds
                        if mask & cross
                    ]
                    if ways:
                        seconds.set((summed, cross, active), ways, along)
        for summed, cross in product(range(1, count), repeat=2):
            over = [mask for mask in subsets[summed] if mask & cross]
            for table, some in ((self.adding, SUMS), (self.scattering, SUMS[1:])):
                table[summed, cross] = min((lines[kind][mask][1] for kind in some for mask in over), default=0.0)
        orders = [each for size in range(len(self.axes) + 1) for each in permutations(self.axes, size)]
        self.number = {axes: i for i, axes in enumerate(orders)}
        self.masks = np.array([self.mask(axes) for axes in orders], dtype=np.int64)
        self.common = np.zeros((len(orders), len(orders)), dtype=np.int64)
        self.held = np.ones((len(orders), len(orders), count))
        for (i, source), (j, target) in product(enumerate(orders), repeat=2):
            stays = common_axes(source, target)
            self.common[i, j] = self.mask(source[:stays])
            own, wanted = source[stays:], target[stays:]
            for cross in range(1, count):
                if self.mask(own) & cross:
                    self.held[i, j, cross] = self._least_held(own, wanted, cross)
        self.before, self.after = self.masks[:, None] & ~self.common, self.masks[None, :] & ~self.common

    def between(
        self, sizes: Sequence[int], itemsize: float, sources: Sequence[Sharding], targets: Sequence[Sharding]
    ) -> LeastCosts:
        """Return the least costs of each pair of shardings: a row for each source, a column for each target."""
        # Gradients of many shardings are the same; elements of atoms that all axes divide only scale the seconds.
        rows, columns = (list(dict.fromkeys(shardings)) for shardings in (sources, targets))
        whole = int(self.ranks[-1])
        small = tuple(size if size % whole else whole for size in sizes)
        key = small, tuple(rows), tuple(columns)
        if key not in self._known:
            self._known[key] = self._between(small, rows, columns)
        found = self._known[key]
        places = [{one: i for i, one in enumerate(each)} for each in (rows, columns)]
        at = np.ix_([places[0][one] for one in sources], [places[1][one] for one in targets])
        scale = itemsize * prod(sizes) / max(1, prod(small))
        return LeastCosts(found.seconds[at] * scale, found.latency[at], found.host_seconds[at])

    def _between(self, sizes: Sequence[int], sources: Sequence[Sharding], targets: Sequence[Sharding]) -> LeastCosts:
        """Return the least costs for a tensor of bytes."""
        pairs = _Pairs.of(self, sizes, sources, targets)
        # A rank needs the mean of uneven pieces.
        wanted = np.ones(len(targets))
        for i, size in enumerate(sizes):
            wanted = wanted * size / self.ranks[self.masks[pairs.wanted[:, i]]]
        seconds = np.zeros(pairs.active.shape)
        for cross in range(1, len(self.ranks)):
            missing = np.where((pairs.summed & cross) != 0, 1.0, 1.0 - self._held_across(pairs, sizes, cross)) * wanted
            # Ranks along the axes of a sum that is made hold it together: axes across them do not count.
            missing = np.where((pairs.made & cross) == 0, missing, 0.0)
            per_rank, per_peers = missing / self.ranks[pairs.made], missing * self.ranks[pairs.split & ~cross]
            at: _At = (pairs.summed, cross & pairs.active, pairs.active)
            seconds = np.maximum(seconds, self.crossing.seconds(at, per_rank, per_peers))
        seconds = np.maximum(seconds, np.where(pairs.made == 0, self._sum_seconds(pairs, sizes, wanted), 0.0))
        is_sent, changes = seconds > 0.0, pairs.active != 0
        latency = np.where(is_sent, self.latency[pairs.active], 0.0)
        local = min(self.launch, self.costs.launch_seconds)
        return LeastCosts(seconds, latency, np.where(is_sent, self.launch, np.where(changes, local, 0.0)))

    def _held_across(self, pairs: _Pairs, sizes: Sequence[int], cross: int) -> Floats:
        """Return the share of a target shard that a rank holds at most with all that differ from it along other axes.

        The least share of an atom is that of another rank for each atom, so it counts for one of them.
        """
        held, least = np.ones((2, *pairs.active.shape))
        for i, size in enumerate(sizes):
            shares, least_shares = self._held_of_atom(size, cross)
            at = pairs.at[i]
            held *= shares.take(at)
            least = np.minimum(least, least_shares.take(at))
        return np.asarray(held * least)

    def _held_of_atom(self, size: int, cross: int) -> tuple[Floats, Floats]:
        """Return for an atom of a size, by the axes of both ends, the share that is held and the least of some ranks,
        as a share of it.
        """
        key = size, cross
        if key not in self._held:
            most = np.array([longest(size, axes, self.network.axes) for axes in self.number])
            mean = max(size, 1) / self.ranks[self.masks]
            share = np.minimum(1.0, self.ranks[self.before & ~cross] * most[:, None] / mean)
            is_even = size % self.ranks[self.masks[:, None] | self.masks] == 0
            self._held[key] = share, np.where(is_even, self.held[:, :, cross] / share, 1.0)
        return self._held[key]

    def _sum_seconds(self, pairs: _Pairs, sizes: Sequence[int], wanted: Floats) -> Floats:
        """Return the least seconds of the sums: of their additions, and of each sum that ranks need whole."""
        numel = float(prod(sizes)) / self.ranks[pairs.fixed] / self.ranks[pairs.active]
        found = numel * (self.ranks[pairs.summed] - 1.0) * self.adding[pairs.summed, pairs.summed]
        for axis in (1 << i for i in range(len(self.axes))):
            per_rank, per_peers = wanted[None, :], wanted[None, :] * self.ranks[pairs.split & ~axis]
            moved: _At = (0, axis & pairs.active, pairs.active)
            added = numel * (self.ranks[axis] - 1.0) * self.scattering[pairs.summed, axis]
            others = 1.0 - 1.0 / self.ranks[axis]
            scattered = added + others * self.crossing.seconds(moved, per_rank, per_peers)
            at: _At = (pairs.summed, axis & pairs.active, pairs.active)
            is_whole = ((pairs.summed & axis) != 0) & ((pairs.split & axis) == 0)
            reduced = self.reducing.seconds(at, per_rank, per_peers)
            found = np.maximum(found, np.where(is_whole, np.minimum(scattered, reduced), 0.0))
        return np.asarray(found)

    def beyond(
        self, sizes: Sequence[int], sources: Sequence[Sharding], targets: Sequence[Sharding]
    ) -> tuple[Ints, Ints]:
        """Return for each pair the axes that split atoms beyond the common major ones, in the source and the target."""
        pairs = _Pairs.of(self, sizes, sources, targets)
        nothing = np.zeros_like(pairs.fixed)
        return np.bitwise_or.reduce([nothing, *pairs.before]), np.bitwise_or.reduce([nothing, *pairs.after])

    def mask(self, axes: Iterable[str]) -> int:
        return sum(1 << self.axes.index(axis) for axis in axes)

    def _least_held(self, source: tuple[str, ...], target: tuple[str, ...], cross: int) -> float:
        """Return the share of its target shard of an atom that a rank holds together with all that differ from it
        along other axes than `cross`: the least of some ranks.
        """
        sizes, together = self.network.axes, [axis for axis in self.axes if axis in (*source, *target)]
        parts, wanted = (prod(sizes[axis] for axis in one) for one in (source, target))
        cells = lcm(parts, wanted)
        least = 1.0
        for places in product(*((0, sizes[axis] - 1) for axis in together)):
            at = dict(zip(together, places, strict=True))
            begin = _index(target, at, sizes) * (cells // wanted)
            index = np.arange(begin, begin + cells // wanted) // (cells // parts)
            is_held = np.ones(len(index), dtype=bool)
            for axis in reversed(source):
                if self.mask((axis,)) & cross:
                    is_held &= index % sizes[axis] == at[axis]
                index //= sizes[axis]
            least = min(least, float(is_held.mean()))
        return least


@dataclass(frozen=True, eq=False)
class _ByteSeconds:
    """Duals of the least time to receive: by the rank, and by all peers together.

    A byte that some peers receive, each its own, takes at least `together` for each of them. Or it takes `own` for the
    rank, and `beside` for each of them.
    """

    # Together, own, beside; then by the axes of sums, those that are crossed, and those that take part.
    values: Floats

    def set(self, at: tuple[int, int, int], ways: Sequence[tuple[float, float]], along: float) -> None:
        """Set the numbers from the ways across, each with the time of a byte and the peers that get bytes of their own;
        a byte from a peer takes `along`.
        """
        own = min(along, *(seconds for seconds, _ in ways))
        together = min(seconds / peers for seconds, peers in ways)
        self.values[(slice(None), *at)] = together, own, min((seconds - own) / peers for seconds, peers in ways)

    def seconds(self, at: _At, per_rank: Floats, per_peers: Floats) -> Floats:
        """Return the least seconds in which each rank receives so many bytes, and all peers so many different ones."""
        count = self.values.shape[-1]
        summed, cross, active = at
        index = (summed * count + cross) * count + active
        together, own, beside = (table.take(index) for table in self.values)
        return np.asarray(np.maximum(together * per_peers, own * per_rank + beside * per_peers))


@dataclass(frozen=True, eq=False)
class _Pairs:
    """Sets of axes for each pair of shardings; arrays have a row for each source, a column for each target."""

    # Numbers of the axes of each atom of the targets.
    wanted: Ints
    # By atom, the numbers of the axes of both ends, as an index into a table of them.
    at: tuple[Ints, ...]
    # By atom, the axes beyond the common major ones, which stay.
    before: tuple[Ints, ...]
    after: tuple[Ints, ...]
    # Axes that split atoms and stay, axes that take part.
    fixed: Ints
    active: Ints
    # Axes that split the target and do not stay.
    split: Ints
    # Axes of sums that are added up, and of sums that are made.
    summed: Ints
    made: Ints

    @staticmethod
    def of(
        bounds: ReshardBounds, sizes: Sequence[int], sources: Sequence[Sharding], targets: Sequence[Sharding]
    ) -> _Pairs:
        own = _numbers(bounds, sources, len(sizes))
        wanted = _numbers(bounds, targets, len(sizes))
        partial = np.array([bounds.mask(one.partial) for one in sources], dtype=np.int64)[:, None]
        asked = np.array([bounds.mask(one.partial) for one in targets], dtype=np.int64)[None, :]
        fixed = np.zeros((len(sources), len(targets)), dtype=np.int64)
        active, before, after = partial ^ asked, list[Ints](), list[Ints]()
        at = tuple(own[:, i][:, None] * len(bounds.masks) + wanted[:, i][None, :] for i in range(len(sizes)))
        for each in at:
            before.append(bounds.before.take(each))
            after.append(bounds.after.take(each))
            fixed = fixed | bounds.common.take(each)
            active = active | before[-1] | after[-1]
        return _Pairs(
            wanted,
            at,
            tuple(before),
            tuple(after),
            fixed,
            active,
            np.bitwise_or.reduce(after) if after else np.zeros_like(fixed),
            partial & ~asked,
            asked & ~partial,
        )


def _numbers(bounds: ReshardBounds, shardings: Sequence[Sharding], atoms: int) -> Ints:
    found = [[bounds.number[axes] for axes in one.splits] for one in shardings]
    return np.array(found, dtype=np.int64).reshape(len(shardings), atoms)


def _index(axes: tuple[str, ...], at: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    """Return the number of a rank's shard along an atom that these axes split."""
    index = 0
    for axis in axes:
        index = index * sizes[axis] + at[axis]
    return index


def least_line(network: Network, kind: str, axes: tuple[str, ...]) -> tuple[float, float]:
    """Return seconds and seconds of a byte that a collective takes at least, whatever its buffer."""
    curves = network.curves(kind, axes) if axes else ()
    if not curves:
        return 0.0, 0.0
    ratio = network.least_ratio(kind, axes)
    latency = ratio * min(curve.latency_seconds for curve in curves)
    per_byte = ratio * min(curve.seconds_per_byte for curve in curves)
    if kind == StepKind.ALL_REDUCE.value:
        for way in network.level_sums(axes):
            phases = [(least_line(network, one.kind, one.axes), one.share) for one in way.phases(network.axes)]
            latency = min(latency, sum(line[0] for line, _ in phases))
            per_byte = min(per_byte, sum(share * line[1] for line, share in phases))
    return latency, per_byte
