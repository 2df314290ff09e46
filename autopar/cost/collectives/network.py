"""The price of communication: what a collective over some axes of a mesh takes on a cluster.

An algorithm of the library (autopar/cost/collectives/algorithms.py) is, on the links that the axes span, three numbers:
the time of its hops L, the time β of a byte, and the longest time F to fill its pipeline. The message is cut so that
waiting for hops and sending overlap best, but pieces are no larger than the library's buffers:

    seconds(S) = L + S β + min(sqrt(L S β), F)

The price is the minimum over the algorithms that the library has. Everything but S is worked out once per (kind, axes).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, inf, prod, sqrt
from types import MappingProxyType

from autopar.cost.collectives.algorithms import ALGORITHMS, KINDS, LevelSpan, Phase
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.hardware.topology import Algorithm, TopologyLevel
from autopar.errors import ClusterError
from autopar.mesh import Mesh, SubMesh
from autopar.names import did_you_mean
from autopar.sharding.reshard.reshard import LinkCost

__all__ = ["KINDS", "Curve", "Network"]

PAIRWISE = ("all_to_all", "gather", "scatter", "send", "halo_exchange")
"""Messages between pairs of ranks, each of its own data."""
LOCAL = ("slice", "keep_one", "pad")
"""Steps of a reshard that send nothing."""
_LARGE = 2.0**30
"""Bytes at which a link is rated for the search over reshards: latencies do not count there."""


@dataclass(frozen=True)
class Curve:
    """The time of one algorithm on given links, by the bytes of the buffer."""

    algorithm: str
    latency_seconds: float
    seconds_per_byte: float
    fill_seconds: float

    def seconds(self, buffer_bytes: float) -> float:
        sending = buffer_bytes * self.seconds_per_byte
        return self.latency_seconds + sending + min(sqrt(self.latency_seconds * sending), self.fill_seconds)

    def beats(self, other: Curve, ties: bool) -> bool:
        """Whether it is never slower; with all numbers equal only if `ties` are won."""
        mine = (self.latency_seconds, self.seconds_per_byte, self.fill_seconds)
        its = (other.latency_seconds, other.seconds_per_byte, other.fill_seconds)
        return all(a <= b for a, b in zip(mine, its, strict=True)) and (mine != its or ties)


@dataclass(frozen=True)
class Network:
    """The links of a cluster as the axes of a mesh, major to minor, use them. Rank 0 is the first of the first node.

    `links` puts an axis on a level of the cluster, whatever the ranks say (`dp=2@network`).
    """

    cluster: Cluster
    axes: SubMesh
    links: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    _curves: dict[tuple[str, tuple[str, ...]], tuple[Curve, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _best: dict[tuple[str, tuple[str, ...]], tuple[Curve, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _seconds: dict[tuple[str, tuple[str, ...], float], float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        names = [level.name for level in self.cluster.level]
        for axis, link in self.links.items():
            if link not in names:
                raise ClusterError(
                    f"cluster '{self.cluster.name}' has no links called '{link}', of axis '{axis}'"
                    f"{did_you_mean(link, names)}\n"
                    f"fix: its links are {', '.join(names)}"
                )
        room = prod(level.units or 1 for level in self.cluster.level)
        if self.cluster.level[-1].units is not None and self.size > room and not self.links:
            mesh = ",".join(f"{axis}={size}" for axis, size in self.axes.items())
            raise ClusterError(
                f"mesh '{mesh}' has {self.size} devices; cluster '{self.cluster.name}' has {room}\n"
                "fix: take a smaller mesh, or give the cluster another level of links"
            )

    @staticmethod
    def of(cluster: Cluster, mesh: Mesh) -> Network:
        """The network of a mesh, with the links that its text gives: `dp=2@network,tp=8`."""
        links = {axis.name: axis.link for axis in mesh.declared if axis.link is not None}
        return Network(cluster, mesh.whole, links)

    @property
    def size(self) -> int:
        return prod(self.axes.values())

    # -- prices

    def seconds(self, kind: str, axes: tuple[str, ...], buffer_bytes: float) -> float:
        """What one collective takes; the buffer is what is reduced, gathered or exchanged by each rank."""
        key = (kind, axes, buffer_bytes)
        found = self._seconds.get(key)
        if found is None:
            found = min((curve.seconds(buffer_bytes) for curve in self._useful(kind, axes)), default=0.0)
            self._seconds[key] = found if buffer_bytes else 0.0
        return self._seconds[key]

    def curves(self, kind: str, axes: tuple[str, ...]) -> tuple[Curve, ...]:
        """What the library can do, as functions of the size; empty where there is nothing to send."""
        key = (kind, axes)
        if key not in self._curves:
            self._curves[key] = self._all_curves(kind, axes)
        return self._curves[key]

    def _useful(self, kind: str, axes: tuple[str, ...]) -> tuple[Curve, ...]:
        """Those that no other beats at every size."""
        key = (kind, axes)
        if key not in self._best:
            curves = self.curves(kind, axes)
            self._best[key] = tuple(
                one
                for i, one in enumerate(curves)
                if not any(other.beats(one, j < i) for j, other in enumerate(curves))
            )
        return self._best[key]

    def algorithm(self, kind: str, axes: tuple[str, ...], buffer_bytes: float) -> str:
        """The name of the cheapest algorithm; empty where there is nothing to send."""
        curves = self.curves(kind, axes)
        return min(curves, key=lambda curve: curve.seconds(buffer_bytes)).algorithm if curves else ""

    def link(self, axes: tuple[str, ...], itemsize: int = 1) -> LinkCost:
        """Prices in seconds for the search over reshards: per element sent, and per collective."""
        ranks = prod(self.axes[axis] for axis in axes)
        if ranks == 1:
            return LinkCost(0.0, 0.0)
        large = self.seconds("all_gather", axes, _LARGE) - self.seconds("all_gather", axes, _LARGE / 2)
        sent = _LARGE / 2 * (ranks - 1) / ranks
        small = self.seconds("all_gather", axes, 1.0)
        return LinkCost(itemsize * large / sent, small)

    def _all_curves(self, kind: str, axes: tuple[str, ...]) -> tuple[Curve, ...]:
        if kind in LOCAL:
            return ()
        assert kind in KINDS, f"no collective is called {kind}"
        for axis in axes:
            assert axis in self.axes, f"axis {axis} of a mesh with {', '.join(self.axes)}"
        group = self.group(axes)
        if not group:
            return ()
        found = tuple(
            curve
            for algorithm in self.cluster.library.algorithm
            if kind in algorithm.collectives
            if (curve := _curve(kind, algorithm, group)) is not None
        )
        if not found:
            raise ClusterError(
                f"the library '{self.cluster.library.name}' of cluster '{self.cluster.name}' has no algorithm "
                f"for {kind} over {'*'.join(axes)}\nfix: add one to it (docs/costs.md)"
            )
        return found

    # -- links

    def group(self, axes: tuple[str, ...]) -> tuple[LevelSpan, ...]:
        """The links that a group of ranks along the axes spans, the innermost first."""
        spans: list[LevelSpan] = []
        # Of a unit of the level below: the group's ranks, those of the whole mesh, and as many as there is room for.
        members = active = room = 1
        for level, count, all_units in zip(
            self.cluster.level, self._units(axes), self._units(tuple(self.axes)), strict=True
        ):
            if count > 1:
                ports = self._wired(level, axes, room) if level.wires else level.ports
                rate, lone = _rates(level, ports, members, active, room, all_units)
                spans.append(LevelSpan(level, count, members, rate, lone, room == 1))
            members *= count
            active *= all_units
            room *= level.units or 1
        return tuple(spans)

    def _units(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """How many units of each level the largest part of a group joins."""
        if self.links:
            placed = self._placed()
            return tuple(prod(placed[axis][i] for axis in axes) for i in range(len(self.cluster.level)))
        counts: list[int] = []
        unit = 1
        places = self._ranks(axes)
        for level in self.cluster.level:
            upper = unit * (level.units or max(self.size, 1))
            inside: dict[int, set[int]] = {}
            for rank in places:
                inside.setdefault(rank // upper, set()).add(rank // unit)
            counts.append(max(len(lower) for lower in inside.values()))
            unit = upper
        return tuple(counts)

    def _ranks(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks of the first group."""
        strides = self._strides()
        ranks = [0]
        for axis in axes:
            ranks = [rank + i * strides[axis] for rank in ranks for i in range(self.axes[axis])]
        return tuple(sorted(ranks))

    def _strides(self) -> dict[str, int]:
        names = list(self.axes)
        return {name: prod(self.axes[other] for other in names[i + 1 :]) for i, name in enumerate(names)}

    def _placed(self) -> dict[str, list[int]]:
        """Axis -> units of each level, where some are put on one: the others fill what is left, minor first."""
        levels = self.cluster.level
        names = [level.name for level in levels]
        left = [level.units or 10**18 for level in levels]
        placed = {axis: [1] * len(levels) for axis in self.axes}
        for axis, link in self.links.items():
            i = names.index(link)
            placed[axis][i] = self.axes[axis]
            left[i] = max(1, left[i] // self.axes[axis])
        for axis in reversed(list(self.axes)):
            if axis in self.links:
                continue
            rest = self.axes[axis]
            for i in range(len(levels)):
                take = rest if i == len(levels) - 1 else _largest_divisor(rest, left[i])
                placed[axis][i] = take
                left[i] = max(1, left[i] // take)
                rest //= take
        return placed

    def _wired(self, level: TopologyLevel, axes: tuple[str, ...], unit_size: int) -> int:
        """Where units are wired in pairs: the links that the least connected one has to the others of the group."""
        assert level.units is not None, "wires are checked against units"
        node = unit_size * level.units
        here = sorted({rank % node // unit_size for rank in self._ranks(axes) if rank // node == 0})
        return max(1, min(sum(level.wired(one, other) for other in here) for one in here))


def _rates(level: TopologyLevel, ports: int, members: int, active: int, room: int, units: int) -> tuple[float, float]:
    """What the group's `members` of a unit send over a level, and what one of them alone does.

    All `active` ranks of the unit send at once, each group its part. Each of the `room` ranks that it could hold has
    its own part of the ports, no less than one.
    """
    groups = max(1, ceil(active / members))
    own = max(1.0, ports / room)
    rate = level.rate_bytes_per_second
    lone, together = (rate * min(own * count, ports / groups) for count in (1, members))
    if level.backplane_bytes_per_second is not None:
        share = level.backplane_bytes_per_second * members / (active * units)
        lone, together = min(lone, share), min(together, share)
    return together, lone


def _largest_divisor(number: int, most: int) -> int:
    return next(divisor for divisor in range(min(number, most), 0, -1) if number % divisor == 0)


def _curve(kind: str, algorithm: Algorithm, group: tuple[LevelSpan, ...]) -> Curve | None:
    """An algorithm on the links of a group."""
    if not _offered(algorithm, group):
        return None
    ranks = prod(span.units for span in group)
    if not algorithm.least <= ranks <= (algorithm.most or ranks):
        return None
    way = ALGORITHMS[algorithm.name](kind, group)
    if way is None:
        return None
    latency = algorithm.base_seconds
    per_byte = 0.0
    fill = 0.0
    for phase in way:
        for span, hops in zip(group, phase.hops, strict=True):
            latency += hops * algorithm.hop(span.level)
        times = [
            _seconds_per_byte(kind, algorithm, span, phase) * share
            for span, share in zip(group, phase.traffic, strict=True)
        ]
        slowest = times.index(max(times))
        per_byte += times[slowest]
        if phase.traffic[slowest]:
            fill += algorithm.fill_bytes.get(group[slowest].level.link, inf) * times[slowest] / phase.traffic[slowest]
    return Curve(algorithm.names[0], latency, per_byte, fill)


def _offered(algorithm: Algorithm, group: tuple[LevelSpan, ...]) -> bool:
    """Whether the switches can do what the algorithm needs."""
    for need in algorithm.needs:
        spans = group[:1] if need == "nvls" else group[1:]
        if not all(need in span.level.offers for span in spans):
            return False
    return True


def _seconds_per_byte(kind: str, algorithm: Algorithm, span: LevelSpan, phase: Phase) -> float:
    """Of what passes the links of one unit."""
    link = span.level.link
    rate = span.lone_rate if phase.lone else span.rate
    rate *= algorithm.bandwidth_fraction.get(link, 1.0)
    if kind in PAIRWISE:
        rate *= span.level.send_fraction
    return 1 / min(rate, algorithm.limit_bytes_per_second.get(link, inf))
