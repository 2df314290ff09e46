"""The links of a cluster as data: levels of links, and the library of collectives that uses them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Algorithm", "Library", "TopologyLevel"]


@dataclass(frozen=True)
class TopologyLevel:
    """The links that join `units` of the level below: ranks to a node, nodes to a cluster."""

    name: str
    link: str
    """The kind of link, by which the library knows the latency of a hop: `nvlink`, `network`, `memory`."""
    ports: int
    """Links of one unit of the level below: NVLinks of a GPU, NICs of a node."""
    port_bytes_per_second: float
    """Of one link in one direction, by the datasheet."""
    achieved_bytes_per_second: float | None = None
    """What a library gets out of one link in one direction; by default all of it."""
    units: int | None = None
    """How many units of the level below are joined; None: any number."""
    hop_seconds: Mapping[str, float] = field(default_factory=dict)
    """What a hop over these links takes beyond what the library gives for links of this kind: for an algorithm with a
    protocol (`"ring Simple"`), for an algorithm, for a protocol, or for `any`; the first of these that is given."""
    backplane_bytes_per_second: float | None = None
    """What all links of one level-wide unit carry together, where that is less: a blocking switch, a memory bus."""
    wires: tuple[str, ...] = ()
    """Where units are wired in pairs and not by a switch: a row per unit, a digit per unit it leads to."""
    offers: tuple[str, ...] = ()
    """What the switches can do: `nvls` (reduce and multicast), `sharp` (reduce)."""
    send_fraction: float = 1.0
    """The share of `achieved` that many messages between pairs get, of all-to-all and point-to-point."""

    @property
    def rate_bytes_per_second(self) -> float:
        """Of one link in one direction, in practice."""
        return self.achieved_bytes_per_second or self.port_bytes_per_second

    def wired(self, one: int, other: int) -> int:
        """How many links lead from one unit to another, where they are wired in pairs."""
        return int(self.wires[one][other])


@dataclass(frozen=True)
class Algorithm:
    """One way of the library: an algorithm with a protocol. `base` and `hop` are its latencies."""

    name: str
    collectives: tuple[str, ...]
    base_seconds: float
    hop_seconds: Mapping[str, float]
    """By kind of link, as are the next three."""
    bandwidth_fraction: Mapping[str, float] = field(default_factory=dict)
    """The share of the bandwidth that carries data; all of it by default."""
    limit_bytes_per_second: Mapping[str, float] = field(default_factory=dict)
    """The most that passes in one direction, however wide the links."""
    fill_bytes: Mapping[str, float] = field(default_factory=dict)
    """How much is under way at most, what a pipeline needs to fill; by default no bound."""
    protocol: str = ""
    needs: tuple[str, ...] = ()
    """What the switches must offer: `nvls` the innermost level, `sharp` the outer ones."""
    least: int = 2
    """Groups of how many ranks it is for: the constants of a library may differ by the size of the group."""
    most: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """What a level may call it, the most specific first."""
        return tuple(name for name in (f"{self.name} {self.protocol}".strip(), self.name, self.protocol) if name)

    def hop(self, level: TopologyLevel) -> float:
        """What a hop takes."""
        extra = next((level.hop_seconds[name] for name in (*self.names, "any") if name in level.hop_seconds), 0.0)
        return self.hop_seconds.get(level.link, 0.0) + extra


@dataclass(frozen=True)
class Library:
    """A library of collectives: the algorithms that it chooses among."""

    name: str
    algorithm: tuple[Algorithm, ...]
    overlap_fraction: float = 1.0
    """The share of the time of computing in which it can move data beside it."""
    host_seconds: Mapping[str, float] = field(default_factory=dict)
    """What the host takes to start a collective, by its kind."""
    processors: int = 0
    """Of a device, taken from what is computed while it moves data."""
