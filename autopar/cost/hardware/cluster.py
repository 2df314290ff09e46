"""Clusters as data: devices, the links between them, the library that uses the links; read from TOML.

A cluster is a file of `cost_models/` or of the user. Devices and libraries may be written in it or be named: those that
several clusters share lie in `cost_models/devices` and `cost_models/libraries`. Field names carry the units; the keys
of the files leave them to the values (autopar/cost/hardware/quantities.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from autopar.cost.collectives.algorithms import ALGORITHMS, KINDS
from autopar.cost.compute.matmul_time import MatmulUnit
from autopar.cost.hardware.toml_reader import Document, Source, read_document
from autopar.cost.hardware.topology import Library, TopologyLevel
from autopar.errors import ClusterError
from autopar.files import data_folder
from autopar.names import did_you_mean

__all__ = [
    "AttentionRates",
    "Cluster",
    "Device",
    "cluster_names",
    "cluster_path",
    "load_cluster",
    "load_device",
]


@dataclass(frozen=True)
class AttentionRates:
    """How fast a device runs fused attention."""

    rows: int
    """Queries that one processor works on at a time."""
    forward_fraction: float
    """Of the peak, by heads of many dims and without a mask."""
    backward_fraction: float
    causal_fraction: float = 1.0
    """The share of the forward's rate that is left where later keys are masked."""
    causal_backward_fraction: float = 1.0
    """The same of the backward's."""
    softmax: int = 0
    """What the softmax of a score takes in the forward: as long as the products of so many more dims of a head."""


@dataclass(frozen=True)
class Device:
    """One accelerator, or one process of a CPU."""

    name: str
    memory_bytes: float
    hbm_bytes_per_second: float
    """What its memory can read and write, by the datasheet."""
    launch_seconds: float
    """The shortest time from one op of an eager program to the next, however small it is."""
    peak_flops: Mapping[str, float]
    """By the name of the dtype, as torch writes it: `bfloat16`; `tf32` for matrices of float32 in TensorFloat-32."""
    stream_bytes_per_second: float | None = None
    """What ops that read and write a lot get of its memory; by default all of it."""
    matrix: MatmulUnit | None = None
    """How it multiplies matrices; by default as fast as its peak and its memory allow."""
    attention: AttentionRates = AttentionRates(1, 1.0, 1.0)
    forward_bytes_per_second: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """What ops that compute more than they move get of its memory, by name (`gelu`); all others get the stream."""
    backward_bytes_per_second: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """The same of their backward."""
    op_seconds: float = 0.0
    """What any op takes beyond what it reads and writes, of a device that is its own host: a process of a CPU."""
    host_seconds: float = 0.0
    """What the host takes to launch one kernel of an eager program; it runs ahead, so the sum of all counts."""
    sustained_fraction: float = 1.0
    """The share of the rate of products that is left to a device that has been busy for long."""

    @property
    def stream(self) -> float:
        return self.stream_bytes_per_second or self.hbm_bytes_per_second


@dataclass(frozen=True)
class Cluster:
    """Hardware: devices, links from the innermost to the outermost, a library."""

    name: str
    description: str
    device: Device
    level: tuple[TopologyLevel, ...]
    library: Library
    sources: Mapping[str, Source] = field(default_factory=dict, metadata={"key": False})
    uncited: tuple[str, ...] = field(default=(), metadata={"key": False})
    """The quantities that are given without a source."""

    @property
    def ranks_per_node(self) -> int | None:
        """How many devices the innermost links join; None: any number."""
        return self.level[0].units


# -- reading ----------------------------------------------------------------------------------------------------------


def cluster_names() -> tuple[str, ...]:
    """The clusters that autopar ships, in alphabetical order."""
    return tuple(sorted(path.stem for path in data_folder("cost_models").glob("*.toml")))


def cluster_path(name_or_path: str | Path) -> Path:
    """The file of a cluster that autopar ships, or the file itself."""
    path = Path(name_or_path)
    if path.suffix == ".toml" or path.is_file():
        return path
    names = cluster_names()
    if str(name_or_path) not in names:
        raise ClusterError(
            f"there is no cluster '{name_or_path}'{did_you_mean(str(name_or_path), names)}\n"
            f"fix: take one of {', '.join(names)}, or give the path of a .toml file (docs/costs.md)"
        )
    return data_folder("cost_models") / f"{name_or_path}.toml"


def load_cluster(name_or_path: str | Path) -> Cluster:
    """A cluster by name, or from a file."""
    path = cluster_path(name_or_path)
    stamp = path.stat().st_mtime_ns if path.is_file() else 0
    return _load(path, stamp)


def load_device(name: str) -> Device:
    """A device that autopar ships, by name."""
    path = data_folder("cost_models") / "devices" / f"{name}.toml"
    if not path.is_file():
        names = _shared_names("devices")
        raise ClusterError(
            f"there is no device '{name}'{did_you_mean(name, names)}\nfix: take one of {', '.join(names)}"
        )
    document = read_document(path)
    return document.read(Device, (), {key: value for key, value in document.table.items() if key != "sources"})


