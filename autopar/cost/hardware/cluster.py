"""Clusters as data: devices, the links between them and the library that uses the links; read from TOML.

A cluster is a file of `cost_models/` or of the user. It contains its device and its library, or names shared ones from
`cost_models/devices` and `cost_models/libraries`. Field names end in their unit; in the files the unit is part of the
value (autopar/cost/hardware/toml_reader.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from autopar.cost.collective_algorithms import Library, TopologyLevel
from autopar.cost.compute.matmul_time import MatmulUnit
from autopar.cost.hardware.check_levels import check_levels, check_rates
from autopar.cost.hardware.part_links import PartLinks, check_wires, own_level
from autopar.cost.hardware.toml_reader import Document, Source, read_document
from autopar.cost.measured.tables import DeviceTables, LibraryTables
from autopar.errors import ClusterError
from autopar.files import data_folder
from autopar.names import did_you_mean

# Relative difference of memory sizes up to which a device counts as of one kind: a driver reports a few percent more or
# less than the datasheet; another kind has at least a fifth more, or half.
MEMORY_TOLERANCE = 0.15
# Folders of the shared files, and the keys of a cluster's own file.
FOLDERS = {"device": "devices", "library": "libraries"}
KEYS = ("name", "description", "checked", "device", "library", "level", "part", "sources")


@dataclass(frozen=True)
class AttentionRates:
    """Speed of fused attention on a device, as shares of its peak."""

    # Queries that one processor works on at a time.
    rows: int
    # Share of the peak for very wide heads without a mask.
    forward_fraction: float
    backward_fraction: float
    # Share of the forward rate, and of the backward rate, that is left with a causal mask.
    causal_fraction: float = 1.0
    causal_backward_fraction: float = 1.0
    # Time of the softmax of a score in the forward, in head dims: as long as the products of so many more dims.
    softmax: int = 0
    # Start and end of a tile of queries, in keys: as long as the products with so many more keys.
    start_keys: int = 0
    # The same time of the softmax in the backward.
    backward_softmax: int = 0


@dataclass(frozen=True)
class Device:
    """One accelerator, or one process of a CPU."""

    name: str
    memory_bytes: float
    # Memory bandwidth from the datasheet.
    hbm_bytes_per_second: float
    # Shortest time between two ops of an eager program, however small they are.
    launch_seconds: float
    # Keys are dtypes as torch spells them (`bfloat16`), and `tf32` for float32 products in TensorFloat-32.
    peak_flops: Mapping[str, float]
    # Memory bandwidth that large elementwise ops reach; None: that of the datasheet.
    stream_bytes_per_second: float | None = None
    # Memory bandwidth that the step of an optimizer reaches, which has more streams; None: that of elementwise ops.
    optimizer_bytes_per_second: float | None = None
    # Time in which a kernel starts and ends, before and after it moves bytes at that bandwidth.
    start_seconds: float = 0.0
    # Tiles and waves of matrix products; None: the roofline of peak and memory.
    matrix: MatmulUnit | None = None
    attention: AttentionRates = AttentionRates(1, 1.0, 1.0)
    # Bandwidth of ops that compute longer than they move, by name (`gelu`), forward and backward.
    forward_bytes_per_second: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    backward_bytes_per_second: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    # Overhead of any op on a device that is its own host: a process of a CPU.
    op_seconds: float = 0.0
    # Time of the host to launch one kernel. The host runs ahead of the device, so only the sum over a step counts.
    host_seconds: float = 0.0
    # Rate of copies to the pinned memory of its host and back, one direction at a time; None: not known.
    host_link_bytes_per_second: float | None = None
    # Share of the host's memory that one device has.
    host_memory_bytes: float | None = None
    # Share of the product rate that is left under continuous load.
    sustained_fraction: float = 1.0
    # Share of a core that a process of a CPU has while all of them compute. It has more while others wait.
    core_fraction: float = 1.0
    # Measured times of products and attention, which the formulas above are scaled to.
    tables: DeviceTables = field(default_factory=DeviceTables)

    @property
    def stream(self) -> float:
        return self.stream_bytes_per_second or self.hbm_bytes_per_second

    @property
    def optimizer_stream(self) -> float:
        return self.optimizer_bytes_per_second or self.stream

    @property
    def host_bytes_per_second(self) -> float | None:
        """Return the rate of copies to the host; a process of a CPU reads and writes its own memory."""
        if self.host_link_bytes_per_second is None and self.op_seconds:
            return self.stream / 2
        return self.host_link_bytes_per_second

    def at_speed(self, fraction: float) -> Device:
        """Return the device with every op slowed to a fraction of its speed; its host stays as fast."""
        if fraction == 1.0:
            return self
        rates: dict[str, Any] = {
            name: MappingProxyType({key: fraction * rate for key, rate in getattr(self, name).items()})
            for name in ("peak_flops", "forward_bytes_per_second", "backward_bytes_per_second")
        }

        def slowed(rate: float | None) -> float | None:
            return None if rate is None else fraction * rate

        # Products and attention are priced by these rates and by the start of an op.
        matrix = None if self.matrix is None else self.matrix.at_speed(fraction)
        return replace(
            self,
            hbm_bytes_per_second=fraction * self.hbm_bytes_per_second,
            stream_bytes_per_second=slowed(self.stream_bytes_per_second),
            optimizer_bytes_per_second=slowed(self.optimizer_bytes_per_second),
            launch_seconds=self.launch_seconds / fraction,
            start_seconds=self.start_seconds / fraction,
            op_seconds=self.op_seconds / fraction,
            matrix=matrix,
            tables=self.tables.slowed(1 / fraction),
            **rates,
        )


@dataclass(frozen=True)
class ClusterPart:
    """Units of one level with devices of their own: the first ones of the level, after those of earlier parts."""

    name: str
    # Level that joins the units: of the level of the network they are nodes.
    level: str
    units: int
    device: Device
    # Speed of these devices, as a share of that of their kind: a limit of power, a slower clock.
    speed_fraction: float = 1.0
    # Levels whose links are others than those of the cluster: the part's own level, and levels inside its units.
    links: tuple[TopologyLevel, ...] = ()


@dataclass(frozen=True)
class Jitter:
    """How much later than usual a rank ends a step: by a normal deviation, and in a share of the steps by a time."""

    deviation_seconds: float = 0.0
    share_fraction: float = 0.0
    by_seconds: float = 0.0


@dataclass(frozen=True)
class Cluster:
    """Devices, the levels of links from the innermost to the outermost, and a library."""

    name: str
    description: str
    # Of all units that no part names.
    device: Device
    level: tuple[TopologyLevel, ...]
    library: Library
    part: tuple[ClusterPart, ...] = ()
    sources: Mapping[str, Source] = field(default_factory=dict, metadata={"key": False})
    # Quantities of the files that name no source.
    uncited: tuple[str, ...] = field(default=(), metadata={"key": False})
    # Source of each other quantity, by its place: `device.memory`, `level.0.port`.
    cited: Mapping[str, str] = field(default_factory=dict, metadata={"key": False})
    # None: all steps take equally long.
    jitter: Jitter | None = None
    # Measurements that prices on this cluster are compared with; empty for a file of a user.
    checked: str = ""

    @property
    def ranks_per_node(self) -> int | None:
        """Return the number of devices that the innermost links join; None: any number."""
        return self.level[0].units

    def ranks_together(self, ranks: int) -> int:
        """Return how many of some ranks the innermost links join."""
        return min(self.ranks_per_node or ranks, ranks)

    def levels_of(self, part: str) -> tuple[TopologyLevel, ...]:
        """Return the levels as the units of a part have them; of units that no part names for the empty name."""
        own = {level.name: level for one in self.part if one.name == part for level in one.links}
        return tuple(own.get(level.name, level) for level in self.level)

    def with_device(self, device: Device) -> Cluster:
        """Return the cluster with all devices of one kind."""
        return replace(self, device=device, part=())

    def with_links(self, levels: tuple[TopologyLevel, ...]) -> Cluster:
        """Return the cluster with other links; measured times of collectives do not hold on them."""
        if levels == self.level:
            return self
        return replace(self, level=levels, library=replace(self.library, tables=LibraryTables()))


# -- reading ----------------------------------------------------------------------------------------------------------


def cluster_names() -> tuple[str, ...]:
    """Return the names of the clusters that autopar ships, in alphabetical order."""
    return tuple(sorted(path.stem for path in data_folder("cost_models").glob("*.toml")))


def cluster_path(name_or_path: str | Path) -> Path:
    """Return the file of a cluster: a shipped one by name, or the given path."""
    path = Path(name_or_path)
    if path.suffix == ".toml" or path.is_file():
        return path
    shipped = data_folder("cost_models") / f"{name_or_path}.toml"
    if len(path.parts) != 1 or not shipped.is_file():
        names = cluster_names()
        raise ClusterError(
            f"there is no cluster '{name_or_path}'{did_you_mean(str(name_or_path), names)}\n"
            f"fix: take one of {', '.join(names)}, or give the path of a .toml file (docs/costs.md)"
        )
    return shipped


def load_cluster(name_or_path: str | Path) -> Cluster:
    """Load a cluster by name or from a file.

    Parameters:
        name_or_path: a name of `autopar clusters`, or the path of a TOML file.

    Returns:
        The device, the levels of links from the innermost to the outermost, and the library of collectives.

    >>> import autopar
    >>> cluster = autopar.load_cluster("h100")
    >>> cluster.device.name, [level.name for level in cluster.level]
    ('H100 SXM5 80 GB', ['nvlink', 'network'])
    """
    path = cluster_path(name_or_path)
    files = _files_of(path, _stamp(path))
    return _load(path, tuple(map(_stamp, files)))


def shipped_for(device: str, memory_bytes: float) -> Cluster | None:
    """Return the plainest shipped cluster of a device, None if there is none.

    An `NVIDIA A100-SXM4-80GB` is in `a100-80`. The first part of a cluster's name must be a word of the driver's name
    for the device: a GH200 is no H200.
    """
    words = set(re.findall(r"[a-z0-9]+", device.lower()))
    named = [load_cluster(name) for name in cluster_names() if name.split("-")[0] in words]
    near = [one for one in named if abs(memory_bytes / one.device.memory_bytes - 1) <= MEMORY_TOLERANCE]
    return min(near, key=lambda one: (len(one.name), one.name), default=None)


def load_device(name: str) -> Device:
    """Load a shipped device by name."""
    path = shared_path("device", name)
    if not path.is_file():
        names = _shared_names("device")
        raise ClusterError(
            f"there is no device '{name}'{did_you_mean(name, names)}\nfix: take one of {', '.join(names)}"
        )
    return _load_device(path, _stamp(path))


@lru_cache(maxsize=64)
def _load_device(path: Path, stamp: int) -> Device:
    document = read_document(path)
    return document.read(Device, (), _without_sources(document))


def _stamp(path: Path) -> int:
    """Return when a file was written last; 0 without one."""
    return path.stat().st_mtime_ns if path.is_file() else 0


@lru_cache(maxsize=64)
def _files_of(path: Path, stamp: int) -> tuple[Path, ...]:
    """Return the file of a cluster and the tables that it names: where one of them is new, all is read again."""
    return path, *read_document(path).table_files()


@lru_cache(maxsize=64)
def _load(path: Path, stamps: tuple[int, ...]) -> Cluster:
    document = read_document(path)
    sources = dict(document.sources())
    uncited, cited = list[str](), dict[str, str]()
    table = _without_sources(document)
    device, device_file = _shared_part(document, "device", Device)
    library, library_file = _shared_part(document, "library", Library)
    for key, shared in (("device", device_file), ("library", library_file)):
        if shared is not document:
            sources |= {f"{key}-{name}": source for name, source in shared.sources().items()}
            uncited += [f"{key}.{name}" for name in shared.uncited]
            cited |= {f"{key}.{name}": f"{key}-{source}" for name, source in shared.cited.items()}
    del table["device"], table["library"]
    described = table.pop("part", [])
    for key in table:
        if key not in ("name", "description", "checked", "level", "jitter"):
            hint = did_you_mean(key, KEYS)
            document.fail((key,), f"unknown key '{key}'{hint}", f"the keys are {', '.join(KEYS)}")
    own = document.read(_OwnTables, (), table)
    check_levels(document, own.level, library)
    parts, shared_files = _read_parts(document, described, own.level, device)
    for i, shared in shared_files:
        name = shared.name.removesuffix(".toml")
        sources |= {f"{name}-{source}": found for source, found in shared.sources().items()}
        uncited += [f"part.{i}.device.{quantity}" for quantity in shared.uncited]
        cited |= {f"part.{i}.device.{quantity}": f"{name}-{source}" for quantity, source in shared.cited.items()}
    missing = (*uncited, *document.uncited)
    known = MappingProxyType(cited | document.cited)
    tables = (own.name, own.description, device, own.level, library, parts, MappingProxyType(sources), missing, known)
    return Cluster(*tables, own.jitter, own.checked)


@dataclass(frozen=True)
class _OwnTables:
    """Keys that are always in a cluster's own file."""

    name: str
    description: str
    level: tuple[TopologyLevel, ...]
    jitter: Jitter | None = None
    checked: str = ""


