"""Show a cluster as text or plain data, and write it as one file without shared parts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import fields
from math import prod
from pathlib import Path
from typing import Any

from autopar.cost.collective_algorithms import TopologyLevel
from autopar.cost.hardware.cluster import Cluster, ClusterPart, Device, cluster_path, shared_path
from autopar.cost.hardware.toml_reader import read_document
from autopar.cost.measured.tables import DeviceTables, LibraryTables
from autopar.cost.network import Network
from autopar.mesh import SubMesh

# Buffers, collectives and, where any number of ranks fits, ranks of the example prices.
SIZES = ((2**16, "64 KiB"), (2**20, "1 MiB"), (2**24, "16 MiB"), (2**28, "256 MiB"))
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
DEFAULT_RANKS = 4
# Place of the algorithms of a library, whose many numbers are counted, not named.
ALGORITHMS = "library.algorithm"
# Nodes of the largest example.
MOST_NODES = 16
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K"))


def _number(value: float, unit: str) -> str:
    """Return a number with a decimal prefix: `3.35 TB/s`."""
    for size, prefix in _PREFIXES:
        if value >= size:
            return f"{value / size:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}"


def _time(seconds: float) -> str:
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def cluster_table(clusters: list[Cluster]) -> str:
    """Return a line for each cluster: name, memory of a device, description."""
    lines = [(one.name, _number(one.device.memory_bytes, "B"), one.description) for one in clusters]
    widths = [max((len(line[i]) for line in lines), default=0) for i in range(2)]
    return "\n".join(f"{name:{widths[0]}}  {memory:>{widths[1]}}  {text}".rstrip() for name, memory, text in lines)


def cluster_data(cluster: Cluster) -> dict[str, Any]:
    """Return the numbers of a cluster as plain data, without those of its algorithms."""
    device = cluster.device
    return {
        "name": cluster.name,
        "description": cluster.description,
        "checked": cluster.checked or None,
        "device": {
            "name": device.name,
            "memory_bytes": device.memory_bytes,
            "memory_bytes_per_second": device.hbm_bytes_per_second,
            "launch_seconds": device.launch_seconds,
            "start_seconds": device.start_seconds,
            "peak_flops": dict(device.peak_flops),
        },
        "levels": [_level_data(level) for level in cluster.level],
        "parts": [
            {
                "name": part.name,
                "level": part.level,
                "units": part.units,
                "device": part.device.name,
                "memory_bytes": part.device.memory_bytes,
                "speed": part.speed_fraction,
                "levels": [_level_data(level) for level in part.links],
            }
            for part in cluster.part
        ],
        "library": cluster.library.name,
        "tables": list(_tables(cluster)),
        "sources": {name: {"text": one.text, "date": one.date} for name, one in sorted(cluster.sources.items())},
        "sources_of_numbers": dict(cluster.cited),
    }


def _level_data(level: TopologyLevel) -> dict[str, Any]:
    keys = ("name", "link", "units", "ports", "port_bytes_per_second", "rate_bytes_per_second")
    return {**{key: getattr(level, key) for key in keys}, "offers": list(level.offers)}


def describe(cluster: Cluster) -> str:
    """Return the numbers of a cluster and example prices of collectives, as text."""
    device = cluster.device
    memory = _number(device.memory_bytes, "B")
    algorithms = dict.fromkeys(" ".join(filter(None, (one.name, one.protocol))) for one in cluster.library.algorithm)
    peaks = ", ".join(f"{name} {_number(peak, 'FLOP/s')}" for name, peak in device.peak_flops.items())
    lines = [
        f"{cluster.name}: {cluster.description}",
        f"  device    {device.name}: {memory} at {_number(device.hbm_bytes_per_second, 'B/s')}",
        f"            {peaks}",
        f"            an op of an eager program takes {_time(device.launch_seconds)} at least",
        *_host_lines(device),
        *(f"  {'parts' if i == 0 else '':9} {_part(part)}" for i, part in enumerate(cluster.part)),
        *(f"  {'':9} {part.name}, links of {level.name}: {_links(level)}" for part, level in _part_levels(cluster)),
        *(f"  {'links' if i == 0 else '':9} {_level(cluster, i)}" for i in range(len(cluster.level))),
        f"  library   {cluster.library.name}: {', '.join(algorithms)}",
        *(f"  {'measured' if i == 0 else '':9} {line}" for i, line in enumerate(_tables(cluster))),
        f"  checked   by {cluster.checked or 'nothing that the file names'}",
        "",
        *_prices(cluster),
        "",
        "  sources",
        *_sources(cluster),
    ]
    return "\n".join(lines)


def _tables(cluster: Cluster) -> Iterator[str]:
    """Yield a line for each table of measured times, which scale the prices of the formulas."""
    found: list[tuple[str, DeviceTables | LibraryTables]] = [
        ("device.tables", cluster.device.tables),
        ("library.tables", cluster.library.tables),
    ]
    found += [(f"part.{i}.device.tables", part.device.tables) for i, part in enumerate(cluster.part)]
    for place, tables in found:
        for one in fields(tables):
            table = getattr(tables, one.name)
            if table is not None:
                source = cluster.cited.get(f"{place}.{one.name}", "no source")
                yield f"{one.name}: {len(table.rows)} rows of {table.file} [{source}]; else by the formula"


def _sources(cluster: Cluster) -> Iterator[str]:
    """Yield each source with the numbers that it gives, then those that have none."""
    for name, source in sorted(cluster.sources.items()):
        numbers = [place for place, cited in cluster.cited.items() if cited == name]
        yield f"  {name}: {source.text} ({source.date})"
        if numbers:
            yield f"    gives {_grouped(numbers)}"
    if cluster.uncited:
        yield f"  without a source: {_grouped(cluster.uncited)}"


def _grouped(places: Iterable[str]) -> str:
    """Return places with equal beginnings together: `device.memory, .hbm; level.0.port`."""
    groups: dict[str, list[str]] = {}
    for one in places:
        table, _, key = one.rpartition(".")
        groups.setdefault(ALGORITHMS if one.startswith(ALGORITHMS) else table, []).append(key)
    return "; ".join(
        f"{table}: {len(keys)} numbers" if table == ALGORITHMS else f"{table}.{', .'.join(keys)}"
        for table, keys in groups.items()
    )


def _host_lines(device: Device) -> Iterator[str]:
    if device.host_link_bytes_per_second is not None:
        memory = "" if device.host_memory_bytes is None else f", {_number(device.host_memory_bytes, 'B')} of its memory"
        yield f"            to its host {_number(device.host_link_bytes_per_second, 'B/s')} each way{memory}"


def _part(part: ClusterPart) -> str:
    device, units = part.device, "unit" if part.units == 1 else "units"
    speed = "" if part.speed_fraction == 1.0 else f", at {100 * part.speed_fraction:.3g} % of its speed"
    return (
        f"{part.name}: {part.units} {units} of {part.level}, {device.name}: {_number(device.memory_bytes, 'B')}{speed}"
    )


def _part_levels(cluster: Cluster) -> Iterator[tuple[ClusterPart, TopologyLevel]]:
    return ((part, level) for part in cluster.part for level in part.links)


def _links(level: TopologyLevel) -> str:
    """Return number and rates of the links of one unit."""
    wired = ", in pairs" if level.wires else ""
    rates = f"{_number(level.port_bytes_per_second, 'B/s')}, {_number(level.rate_bytes_per_second, 'B/s')} in practice"
    return f"{level.ports} × {rates}{wired}"


def _level(cluster: Cluster, i: int) -> str:
    level = cluster.level[i]
    one = "device" if i == 0 else f"unit of {cluster.level[i - 1].name}"
    joined = "any number" if level.units is None else str(level.units)
    offers = f"; offers {', '.join(level.offers)}" if level.offers else ""
    wired = ", in pairs" if level.wires else ""
    rates = f"{_number(level.port_bytes_per_second, 'B/s')}, {_number(level.rate_bytes_per_second, 'B/s')} in practice"
    return f"{level.name}: joins {joined}{wired}; {level.ports} × {rates}, for each {one}{offers}"


def _prices(cluster: Cluster) -> list[str]:
    """Return the seconds of collectives inside a node, over 2 nodes and over 16, or over all that there are."""
    inside = cluster.level[0].units or DEFAULT_RANKS
    nodes = [1, 2, MOST_NODES] if len(cluster.level) > 1 else [1]
    if len(cluster.level) > 1 and cluster.level[-1].units is not None:
        every = prod(level.units or 1 for level in cluster.level[1:])
        nodes = sorted({min(count, every) for count in nodes})
    lines = [f"  {'':15} {'ranks':>10}" + "".join(f"{name:>12}" for _, name in SIZES)]
    for kind in COLLECTIVES:
        for units in nodes:
            network = Network(cluster, SubMesh({"outer": units, "inner": inside}))
            times = [network.seconds(kind, ("outer", "inner"), float(size)) for size, _ in SIZES]
            shape = f"{units} x {inside}" if units > 1 else str(inside)
            # The sign of prices that measured times scale.
            mark = "*" if network.is_measured(kind, ("outer", "inner")) else " "
            prices = "".join(f"{_time(time):>11}{mark}" for time in times).rstrip()
            lines.append(f"  {kind:15} {shape:>10} {prices}")
    if any(line.endswith("*") for line in lines):
        lines.append("  * scaled to measured times")
    return lines


def standalone(name_or_path: str | Path) -> str:
    """Return the file of a cluster with its shared device and library written out in it."""
    path = cluster_path(name_or_path)
    document = read_document(path)
    text = _with_whole_paths(path)
    sources: list[str] = []
    parts: list[str] = []
    for key in ("device", "library"):
        name = document.table.get(key)
        if isinstance(name, str):
            shared = _with_whole_paths(shared_path(key, name))
            body, cited = _split(re.sub(r'\[([\w.-]+)\]"', rf'[{key}-\1]"', shared))
            text = re.sub(rf'^{key}\s*=\s*".*"[^\n]*\n', "", text, count=1, flags=re.MULTILINE)
            nested = re.sub(r"^(\[\[?)([\w.]+)(\]\]?)", rf"\1{key}.\2\3", body, flags=re.MULTILINE)
            parts.append(f"[{key}]\n{nested}")
            sources += [f"{key}-{line}" for line in cited]
    text, own = _with_part_devices(text)
    sources += own
    head, cited = _split(text)
    tables = [part.strip("\n") + "\n" for part in parts]
    return "\n".join([head.rstrip("\n"), "", *tables, "[sources]", *cited, *sources, ""])


def _with_part_devices(text: str) -> tuple[str, list[str]]:
    """Return the text of a cluster with the devices of its parts written out, and the lines of their sources."""
    body, cited = _split(text)
    blocks = re.split(r"(?m)^(?=\[)", body)
    sources: dict[str, None] = {}
    for i, block in enumerate(blocks):
        named = re.search(r'(?m)^device\s*=\s*"(.*?)".*\n', block)
        if not block.startswith("[[part]]") or named is None:
            continue
        name = named[1]
        text = _with_whole_paths(shared_path("device", name))
        shared, own = _split(re.sub(r'\[([\w.-]+)\]"', rf'[{name}-\1]"', text))
        nested = re.sub(r"(?m)^(\[\[?)([\w.]+)(\]\]?)", r"\1part.device.\2\3", shared)
        blocks[i] = f"{block.replace(named[0], '').rstrip()}\n\n[part.device]\n{nested.strip()}\n\n"
        sources |= dict.fromkeys(f"{name}-{line}" for line in own)
    return "\n".join([f"{''.join(blocks)}[sources]", *cited, ""]), list(sources)


def _with_whole_paths(path: Path) -> str:
    """Return the text of a file, with the tables of measurements that it names by paths that hold anywhere."""
    text = path.read_text(encoding="utf-8")
    return re.sub(r'"\s*([^"\[\]]+?\.csv)\s*(["\[])', lambda one: f'"{path.resolve().parent / one[1]} {one[2]}', text)


def links_of(name_or_path: str | Path) -> tuple[list[str], list[str]]:
    """Return the lines of a cluster's links and library, and of its sources, for a file with another device.

    The sources get the prefix `links-`, since the other file has sources of its own.
    """
    body, sources = _split(standalone(name_or_path))
    body = re.sub(r'\[([\w.-]+)\]"', r'[links-\1]"', body)
    kept: list[str] = []
    wanted = False
    for line in body.splitlines():
        if line.startswith("["):
            wanted = not line.lstrip("[").startswith(("device", "part"))
        if wanted:
            kept.append(line)
    return kept, [f"links-{line}" for line in sources]


def _split(text: str) -> tuple[str, list[str]]:
    """Return the text before `[sources]`, and the lines of that table."""
    body, _, rest = text.partition("[sources]\n")
    return body, [line for line in rest.splitlines() if line.strip()]