@lru_cache(maxsize=64)
def _load(path: Path, stamp: int) -> Cluster:
    document = read_document(path)
    sources = dict(document.sources())
    uncited = list[str]()
    table = dict(document.table)
    table.pop("sources", None)
    device, library = _part(document, "device", Device), _part(document, "library", Library)
    for key, (_, shared) in (("device", device), ("library", library)):
        if shared is not document:
            sources |= {f"{key}-{name}": source for name, source in shared.sources().items()}
            uncited += [f"{key}.{name}" for name in shared.uncited]
    del table["device"], table["library"]
    for key in table:
        if key not in ("name", "description", "level"):
            hint = did_you_mean(key, KEYS)
            document.fail((key,), f"unknown key '{key}'{hint}", f"the keys are {', '.join(KEYS)}")
    shell = document.read(_Shell, (), table)
    _check(document, shell.level, library[0])
    return Cluster(
        shell.name,
        shell.description,
        device[0],
        shell.level,
        library[0],
        MappingProxyType(sources),
        tuple(uncited + document.uncited),
    )


FOLDERS = {"device": "devices", "library": "libraries"}
KEYS = ("name", "description", "device", "library", "level", "sources")
Part = TypeVar("Part", Device, Library)


@dataclass(frozen=True)
class _Shell:
    """What stands in a cluster's own file."""

    name: str
    description: str
    level: tuple[TopologyLevel, ...]


def shared_path(key: str, name: str) -> Path:
    """The file of a device or a library that clusters share."""
    return data_folder("cost_models") / FOLDERS[key] / f"{name}.toml"


def _shared_names(folder: str) -> list[str]:
    return sorted(path.stem for path in (data_folder("cost_models") / folder).glob("*.toml"))


def _part(document: Document, key: str, record: type[Part]) -> tuple[Part, Document]:
    """The device or the library of a cluster, and the file it stands in: this one, or one that clusters share."""
    names = _shared_names(FOLDERS[key])
    if key not in document.table:
        document.fail((), f"the file lacks '{key}'", f"name one of {', '.join(names)}, or write it under [{key}]")
    name = document.table[key]
    if not isinstance(name, str):
        return document.read(record, (key,), name), document
    if name not in names:
        fix = f"take one of {', '.join(names)}, or write it under [{key}]"
        document.fail((key,), f"there is no {key} '{name}'{did_you_mean(name, names)}", fix)
    shared = read_document(shared_path(key, name))
    table = {entry: value for entry, value in shared.table.items() if entry != "sources"}
    return shared.read(record, (), table), shared


def _check(document: Document, levels: tuple[TopologyLevel, ...], library: Library) -> None:
    """What no single value shows."""
    if not levels:
        document.fail(("level",), "the cluster has no links", "describe them, the innermost first, as [[level]]")
    _check_library(document, library)
    links = sorted({link for algorithm in library.algorithm for link in algorithm.hop_seconds})
    hops = {"any"} | {name for algorithm in library.algorithm for name in algorithm.names}
    seen: list[str] = []
    for i, level in enumerate(levels):
        place = ("level", i)
        if level.name in seen:
            document.fail((*place, "name"), f"two levels are called '{level.name}'", "give each level another name")
        seen.append(level.name)
        if level.units is None and i < len(levels) - 1:
            document.fail(place, f"level '{level.name}' lacks 'units'", "only the outermost level joins any number")
        if level.rate_bytes_per_second > level.port_bytes_per_second:
            message = "'achieved' is impossible: it is more than the port gives"
            document.fail((*place, "achieved"), message, "give what is achieved of one port in one direction")
        if level.link not in links:
            message = f"library '{library.name}' knows no links of kind '{level.link}'{did_you_mean(level.link, links)}"
            document.fail((*place, "link"), message, f"its kinds of links are {', '.join(links)}")
        for name in level.hop_seconds:
            if name not in hops:
                message = f"library '{library.name}' has no '{name}'{did_you_mean(name, hops)}"
                document.fail((*place, "hop"), message, f"name one of {', '.join(sorted(hops))}")
        _check_wires(document, level, place)


def _check_library(document: Document, library: Library) -> None:
    for i, algorithm in enumerate(library.algorithm):
        place = ("library", "algorithm", i)
        if algorithm.name not in ALGORITHMS:
            message = f"there is no algorithm '{algorithm.name}'{did_you_mean(algorithm.name, ALGORITHMS)}"
            document.fail((*place, "name"), message, f"the algorithms are {', '.join(ALGORITHMS)}")
        if algorithm.most is not None and algorithm.most < algorithm.least:
            message = f"'most' is impossible: it is less than {algorithm.least}, the least"
            document.fail((*place, "most"), message, "give the smallest and the largest group that it is for")
        for kind in algorithm.collectives:
            if kind not in KINDS:
                message = f"there is no collective '{kind}'{did_you_mean(kind, KINDS)}"
                document.fail((*place, "collectives"), message, f"the collectives are {', '.join(KINDS)}")


def _check_wires(document: Document, level: TopologyLevel, place: tuple[str | int, ...]) -> None:
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
