"""Devices of unequal speed or memory under one mesh: which rank has which, and their speeds on a graph.

A cluster file names parts: units of one level with devices of their own. A rank is priced on its own device with its
own share of the samples; a step takes as long as on the slowest rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from autopar.cost.collective_algorithms import TopologyLevel
from autopar.cost.hardware.cluster import Cluster, ClusterPart, Device
from autopar.cost.hardware.part_links import slowest_level
from autopar.cost.network import Network
from autopar.cost.tasks import TaskBuilder
from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode
from autopar.mesh import SubMesh
from autopar.sharding.assignment import OpAssignment
from autopar.sharding.choices import Choice, can_split, shardings_of
from autopar.sharding.replicas import Drift
from autopar.sharding.sharding import coordinates
from autopar.sharding.shares import Speeds, marked

__all__ = [
    "RankKind",
    "device_speeds",
    "devices_of",
    "priced_kind",
    "rank_kinds",
    "replica_speeds",
    "speeds_along",
    "with_slowest_links",
]

# Least part of the time of an even share that shrinks with the samples: small ops take as long for fewer of them.
LEAST_SHRINKING = 0.05


@dataclass(frozen=True)
class RankKind:
    """Ranks with equal devices and equal shares of the samples."""

    # Name of the part of the cluster; empty for the devices that no part names.
    part: str
    device: Device
    # Coordinates of the first of them, and their number.
    coordinate: Mapping[str, int]
    ranks: int
    # Memory of the device as a share of the cluster's, at most 1: limits are of the cluster's device.
    memory_fraction: float
    # Share of the samples of one rank, in those of an even split; 1 where they are split evenly.
    samples: float
    # Its links; those that join units of several parts are the slowest of these parts.
    level: tuple[TopologyLevel, ...]

    def alone(self, cluster: Cluster) -> Cluster:
        """Return the cluster as these ranks see it: all devices and links as theirs."""
        return cluster.with_device(self.device).with_links(self.level)


@dataclass(frozen=True)
class KindCosts:
    """Time and memory of ranks with equal devices and equal shares of the samples."""

    kind: RankKind
    step_seconds: float
    compute_seconds: float
    peak_bytes: float


def devices_of(cluster: Cluster, mesh: SubMesh, links: Mapping[str, str]) -> tuple[tuple[str, Device], ...]:
    """Return part and device of each rank of a mesh, row-major."""
    plain = ("", cluster.device)
    if not cluster.part:
        return (plain,) * mesh.size
    parts = [(one.name, one.device.at_speed(one.speed_fraction)) for one in cluster.part for _ in range(one.units)]
    names = [level.name for level in cluster.level]
    place = names.index(cluster.part[0].level)
    units = cluster.level[place].units
    found = []
    for index in _units(Network(cluster, mesh, links), place):
        own = index if units is None else index % units
        found.append(parts[own] if own < len(parts) else plain)
    return tuple(found)


def _units(network: Network, place: int) -> Iterator[int]:
    """Yield the unit of a level in which each rank is, counted over the level."""
    if not network.links:
        below = network.ranks_per_unit()[place - 1] if place else 1
        yield from (rank // below for rank in network.axes.ranks)
        return
    # Axes that `@` puts on a level leave their places on the others.
    placed = network.placed_axes()
    for at in coordinates(network.axes):
        index = 0
        for axis, counts in placed.items():
            index = index * counts[place] + at[axis] // prod(counts[:place]) % counts[place]
        yield index


def replica_clusters(cluster: Cluster, drift: Drift) -> tuple[tuple[Cluster, float], ...]:
    """Return the clusters as replicas see them, their own devices first, with their rows as a share of the most.

    Replicas of equal devices and rows are listed once.
    """
    by = drift.statement.by
    weights = by if isinstance(by, tuple) else (1,) * drift.replicas
    if not cluster.part:
        return tuple((cluster, weight / max(weights)) for weight in dict.fromkeys(weights))
    every = [part for part, _ in devices_of(cluster, drift.mesh.whole, drift.mesh.links)]
    ranks, own = drift.mesh.size // drift.replicas, drift.replica_mesh
    place = [level.name for level in cluster.level].index(cluster.part[0].level)
    units = list(_units(Network(cluster, own.whole, own.links), place))
    found: dict[tuple[tuple[str, ...], int], None] = {}
    for i, weight in enumerate(weights):
        by_unit = dict(zip(units, every[i * ranks : (i + 1) * ranks], strict=True))
        found[tuple(by_unit.get(unit, "") for unit in range(max(units) + 1)), weight] = None
    return tuple((_with_parts(cluster, parts), weight / max(weights)) for parts, weight in found)


def _with_parts(cluster: Cluster, parts: Sequence[str]) -> Cluster:
    """Return the cluster with these parts as its first units; the empty name stands for its own devices."""
    level = cluster.part[0].level
    known = {one.name: replace(one, units=1) for one in cluster.part}
    plain = ClusterPart("", level, 1, cluster.device)
    return replace(cluster, part=tuple(known.get(name, plain) for name in parts))


def rank_kinds(
    cluster: Cluster, axes: SubMesh, links: Mapping[str, str], fixed: Mapping[str, int] | None = None
) -> tuple[RankKind, ...]:
    """Return the kinds of ranks of a mesh; `fixed` restricts them to some coordinates, as to one stage."""
    if not cluster.part and axes.shares is None:
        return (RankKind("", cluster.device, dict.fromkeys(axes, 0), axes.size, 1.0, 1.0, cluster.level),)
    weights = {} if axes.shares is None else dict(axes.shares.weights)
    found: dict[tuple[str, tuple[int, ...]], list[dict[str, int]]] = {}
    devices: dict[str, Device] = {}
    for at, (part, device) in zip(coordinates(axes), devices_of(cluster, axes, links), strict=True):
        if any(at[axis] != place for axis, place in (fixed or {}).items()):
            continue
        devices[part] = device
        found.setdefault((part, tuple(own[at[axis]] for axis, own in weights.items())), []).append(at)
    wholes = [sum(own) for own in weights.values()]
    counts = [len(own) for own in weights.values()]
    levels = {part: _links_of(cluster, part, devices) for part in devices}
    return tuple(
        RankKind(
            part,
            devices[part],
            ranks[0],
            len(ranks),
            min(1.0, devices[part].memory_bytes / cluster.device.memory_bytes),
            prod(one * count / whole for one, count, whole in zip(shares, counts, wholes, strict=True)),
            levels[part],
        )
        for (part, shares), ranks in found.items()
    )


def _links_of(cluster: Cluster, part: str, present: Iterable[str]) -> tuple[TopologyLevel, ...]:
    """Return the levels that ranks of a part have beside ranks of other parts."""
    if not any(one.links for one in cluster.part):
        return cluster.level
    joining = cluster.part[0].level  # all parts are units of one level
    own, others = cluster.levels_of(part), [cluster.levels_of(one) for one in present]
    return tuple(
        slowest_level([levels[i] for levels in others]) if level.name == joining else level
        for i, level in enumerate(own)
    )


def with_slowest_links(cluster: Cluster, mesh: SubMesh, links: Mapping[str, str]) -> Cluster:
    """Return the cluster with the slowest links of the parts that ranks of a mesh have, for messages between them."""
    if not any(one.links for one in cluster.part):
        return cluster
    present = [cluster.levels_of(part) for part in dict(devices_of(cluster, mesh, links))]
    return replace(cluster, level=tuple(map(slowest_level, zip(*present, strict=True))))


def priced_kind(
    graph: NamedGraph, axes: SubMesh, cluster: Cluster, links: Mapping[str, str], fastest: bool = False
) -> RankKind:
    """Return the kind of ranks on whose devices a search prices its choices: the slowest, or the fastest."""
    kinds = rank_kinds(cluster, axes, links)
    if len(kinds) == 1:
        return kinds[0]
    dim = "" if axes.shares is None else axes.shares.dim
    speeds = device_speeds(graph, dim, {kind.part: kind.device for kind in kinds}, 1, cluster)
    times = [kind.samples / speeds[kind.part] for kind in kinds]
    return kinds[times.index(min(times) if fastest else max(times))]


# -- speeds -----------------------------------------------------------------------------------------------------------


def speeds_along(
    graph: NamedGraph, dim: str, over: Sequence[str], axes: SubMesh, cluster: Cluster, links: Mapping[str, str]
) -> Speeds:
    """Return the speed at each place along the axes over which a dim is split; axes of equal places are left out.

    The ranks at one place have equal samples, so the slowest of them counts. Speeds are such that all places end at
    once when their samples have these proportions.
    """
    every = devices_of(cluster, axes, links)
    if len({part for part, _ in every}) == 1:
        return {}
    times = _ShareTimes.of(graph, dim, dict(every), prod(axes[axis] for axis in over), cluster)
    places, parts = list(coordinates(axes)), [part for part, _ in every]
    found = {axis: times.balanced([at[axis] for at in places], parts) for axis in over}
    return {axis: speeds for axis, speeds in found.items() if len(set(speeds)) > 1}


def replica_speeds(graph: NamedGraph, dim: str, drift: Drift, cluster: Cluster) -> tuple[float, ...]:
    """Return the speeds of the replicas of a mesh, by the slowest rank of each, as `speeds_along` does for places."""
    every = devices_of(cluster, drift.mesh.whole, drift.mesh.links)
    if len({part for part, _ in every}) == 1:
        return (1.0,) * drift.replicas
    times = _ShareTimes.of(graph, dim, dict(every), drift.mesh.size, cluster)
    ranks = drift.mesh.size // drift.replicas
    return times.balanced([rank // ranks for rank in range(len(every))], [part for part, _ in every])


@dataclass(frozen=True)
class _ShareTimes:
    """Seconds that each part takes for an even share of the samples, and those of them that shrink with the samples."""

    seconds: Mapping[str, float]
    shrinking: Mapping[str, float]

    @staticmethod
    def of(graph: NamedGraph, dim: str, devices: Mapping[str, Device], ranks: int, cluster: Cluster) -> _ShareTimes:
        whole, half = (device_speeds(graph, dim, devices, ranks * times, cluster) for times in (1, 2))
        seconds = {part: 1 / speed for part, speed in whole.items()}
        shrinking = {part: max(LEAST_SHRINKING * one, 2 * (one - 1 / half[part])) for part, one in seconds.items()}
        return _ShareTimes(seconds, shrinking)

    def balanced(self, places: Sequence[int], parts: Sequence[str]) -> tuple[float, ...]:
        """Return the shares at which all places end at once, given place and part of each rank."""
        slowest = [""] * (max(places) + 1)
        for place, part in zip(places, parts, strict=True):
            slowest[place] = part if not slowest[place] else max(slowest[place], part, key=self.seconds.__getitem__)
        if len(set(slowest)) == 1:
            return (1.0,) * len(slowest)
        constant = [(self.seconds[part] - self.shrinking[part]) / self.shrinking[part] for part in slowest]
        end = (len(slowest) + sum(constant)) / sum(1 / self.shrinking[part] for part in slowest)
        shares = [end / self.shrinking[part] - one for part, one in zip(slowest, constant, strict=True)]
        # A device whose constant part takes longer than the others for everything still has a sample.
        return tuple(max(share, 1e-6) for share in shares)


def device_speeds(
    graph: NamedGraph, dim: str, devices: Mapping[str, Device], ranks: int, cluster: Cluster
) -> dict[str, float]:
    """Return the steps per second of each device, on an even share of a dim over some ranks, without communication."""
    graph = marked(graph, dim)
    axis = SubMesh({"samples": ranks})
    assignments = [(node, _with_samples(graph, node, axis)) for node in graph.nodes]
    found = {}
    for name, device in devices.items():
        # Nothing is sent, so a cluster of any size will do.
        links = (replace(cluster.level[-1], units=None, wires=()),)
        prices = TaskBuilder(graph, cluster.with_device(device).with_links(links), axis)
        works = [prices.work(node, assignment) for node, assignment in assignments]
        ways = [way for work in works for way in (work.forward, work.backward)]
        busy, launched = sum(way.seconds for way in ways), sum(way.launches for way in ways) * prices.launch
        found[name] = 1.0 / max(busy, launched, 1e-12)
    return found


def _with_samples(graph: NamedGraph, node: NamedNode, axis: SubMesh) -> OpAssignment:
    """Return the assignment of an op that splits the samples where it can, and nothing else."""
    for site in sorted(node.by_share):
        choice = Choice(((site, tuple(axis)),))
        if can_split(node, site, tuple(axis), axis, uneven=True):
            shardings = shardings_of(graph, node, choice)
            if shardings is not None:
                return OpAssignment(choice, *shardings, shardings[1])
    whole = shardings_of(graph, node, Choice())
    assert whole is not None, f"{node.name} runs whole"
    return OpAssignment(Choice(), *whole, whole[1])