def shared_path(key: str, name: str) -> Path:
    """Return the file of a device or a library that clusters share."""
    return data_folder("cost_models") / FOLDERS[key] / f"{name}.toml"


def _shared_names(key: str) -> list[str]:
    return sorted(path.stem for path in (data_folder("cost_models") / FOLDERS[key]).glob("*.toml"))


def _without_sources(document: Document) -> dict[str, object]:
    return {key: value for key, value in document.table.items() if key != "sources"}


Part = TypeVar("Part", Device, Library)


def _shared_part(document: Document, key: str, record: type[Part]) -> tuple[Part, Document]:
    """Return the device or library of a cluster, with the file that defines it: this one or a shared one."""
    names = _shared_names(key)
    if key not in document.table:
        document.fail((), f"the file lacks '{key}'", f"name one of {', '.join(names)}, or write it under [{key}]")
    return _named_part(document, (key,), document.table[key], key, record)


def _named_part(
    document: Document, place: tuple[str | int, ...], name: object, key: str, record: type[Part]
) -> tuple[Part, Document]:
    """Return a device or library and the file that describes it, given its name or its table in a cluster's file."""
    if not isinstance(name, str):
        return document.read(record, place, name), document
    names = _shared_names(key)
    if name not in names:
        fix = f"take one of {', '.join(names)}, or write it under [{'.'.join(map(str, place[::2]))}]"
        document.fail(place, f"there is no {key} '{name}'{did_you_mean(name, names)}", fix)
    shared = read_document(shared_path(key, name))
    return shared.read(record, (), _without_sources(shared)), shared


