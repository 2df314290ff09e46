"""Collective algorithms on a hierarchy of links: hops in a row, and traffic on each level.

A group of ranks is a tuple of spans, the innermost links first: `units` of the level below are joined over `level`. The
buffer has 1 byte: `traffic` is the most bytes that a unit of a level sends or receives in one direction. `hops` counts
the messages that must follow one another. Both are those of the longest chain of messages. The slower one of two levels
of one phase counts; the times of phases add up. Levels and the constants of a library's algorithms are data of cluster
files (`TopologyLevel`, `Library`). `algorithm_registry.py` lists all algorithms; to add one, write its function there.

    p ranks, one level      hops in a row           traffic
    ring all-reduce         2 (p-1)                 2 (p-1)/p
    ring all-gather         p-1                     (p-1)/p
    double binary tree      2 ceil(log2 p)          2, but 1 for p = 2
    direct all-to-all       1, and p-2 more starts  (p-1)/p
    NVLS all-reduce         2                       1 + 1/p: all read every rank's part, each writes its own result

A pipelined phase cuts its data into pieces, and a unit sends a piece on while the next one comes. In a phase of rounds
nobody sends before the messages of the last round have arrived. Direct messages are one hop, but a rank starts them one
after another: those to ranks of its unit beside those to other units. In a ring each rank copies the piece that comes
last, in an exchange its own part: 1/p of the buffer, for which a library may have a rate.

Sources: Sanders, Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (2009); Jia et
al., "Highly scalable deep learning training system with mixed-precision" (2018); Mikami et al., "Massively distributed
SGD: ImageNet/ResNet-50 training in a flash" (2018); Cho et al., "BlueConnect: decomposing all-reduce for deep learning
on heterogeneous network hierarchy" (2019); NCCL's documentation for NVLS and SHARP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, log2, prod
from typing import TypeVar

from autopar.cost.measured.tables import LibraryTables

# Kinds of links that a library takes for others: it sees a connection between sites as one more network.
LINK_LIKE = {"wan": "network"}

_Value = TypeVar("_Value")


def by_link(constants: Mapping[str, _Value], link: str, default: _Value) -> _Value:
    """Return the constant of an algorithm for a kind of link, or for the kind that the library takes it for."""
    return constants.get(link, constants.get(LINK_LIKE.get(link, link), default))


@dataclass(frozen=True)
class TopologyLevel:
    """Links that join `units` of the level below: ranks to a node, nodes to a cluster."""

    name: str
    # Kind of link (`nvlink`, `network`, `memory`, `wan`): the library gives the latency of a hop for each kind.
    link: str
    # Links of one unit of the level below: NVLinks of a GPU, NICs of a node.
    ports: int
    # Rate of one link in one direction, from the datasheet.
    port_bytes_per_second: float
    # Rate that a library gets out of one link in one direction; None: the datasheet's.
    achieved_bytes_per_second: float | None = None
    # Number of joined units of the level below; None: any number.
    units: int | None = None
    # Latency of a hop on these links beyond the library's latency for the kind of link. Keys, most specific first:
    # an algorithm with a protocol (`ring Simple`), an algorithm, a protocol, `any`. Only the first match counts.
    hop_seconds: Mapping[str, float] = field(default_factory=dict)
    # Rate of all links of one unit of this level together, if less: a blocking switch, a memory bus.
    backplane_bytes_per_second: float | None = None
    # Links between each pair of units that no switch joins: a row per unit, a digit per other unit.
    wires: tuple[str, ...] = ()
    # Reductions in the switches: `nvls` (reduce and multicast), `sharp` (reduce).
    offers: tuple[str, ...] = ()
    # Share of `achieved` left to all-to-all and point-to-point, which send many messages between pairs.
    send_fraction: float = 1.0

    @property
    def rate_bytes_per_second(self) -> float:
        """Return the practical rate of one link in one direction."""
        return self.achieved_bytes_per_second or self.port_bytes_per_second


@dataclass(frozen=True)
class Algorithm:
    """One algorithm of the library under one protocol, with its latencies and limits by kind of link."""

    name: str
    collectives: tuple[str, ...]
    base_seconds: float
    # This and the next mappings have kinds of links as keys.
    hop_seconds: Mapping[str, float]
    # Time in which a rank starts each further message that it sends at once.
    message_seconds: Mapping[str, float] = field(default_factory=dict)
    # Largest message that it sends; no bound by default.
    largest_message_bytes: float | None = None
    # Time for each rank of the group, however few hops there are.
    rank_seconds: float = 0.0
    # Share of the bandwidth that carries data; 1 by default.
    bandwidth_fraction: Mapping[str, float] = field(default_factory=dict)
    # Most bytes per second in one direction, however wide the links are.
    limit_bytes_per_second: Mapping[str, float] = field(default_factory=dict)
    # Rate at which a rank copies its part of the buffer while it sends nothing; None: at no time.
    copy_bytes_per_second: float | None = None
    # Most bytes in flight, which bounds the time to fill a pipeline; no bound by default.
    fill_bytes: Mapping[str, float] = field(default_factory=dict)
    # Whether the library sends pieces on before a round is over; None: as the algorithm does by its nature.
    pipelined: bool | None = None
    # Rings that pass each unit at once; None: as many as the unit has links.
    rings: int | None = None
    protocol: str = ""
    # Reductions that switches must offer: `nvls` on the innermost level, `sharp` on the outer ones.
    needs: tuple[str, ...] = ()
    # Smallest and largest group of ranks: the constants of a library may differ by group size.
    least: int = 2
    most: int | None = None
    # Smallest and largest buffer for which the library takes it.
    smallest_bytes: float | None = None
    largest_bytes: float | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names by which a level may refer to it, the most specific first."""
        return tuple(name for name in (f"{self.name} {self.protocol}".strip(), self.name, self.protocol) if name)

    def hop(self, level: TopologyLevel) -> float:
        """Return the seconds of one hop over the links of a level."""
        extra = next((level.hop_seconds[name] for name in (*self.names, "any") if name in level.hop_seconds), 0.0)
        return by_link(self.hop_seconds, level.link, 0.0) + extra


