"""Topology of a cluster as data: levels of links, and the library of collectives that runs on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TopologyLevel:
    """Links that join `units` of the level below: ranks to a node, nodes to a cluster."""

    name: str
    # Kind of link (`nvlink`, `network`, `memory`): the library gives the latency of a hop for each kind.
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

    def wired(self, one: int, other: int) -> int:
        """Return the number of links between two units that are wired in pairs."""
        return int(self.wires[one][other])


@dataclass(frozen=True)
class Algorithm:
    """One algorithm of the library under one protocol, with its latencies and limits by kind of link."""

    name: str
    collectives: tuple[str, ...]
    base_seconds: float
    # This and the next three mappings have kinds of links as keys.
    hop_seconds: Mapping[str, float]
    # Share of the bandwidth that carries data; 1 by default.
    bandwidth_fraction: Mapping[str, float] = field(default_factory=dict)
    # Most bytes per second in one direction, however wide the links are.
    limit_bytes_per_second: Mapping[str, float] = field(default_factory=dict)
    # Most bytes in flight, which bounds the time to fill a pipeline; no bound by default.
    fill_bytes: Mapping[str, float] = field(default_factory=dict)
    protocol: str = ""
    # Reductions that switches must offer: `nvls` on the innermost level, `sharp` on the outer ones.
    needs: tuple[str, ...] = ()
    # Smallest and largest group of ranks: the constants of a library may differ by group size.
    least: int = 2
    most: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names by which a level may refer to it, the most specific first."""
        return tuple(name for name in (f"{self.name} {self.protocol}".strip(), self.name, self.protocol) if name)

    def hop(self, level: TopologyLevel) -> float:
        """Return the seconds of one hop over the links of a level."""
        extra = next((level.hop_seconds[name] for name in (*self.names, "any") if name in level.hop_seconds), 0.0)
        return self.hop_seconds.get(level.link, 0.0) + extra


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