def _read_parts(
    document: Document, described: object, levels: tuple[TopologyLevel, ...], device: Device
) -> tuple[tuple[ClusterPart, ...], list[tuple[int, Document]]]:
    """Read `[[part]]` tables; also return the files of their devices, by the number of the part.

    A part names its device, describes it in a table, or has that of the cluster at another speed.
    """
    if not isinstance(described, list):
        document.fail(("part",), "'part' is not a list", "write it as [[part]]")
    parts: list[ClusterPart] = []
    files: list[tuple[int, Document]] = []
    for i, table in enumerate(described):
        place = ("part", i)
        values = dict(table) if isinstance(table, dict) else {}
        own = values.pop("device", None)
        values.setdefault("level", levels[-1].name)
        found = document.read(_PartKeys, place, values)
        kind = device
        if own is not None:
            kind, file = _named_part(document, (*place, "device"), own, "device", Device)
            files += [] if file is document else [(i, file)]
        links = _part_links(document, place, found, levels)
        parts.append(ClusterPart(found.name, found.level, found.units, kind, found.speed_fraction, links))
    _check_parts(document, parts, levels)
    return tuple(parts), files


@dataclass(frozen=True)
class _PartKeys:
    """Keys of a `[[part]]` beside its device."""

    name: str
    level: str
    units: int
    speed_fraction: float = 1.0
    links: tuple[PartLinks, ...] = ()