@dataclass(frozen=True)
class Library:
    """Library of collectives: the algorithms that it chooses among."""

    name: str
    algorithm: tuple[Algorithm, ...]
    # Share of the compute time during which it can move data in parallel.
    overlap_fraction: float = 1.0
    # Time of the host to launch a collective, by kind of collective.
    host_seconds: Mapping[str, float] = field(default_factory=dict)
    # Processors of a device that it occupies while it moves data.
    processors: int = 0
    # Measured times, which the algorithms above are scaled to.
    tables: LibraryTables = field(default_factory=LibraryTables)


KINDS = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all"),
    *("broadcast", "reduce", "gather", "scatter", "send", "halo_exchange"),
)


@dataclass(frozen=True)
class LevelSpan:
    """Part of one level that a group of ranks uses."""

    level: TopologyLevel
    # Units of the level below that the group joins; at least 2.
    units: int
    # Ranks of the group in one of these units.
    members: int
    # Bytes per second that one unit sends for this group, beside the other groups.
    rate: float
    # The same where one rank of each unit sends for all.
    lone_rate: float
    # True where the units are single devices by the cluster's topology, not nodes.
    innermost: bool = True


Group = tuple[LevelSpan, ...]


@dataclass(frozen=True)
class Phase:
    """Hops in a row and traffic by level for a buffer of 1 byte."""

    hops: tuple[float, ...]
    traffic: tuple[float, ...]
    # One rank of each unit sends for all.
    lone: bool = False
    # Pieces are sent on while others come, instead of rounds.
    pipelined: bool = False
    # Messages that the busiest rank sends on each level at once; empty where each is a hop.
    messages: tuple[float, ...] = ()
    # Bytes of one message.
    message: float = 1.0
    # Bytes that a rank copies in its own memory while it sends nothing.
    copied: float = 0.0


