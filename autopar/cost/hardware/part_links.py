"""Links of a part of a cluster that differ from those of the others, and the links of units of several parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cost.collective_algorithms import TopologyLevel
from autopar.cost.hardware.toml_reader import Document

__all__ = ["PartLinks", "own_level", "slowest_level"]


@dataclass(frozen=True)
class PartLinks:
    """Keys of a `[[part.level]]`: a level of the cluster, and what its links are in the part."""

    name: str
    ports: int | None = None
    port_bytes_per_second: float | None = None
    achieved_bytes_per_second: float | None = None
    hop_seconds: Mapping[str, float] | None = None
    backplane_bytes_per_second: float | None = None
    wires: tuple[str, ...] | None = None
    offers: tuple[str, ...] | None = None
    send_fraction: float | None = None


def own_level(level: TopologyLevel, links: PartLinks) -> TopologyLevel:
    """Return a level as the units of a part have it; a link of another rate achieves what its own key says."""
    said = {name: value for name, value in vars(links).items() if name != "name" and value is not None}
    if links.port_bytes_per_second is not None:
        said.setdefault("achieved_bytes_per_second", None)
    return replace(level, **said)


def slowest_level(levels: Sequence[TopologyLevel]) -> TopologyLevel:
    """Return the links that a collective over units of several parts has: all wait for the slowest of them."""
    slowest = min(levels, key=lambda one: one.ports * one.rate_bytes_per_second)
    hops = {key for one in levels for key in one.hop_seconds}
    backplanes = [one.backplane_bytes_per_second for one in levels if one.backplane_bytes_per_second is not None]
    return replace(
        slowest,
        hop_seconds={key: max(one.hop_seconds.get(key, 0.0) for one in levels) for key in sorted(hops)},
        backplane_bytes_per_second=min(backplanes, default=None),
        offers=tuple(offer for offer in slowest.offers if all(offer in one.offers for one in levels)),
        send_fraction=min(one.send_fraction for one in levels),
    )


def check_wires(document: Document, level: TopologyLevel, place: tuple[str | int, ...]) -> None:
    """Check that the wires of a level are a symmetric table of its units, with no more links than ports."""
    if not level.wires:
        return
    rows, size = level.wires, level.units
    square = len(rows) == size and all(len(row) == size and row.isdigit() for row in rows)
    if not square:
        fix = "a text per unit, with a digit per unit: how many links lead there"
        document.fail((*place, "wires"), f"'wires' is not a table of {size} rows of {size} digits", fix)
    for one, row in enumerate(rows):
        for other in range(len(rows)):
            if row[other] != rows[other][one] or (one == other and row[other] != "0"):
                message = f"'wires' is impossible: {row[other]} from unit {one} to {other}, {rows[other][one]} back"
                document.fail((*place, "wires"), message, "both ends of a link count it; no unit is wired to itself")
        if sum(map(int, row)) > level.ports:
            message = f"'wires' is impossible: row {one} has more links than the {level.ports} ports"
            document.fail((*place, "wires"), message, "give the ports of one unit")
