"""Time of collectives over axes of a mesh on the links of a cluster.

On the links that the axes span, an algorithm of the library (autopar/cost/collective_algorithms.py) has four numbers:
the time L of its hops, the time β of a byte, the root C of the product of both over the phases that are pipelined, and
the longest time F to fill the pipeline. The library cuts a message of S bytes into pieces for the best overlap of hops
and sends, but no larger than its buffers:

    seconds(S) = L + S β + min(C sqrt(S), F)

The start of a piece is taken to occupy its sender for a quarter of a hop. Algorithms that run in rounds have C = 0. The
price is the minimum over the algorithms that the library takes for a buffer of this size. The numbers are computed once
for each kind and axes. Where a table of the library has measured times of a collective on these levels, the price is
scaled to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil, inf, prod, sqrt
from types import MappingProxyType

from autopar.cost.algorithm_registry import ALGORITHMS
from autopar.cost.collective_algorithms import KINDS, Algorithm, LevelSpan, Phase, TopologyLevel, by_link
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.level_prices import cheapest_ways, seconds_by_level
from autopar.cost.measured.interpolation import Place, Ratios, place
from autopar.cost.measured.tables import CollectiveTable, LibraryTables
from autopar.cost.placement import GroupPart, free_places, ranks_of, ranks_per_unit, spread_of, straddling
from autopar.errors import ClusterError
from autopar.mesh import SubMesh
from autopar.names import did_you_mean
from autopar.sharding.level_sums import LevelSum

# `StepKind.RING_PASS`, whose module loads torch.
RING_PASS = "ring_pass"
# Collectives of messages between pairs of ranks, each with data of its own.
PAIRWISE = ("all_to_all", "gather", "scatter", "send", "halo_exchange")
# Steps of a reshard that send nothing.
LOCAL = ("slice", "keep_one", "pad")


@dataclass(frozen=True)
class Curve:
    """Time of one algorithm on given links as a function of the buffer bytes."""

    algorithm: str
    latency_seconds: float
    seconds_per_byte: float
    # Times the root of the bytes: the time to fill the pipeline, and the most that it takes.
    fill_per_root: float = 0.0
    fill_seconds: float = inf
    # Buffers for which the library takes it.
    smallest_bytes: float = 0.0
    largest_bytes: float = inf

    def seconds(self, buffer_bytes: float) -> float:
        filling = min(self.fill_per_root * sqrt(buffer_bytes), self.fill_seconds)
        return self.latency_seconds + buffer_bytes * self.seconds_per_byte + filling

    def takes(self, buffer_bytes: float) -> bool:
        """Return whether the library takes it for a buffer of this size."""
        return self.smallest_bytes <= buffer_bytes <= self.largest_bytes

    @property
    def numbers(self) -> tuple[float, ...]:
        costs = self.latency_seconds, self.seconds_per_byte, self.fill_per_root, self.fill_seconds
        return (*costs, self.smallest_bytes, -self.largest_bytes)

    def dominates(self, other: Curve, ties: bool) -> bool:
        """Return True for a curve that is never slower where the other is taken; for equal curves return `ties`."""
        no_slower = all(a <= b for a, b in zip(self.numbers, other.numbers, strict=True))
        return no_slower and (self.numbers != other.numbers or ties)


def _fastest(curves: Sequence[Curve], buffer_bytes: float) -> Curve | None:
    """Return the fastest curve of those taken for this size; of all where none is."""
    taken = [curve for curve in curves if curve.takes(buffer_bytes)]
    return min(taken or curves, key=lambda curve: curve.seconds(buffer_bytes), default=None)


_CurveCache = dict[tuple[str, tuple[str, ...]], tuple[Curve, ...]]


@dataclass(frozen=True)
class Network:
    """Links of a cluster under the axes of a mesh, major to minor; rank 0 is the first of the first node.

    `links` puts an axis on a level of the cluster, independent of the ranks (`dp=2@network`).
    """

    cluster: Cluster
    axes: SubMesh
    links: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    # Caches: all curves and the undominated ones by kind and axes, and seconds by kind, axes and bytes.
    _curves: _CurveCache = field(default_factory=dict, init=False, repr=False, compare=False)
    _best: _CurveCache = field(default_factory=dict, init=False, repr=False, compare=False)
    _seconds: dict[tuple[str, tuple[str, ...], float], float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    _level_sums: dict[tuple[str, ...], tuple[LevelSum, ...]] = field(
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

    @property
    def size(self) -> int:
        return prod(self.axes.values())

    # -- prices

    def seconds(self, kind: str, axes: tuple[str, ...], buffer_bytes: float) -> float:
        """Return the time of a collective; the buffer is the reduced, gathered or exchanged tensor of a rank.

        An all-reduce may run by level, as three collectives or more.
        """
        by_level = self.by_level(axes, buffer_bytes) if kind == "all_reduce" else None
        if by_level is not None:
            return seconds_by_level(by_level, self.axes, self.library_seconds, buffer_bytes)
        return self.library_seconds(kind, axes, buffer_bytes)

    def by_level(self, axes: tuple[str, ...], buffer_bytes: float) -> LevelSum | None:
        """Return how an all-reduce of a buffer runs by level; None for one collective."""
        return next((one for one in self.level_sums(axes) if one.takes(buffer_bytes)), None)

    def level_sums(self, axes: tuple[str, ...]) -> tuple[LevelSum, ...]:
        """Return the all-reduces over some axes that run by level, for which buffers."""
        if len(axes) < 2:
            return ()
        key = tuple(axis for axis in self.axes if axis in axes)
        found = self._level_sums.get(key)
        if found is None:
            host = self.cluster.library.host_seconds
            fast_first = sorted(key, key=self._slowness)
            found = self._level_sums[key] = cheapest_ways(fast_first, self.axes, self.library_seconds, host)
        return found

    def _slowness(self, axis: str) -> tuple[int, float, int]:
        """Return a key that orders axes by their links; the minor one of equal axes comes first."""
        group = self.group((axis,))
        names = [level.name for level in self.cluster.level]
        outermost = names.index(group[-1].level.name) if group else -1
        return outermost, -min((span.rate for span in group), default=inf), -list(self.axes).index(axis)

    def library_seconds(self, kind: str, axes: tuple[str, ...], buffer_bytes: float) -> float:
        """Return the time of one collective of the library; passing keys takes a send for each rank but one."""
        if kind == RING_PASS:
            hops = prod(self.axes[axis] for axis in axes) - 1
            return hops * self.library_seconds("send", axes, buffer_bytes / max(hops, 1))
        key = (kind, axes, buffer_bytes)
        found = self._seconds.get(key)
        if found is None:
            seconds = self._formula_seconds(kind, axes, buffer_bytes)
            self._seconds[key] = seconds and seconds * self._measured_ratio(kind, axes, buffer_bytes)
        return self._seconds[key]

    def _formula_seconds(self, kind: str, axes: tuple[str, ...], buffer_bytes: float) -> float:
        curve = _fastest(self._undominated(kind, axes), buffer_bytes) if buffer_bytes else None
        return 0.0 if curve is None else curve.seconds(buffer_bytes)

    def curves(self, kind: str, axes: tuple[str, ...]) -> tuple[Curve, ...]:
        """Return the curves of all algorithms; none where nothing is sent."""
        key = (kind, axes)
        if key not in self._curves:
            self._curves[key] = self._all_curves(kind, axes)
        return self._curves[key]

    def _undominated(self, kind: str, axes: tuple[str, ...]) -> tuple[Curve, ...]:
        """Return the curves that are the fastest at some size."""
        key = (kind, axes)
        if key not in self._best:
            curves = list(enumerate(self.curves(kind, axes)))
            # Of equal curves the first stays.
            self._best[key] = tuple(
                one for i, one in curves if not any(other.dominates(one, ties=j < i) for j, other in curves)
            )
        return self._best[key]

    def algorithm(self, kind: str, axes: tuple[str, ...], buffer_bytes: float) -> str:
        """Return the name of the fastest algorithm; empty where nothing is sent."""
        curve = _fastest(self.curves(kind, axes), buffer_bytes)
        return "" if curve is None else curve.algorithm

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

    # -- measured times

    def is_measured(self, kind: str, axes: tuple[str, ...]) -> bool:
        """Return whether measured times scale the price of a collective."""
        return bool(self._measured(kind, axes))

    def _measured_ratio(self, kind: str, axes: tuple[str, ...], buffer_bytes: float) -> float:
        """Return the measured over the predicted time: by size in each measured group, then by the size of groups."""
        curves = self._measured(kind, axes)
        if not curves:
            return 1.0
        here = place(buffer_bytes)
        units = place(*self._units(axes))
        return Ratios.of([(where, curve.at(here), 1.0) for where, curve in curves]).at(units)

    def least_ratio(self, kind: str, axes: tuple[str, ...]) -> float:
        """Return the least measured over predicted time of a collective, whatever its size."""
        return min((curve.least for _, curve in self._measured(kind, axes)), default=1.0)

    def _measured(self, kind: str, axes: tuple[str, ...]) -> tuple[tuple[Place, Ratios], ...]:
        """Return the ratios of measured groups that join units of the same levels, by the numbers of units."""
        table = self.cluster.library.tables.collectives
        if table is None:
            return ()
        return _measured_curves(table, _Links(self.cluster), kind, tuple(count > 1 for count in self._units(axes)))

    # -- links

    def group(self, axes: tuple[str, ...]) -> tuple[LevelSpan, ...]:
        """Return the links that a group of ranks along the axes spans, the innermost first."""
        spans: list[LevelSpan] = []
        # Ranks in a unit of the level below: as many as fit, and in places that are taken.
        room = placed = 1
        for level, own, whole, ranks in zip(
            self.cluster.level,
            self._parts(axes),
            self._parts(tuple(self.axes)),
            ranks_per_unit(self._sizes, self._capacities),
            strict=True,
        ):
            if own.units > 1:
                ports = self._wired_ports(level, axes, placed, ranks) if level.wires else level.ports
                rate, lone = _rates(level, ports, own, room, whole.units)
                spans.append(LevelSpan(level, own.units, own.ranks, rate, lone, room == 1))
            room *= level.units or 1
            placed = ranks
        return tuple(spans)

    def _parts(self, axes: tuple[str, ...]) -> tuple[GroupPart, ...]:
        """Return the parts of a group on each level, those of the most spread one."""
        if not self.links:
            return spread_of(self._sizes, axes, self._capacities)
        placed = self.placed_axes()
        units = [prod(placed[axis][i] for axis in axes) for i in range(len(self.cluster.level))]
        whole = [prod(counts[i] for counts in placed.values()) for i in range(len(units))]
        return tuple(GroupPart(count, prod(units[:i]), prod(whole[:i])) for i, count in enumerate(units))

    def _units(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(part.units for part in self._parts(axes))

    @property
    def _sizes(self) -> tuple[tuple[str, int], ...]:
        return tuple(self.axes.items())

    @property
    def _capacities(self) -> tuple[int | None, ...]:
        return tuple(level.units for level in self.cluster.level)

    def ranks_per_unit(self) -> tuple[int, ...]:
        """Return the number of ranks in a unit of each level; not where `links` put axes on levels."""
        return ranks_per_unit(self._sizes, self._capacities)

    def placement_notes(self) -> list[str]:
        """Return which units leave places free, and the axes whose groups lie in two units though one has room."""
        if self.links:
            return []
        names, found = [level.name for level in self.cluster.level], []
        for level, (ranks, most) in free_places(self._sizes, self._capacities).items():
            found.append(
                f"{ranks} of {most} devices of each unit of '{names[level]}' are in use: groups stay within one"
            )
        for level, axes in straddling(self._sizes, self._capacities).items():
            size = prod(self.axes[axis] for axis in axes)
            groups = f"some groups of {size} along {'*'.join(axes)} lie in two units of '{names[level]}'"
            found.append(f"{groups}: they are priced, as the slowest; a size that divides a unit avoids it")
        return found

    def placed_axes(self) -> dict[str, list[int]]:
        """Return the units of each level for each axis, with some axes put on a level by `links`."""
        levels = self.cluster.level
        names = [level.name for level in levels]
        left = [level.units or 10**18 for level in levels]
        placed = {axis: [1] * len(levels) for axis in self.axes}
        for axis, link in self.links.items():
            i = names.index(link)
            placed[axis][i] = self.axes[axis]
            left[i] = max(1, left[i] // self.axes[axis])
        # The other axes fill the free units, minor axes the innermost.
        for axis in reversed(list(self.axes)):
            if axis in self.links:
                continue
            rest = self.axes[axis]
            for i in range(len(levels)):
                fitting = (divisor for divisor in range(min(rest, left[i]), 0, -1) if rest % divisor == 0)
                take = rest if i == len(levels) - 1 else next(fitting)
                placed[axis][i] = take
                left[i] = max(1, left[i] // take)
                rest //= take
        return placed

    def _wired_ports(self, level: TopologyLevel, axes: tuple[str, ...], unit_size: int, unit_ranks: int) -> int:
        """Return the links of the least connected unit to other units of the group, all wired in pairs."""
        first = ranks_of(self._sizes, axes)
        here = sorted({rank // unit_size for rank in first if rank < unit_ranks})
        return max(1, min(sum(int(level.wires[one][other]) for other in here) for one in here))


@dataclass(frozen=True, eq=False)
class _Links:
    """Links and library of a cluster; equal for clusters that differ in neither."""

    cluster: Cluster

    def __hash__(self) -> int:
        return hash(self.cluster.library.name)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Links):
            return False
        return (self.cluster.level, self.cluster.library) == (other.cluster.level, other.cluster.library)


@lru_cache(maxsize=1024)
def _measured_curves(
    table: CollectiveTable, links: _Links, kind: str, spans: tuple[bool, ...]
) -> tuple[tuple[Place, Ratios], ...]:
    """Return the ratios by size of each measured group that spans some levels, with the place of its units."""
    kind = "send" if kind == "halo_exchange" else kind
    plain = replace(links.cluster, library=replace(links.cluster.library, tables=LibraryTables()))
    groups: dict[tuple[int, ...], list[tuple[Place, float, float]]] = {}
    for row in table.rows:
        units = row.joined + (1,) * (len(spans) - len(row.joined))
        if row.collective == kind and tuple(count > 1 for count in units) == spans:
            predicted = _alone(plain, units, row.groups).library_seconds(kind, _names(units), float(row.bytes))
            groups.setdefault(units, []).append((place(row.bytes), row.seconds, predicted))
    return tuple((place(*units), Ratios.of(times)) for units, times in groups.items())


def _names(units: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(f"level{i}" for i in reversed(range(len(units))))


def _alone(cluster: Cluster, units: tuple[int, ...], groups: int) -> Network:
    """Return the network of a mesh of equal groups, each of which joins some units of each level."""
    sizes = {name: units[int(name.removeprefix("level"))] for name in _names(units)}
    links = {f"level{i}": level.name for i, level in enumerate(cluster.level)}
    return Network(cluster, SubMesh({"groups": groups, **sizes}), links)


def _rates(level: TopologyLevel, ports: int, part: GroupPart, room: int, units: int) -> tuple[float, float]:
    """Return bytes per second that the ranks of a group in one unit send over a level, and that one sends alone.

    All `active` ranks of the unit send at once, in several groups. Each of the `room` ranks that fit into the unit has
    an equal part of its ports, at least one.
    """
    members, active = part.ranks, part.active
    groups = max(1, ceil(active / members))
    own = max(1.0, ports / room)
    rate = level.rate_bytes_per_second
    lone, together = (rate * min(own * count, ports / groups) for count in (1, members))
    if level.backplane_bytes_per_second is not None:
        share = level.backplane_bytes_per_second * members / (active * units)
        lone, together = min(lone, share), min(together, share)
    return together, lone


def _curve(kind: str, algorithm: Algorithm, group: tuple[LevelSpan, ...]) -> Curve | None:
    """Return the curve of an algorithm on the links of a group; None if it cannot run there."""
    # NVLS is a reduction in the innermost switches, SHARP one in all switches above.
    switches = [(need, span) for need in algorithm.needs for span in (group[:1] if need == "nvls" else group[1:])]
    ranks = prod(span.units for span in group)
    if not algorithm.least <= ranks <= (algorithm.most or ranks):
        return None
    phases = ALGORITHMS[algorithm.name](kind, group)
    if phases is None or not all(need in span.level.offers for need, span in switches):
        return None
    latency = algorithm.base_seconds + ranks * algorithm.rank_seconds
    per_byte = root = fill = 0.0
    for phase in phases:
        waits = sum(hops * algorithm.hop(span.level) for span, hops in zip(group, phase.hops, strict=True))
        times = [
            share / _byte_rate(kind, algorithm, span, phase) for span, share in zip(group, phase.traffic, strict=True)
        ]
        slowest = times.index(max(times))
        if times[slowest] and (phase.pipelined if algorithm.pipelined is None else algorithm.pipelined):
            # The start of the algorithm counts with its first pipeline.
            root += sqrt((waits + (0.0 if root else algorithm.base_seconds)) * times[slowest])
            fill += max(
                by_link(algorithm.fill_bytes, span.level.link, inf) * seconds / share
                for span, seconds, share in zip(group, times, phase.traffic, strict=True)
                if share
            )
        latency, per_byte = latency + waits + _start_seconds(algorithm, group, phase), per_byte + times[slowest]
        per_byte += phase.copied / (algorithm.copy_bytes_per_second or inf)
    smallest, largest = algorithm.smallest_bytes or 0.0, algorithm.largest_bytes or inf
    if algorithm.largest_message_bytes is not None:
        largest = min(largest, *(algorithm.largest_message_bytes / phase.message for phase in phases))
    return Curve(algorithm.names[0], latency, per_byte, root, fill if root else inf, smallest, largest)


def _start_seconds(algorithm: Algorithm, group: tuple[LevelSpan, ...], phase: Phase) -> float:
    """Return the seconds in which a rank starts its messages but the first; those of two levels start side by side."""
    counts = zip(group, phase.messages or (0.0,) * len(group), strict=True)
    return max(max(0.0, count - 1) * by_link(algorithm.message_seconds, span.level.link, 0.0) for span, count in counts)


def _byte_rate(kind: str, algorithm: Algorithm, span: LevelSpan, phase: Phase) -> float:
    """Return the bytes per second that a unit of a level sends in a phase."""
    rate = span.lone_rate if phase.lone else span.rate
    if algorithm.rings is not None:
        rate = min(rate, algorithm.rings * span.lone_rate)
    rate *= by_link(algorithm.bandwidth_fraction, span.level.link, 1.0)
    rate *= span.level.send_fraction if kind in PAIRWISE else 1.0
    return min(rate, by_link(algorithm.limit_bytes_per_second, span.level.link, inf))