# Phases in order.
CollectiveAlgorithm = tuple[Phase, ...]
AlgorithmPhases = Callable[[str, Group], CollectiveAlgorithm | None]


def ranks_of(group: Group) -> int:
    return prod(span.units for span in group)


def rounds_of(units: int) -> int:
    """Return the rounds in which one unit reaches all others, if their number doubles in each."""
    return ceil(log2(units))


def one_level(group: Group, i: int, hops: float, traffic: float, lone: bool = False, pipelined: bool = False) -> Phase:
    """Return a phase on one level only."""
    zeros = [0.0] * len(group)
    return Phase((*zeros[:i], hops, *zeros[i + 1 :]), (*zeros[:i], traffic, *zeros[i + 1 :]), lone, pipelined)


# -- algorithms -------------------------------------------------------------------------------------------------------


def ring(kind: str, group: Group) -> CollectiveAlgorithm | None:
    """Return one ring through all ranks that enters and leaves each unit once."""
    p = ranks_of(group)
    # Edges of the ring by level: chains inside units; the outermost level closes the ring.
    edges = [(span.units - 1) * ranks_of(group[i + 1 :]) for i, span in enumerate(group)]
    edges[-1] += 1
    laps, share = {
        "all_reduce": (2 * (p - 1) / p, 2 * (p - 1) / p),
        "all_gather": ((p - 1) / p, (p - 1) / p),
        "reduce_scatter": ((p - 1) / p, (p - 1) / p),
        "broadcast": ((p - 1) / p, 1.0),
        "reduce": ((p - 1) / p, 1.0),
    }.get(kind, (0.0, 0.0))
    if not laps:
        return None
    # A chain: whoever receives a piece sends it on. Else each rank copies the last piece that it receives.
    pipelined = kind in ("broadcast", "reduce")
    hops, copied = tuple(laps * count for count in edges), 0.0 if pipelined else 1 / p
    return (Phase(hops, tuple(share for _ in group), pipelined=pipelined, copied=copied),)


def _tree_traffic(units: int) -> float:
    """Return the traffic of an all-reduce over two trees, each with half of the data."""
    # A unit inside one tree is a leaf of the other. The busiest unit sends 2, up to its parent and down to two
    # children; of three units 1.5, of two 1.
    return min(2.0, units / 2)


def double_binary_tree(kind: str, group: Group) -> CollectiveAlgorithm | None:
    """Return two binary trees over the units of each level, each with half of the data."""
    return _tree(kind, group, [rounds_of(span.units) for span in group])


def _tree(kind: str, group: Group, depths: Sequence[int]) -> CollectiveAlgorithm | None:
    *inner, outer = group
    hops = tuple(map(float, depths))
    if kind == "all_reduce":
        # Inside units both trees pass every rank except the ends, up and then down.
        traffic = (*(min(2.0, float(span.units - 1)) for span in inner), _tree_traffic(outer.units))
        return (Phase(tuple(2 * count for count in hops), traffic, pipelined=True),)
    if kind in ("broadcast", "reduce"):
        return (Phase(hops, tuple(1.0 for _ in group), pipelined=True),)
    return None


def tree_of_chains(kind: str, group: Group) -> CollectiveAlgorithm | None:
    """Return NCCL's tree: a double binary tree over nodes, with a chain of ranks in each; on one node a chain.

    The tree over nodes knows nothing of the switches above them.
    """
    if len(group) == 1 and group[0].innermost:
        span = group[0]
        hops = float(span.units - 1)
        if kind == "all_reduce":
            return (Phase((2 * hops,), (min(2.0, hops),), pipelined=True),)
        return (Phase((hops,), (1.0,), pipelined=True),) if kind in ("broadcast", "reduce") else None
    return _tree(kind, group, [span.units - 1 if span.innermost else rounds_of(span.units) for span in group])