def _part_links(
    document: Document, place: tuple[str | int, ...], part: _PartKeys, levels: tuple[TopologyLevel, ...]
) -> tuple[TopologyLevel, ...]:
    """Return the levels that a part describes anew."""
    names = [level.name for level in levels]
    inside = names[: names.index(part.level) + 1] if part.level in names else names
    found: dict[str, TopologyLevel] = {}
    for i, links in enumerate(part.links):
        at = (*place, "links", i)
        if links.name not in inside:
            message = f"part '{part.name}' has no links of level '{links.name}'{did_you_mean(links.name, inside)}"
            document.fail((*at, "name"), message, f"its own level and those inside are {', '.join(inside)}")
        if links.name in found:
            document.fail((*at, "name"), f"level '{links.name}' stands twice", "describe the links of a level once")
        found[links.name] = own_level(levels[names.index(links.name)], links)
        check_rates(document, found[links.name], at)
        check_wires(document, found[links.name], at)
    return tuple(found.values())


def _check_parts(document: Document, parts: list[ClusterPart], levels: tuple[TopologyLevel, ...]) -> None:
    names = [level.name for level in levels]
    for i, part in enumerate(parts):
        place = ("part", i)
        if part.name in (other.name for other in parts[:i]):
            document.fail((*place, "name"), f"two parts are called '{part.name}'", "give each part another name")
        if part.level not in names:
            message = f"there is no level '{part.level}'{did_you_mean(part.level, names)}"
            document.fail((*place, "level"), message, f"the levels are {', '.join(names)}")
        if part.level != parts[0].level:
            message = f"the parts stand on two levels, '{parts[0].level}' and '{part.level}'"
            document.fail((*place, "level"), message, "count all parts in units of one level")
        level = levels[names.index(part.level)]
        if level.units is not None and sum(one.units for one in parts[: i + 1]) > level.units:
            counts = " + ".join(str(one.units) for one in parts[: i + 1])
            message = f"the parts have more units than the level: {counts}, and '{level.name}' joins {level.units}"
            document.fail((*place, "units"), message, f"give parts of {level.units} units together, or fewer")