def exchange_of_chains(kind: str, group: Group) -> CollectiveAlgorithm | None:
    """Return the tree of chains over two nodes, which send to each other directly."""
    return tree_of_chains(kind, group) if not group[-1].innermost and group[-1].units == 2 else None


def ring_and_slice(kind: str, group: Group) -> CollectiveAlgorithm | None:
    """Return a reduce-scatter that all-reduces in a ring, after which each rank keeps its part."""
    return ring("all_reduce", group) if kind == "reduce_scatter" else None


def hierarchical_ring(kind: str, group: Group) -> CollectiveAlgorithm | None:
    """Return three phases: reduce to a leader in each unit, a ring of the leaders, broadcast in each unit."""
    if kind != "all_reduce" or len(group) < 2:
        return None
    *inner, outer = range(len(group))
    n = group[outer].units
    # Chains.
    inside = [one_level(group, i, group[i].units - 1, 1.0, lone=i > 0, pipelined=True) for i in inner]
    return (*inside, one_level(group, outer, 2 * (n - 1), 2 * (n - 1) / n, lone=True), *reversed(inside))


def torus(kind: str, group: Group) -> CollectiveAlgorithm | None:
    """Return one phase per level: reduce-scatter inside, reduce the shards across, gather inside."""
    if len(group) < 2:
        return None
    half = [one_level(group, i, span.units - 1, (span.units - 1) / span.units) for i, span in enumerate(group)]
    if kind == "all_reduce":
        return (*half, *reversed(half))
    if kind == "all_gather":
        return tuple(reversed(half))
    return tuple(half) if kind == "reduce_scatter" else None


def nvls(kind: str, group: Group) -> CollectiveAlgorithm | None:
    """Return a reduction in the switch: each rank reads its part of the sum and multicasts it to all."""
    if len(group) != 1:
        return None
    p = group[0].units
    traffic = {"all_reduce": 1 + 1 / p, "all_gather": 1.0, "reduce_scatter": 1.0}.get(kind)
    return None if traffic is None else (Phase((1.0,), (traffic,), pipelined=True),)


def nvls_outer(
    kind: str, group: Group, hops: Callable[[int], float], traffic: Callable[[int], float]
) -> CollectiveAlgorithm | None:
    if len(group) < 2 or kind != "all_reduce":
        return None
    inner, *outer = group
    outer_traffic = (traffic(span.units) for span in outer)
    counts = (hops(span.units) for span in outer)
    return (Phase((1.0, *counts), (1 + 1 / inner.units, *outer_traffic), pipelined=True),)


def nvls_tree(kind: str, group: Group) -> CollectiveAlgorithm | None:
    """Return NVLS inside nodes, with a double binary tree across."""
    return nvls_outer(kind, group, lambda units: 2.0 * rounds_of(units), _tree_traffic)


def nvls_exchange(kind: str, group: Group) -> CollectiveAlgorithm | None:
    """Return NVLS inside two nodes, which send to each other directly."""
    return nvls_tree(kind, group) if group[-1].units == 2 else None


def direct(kind: str, group: Group) -> CollectiveAlgorithm | None:
    """Return all messages at once, each straight to its receiver: one for each other rank, or one in all."""
    p = ranks_of(group)
    if kind == "all_to_all":
        traffic = tuple(span.members * (p - span.members) / p for span in group)
    elif kind in ("gather", "scatter"):
        # The unit of the root is the busiest.
        traffic = tuple((p - span.members) / p for span in group)
    elif kind in ("send", "halo_exchange"):
        # Neighbours in a line: one rank of each unit sends to the next unit.
        traffic = tuple(1.0 for _ in group)
    else:
        return None
    hops = tuple(float(i == len(group) - 1) for i in range(len(group)))
    if kind in ("send", "halo_exchange"):
        return (Phase(hops, traffic, lone=True),)
    messages = tuple(float(span.members * (span.units - 1)) for span in group)
    copied = 1 / p if kind == "all_to_all" else 0.0
    return (Phase(hops, traffic, lone=kind != "all_to_all", messages=messages, message=1 / p, copied=copied),)
