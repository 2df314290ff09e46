"""The published measurements of collectives: each row priced on the cluster it was measured on.

A row names a device, how many of them, how many nodes and, in words, the network. The cluster is the one of
`cost_models/` with that device and that network, with as many links as the row says.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autopar.cost.collective_algorithms import KINDS
from autopar.cost.hardware.cluster import Cluster, load_cluster
from autopar.cost.network import Network
from autopar.submesh import SubMesh
from benchmarks.published.metrics import Pair
from benchmarks.published.sizes import JudgedBySize, Timing, judge_by_size

__all__ = ["READERS", "Measured", "cluster_of", "judge", "predicted_seconds", "tables"]

Row = Mapping[str, str]
# From here on bandwidth counts, below it latency: the two are judged apart.
BOUNDARY_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Measured:
    """One collective, as it was measured."""

    table: str
    # None: autopar has no such device or network, or the row does not say which it is.
    cluster: Cluster | None
    nodes: int
    ranks: int
    kind: str
    buffer_bytes: float
    seconds: float
    # The one algorithm that was allowed.
    only: str = ""
    label: str = ""


def tables(paths: Iterable[Path]) -> list[JudgedBySize]:
    """Judge each file that is one of these tables: the whole of it, then each system in it."""
    results = []
    for path in paths:
        reader = next((reader for part, reader in READERS.items() if part in path.name), None)
        if reader is not None:
            with path.open(encoding="utf-8", newline="") as file:
                results += judge(path.stem, reader(list(csv.DictReader(file))))
    return results


def judge(name: str, measured: Sequence[Measured]) -> list[JudgedBySize]:
    groups: dict[str, list[Measured]] = defaultdict(list)
    for one in measured:
        groups[one.table].append(one)
    parts = [(name, list(measured)), *((f"{name}, {table}", group) for table, group in groups.items())]
    return [judge_by_size(part, map(_timing, rows)) for part, rows in parts]


def _timing(one: Measured) -> Timing:
    pair = Pair(predicted_seconds(one), one.seconds) if one.cluster is not None else None
    return Timing(one.buffer_bytes >= BOUNDARY_BYTES, pair)


def predicted_seconds(one: Measured) -> float:
    """Return autopar's prediction of one collective of the library; all ranks of all nodes take part."""
    assert one.cluster is not None, f"{one.label} has no cluster"
    inside = one.ranks // one.nodes
    network = Network(_with_ranks(one.cluster, inside, one.nodes), SubMesh({"outer": one.nodes, "inner": inside}))
    axes = ("outer", "inner")
    if one.only:
        curves = [curve for curve in network.curves(one.kind, axes) if curve.algorithm.split()[0] == one.only]
        return min(curve.seconds(one.buffer_bytes) for curve in curves)
    return network.library_seconds(one.kind, axes, one.buffer_bytes)


def _with_ranks(cluster: Cluster, ranks: int, nodes: int) -> Cluster:
    """Return the cluster with fewer ranks in a node, where several nodes have fewer."""
    inner, *outer = cluster.level
    if nodes > 1 and inner.units is not None and ranks < inner.units:
        wires = tuple(row[:ranks] for row in inner.wires[:ranks])
        inner = replace(inner, units=ranks, wires=wires)
    return replace(cluster, level=(inner, *outer))


# -- clusters ---------------------------------------------------------------------------------------------------------

# Device -> network -> cluster. The first network of a device is what its maker's own nodes have.
CLUSTERS: Mapping[str, Mapping[str, str]] = {
    "V100": {"infiniband": "v100"},
    "A100 40GB": {"infiniband": "a100-40"},
    "A100": {"infiniband": "a100-80", "efa": "a100-efa"},
    "H100": {
        "infiniband": "h100",
        "efa": "h100-efa",
        "roce": "h100-roce",
        "tcpxo": "h100-a3mega",
        "tcpx": "h100-a3high",
        "slingshot": "h100-slingshot",
    },
    "H200": {"infiniband": "h200", "efa": "h200-efa"},
    "B200": {"infiniband": "b200", "efa": "b200-efa"},
    "GB200": {"infiniband": "gb200"},
    "B300": {"infiniband": "b300"},
    "GB300": {"infiniband": "gb300"},
    "MI300X": {"infiniband": "mi300x"},
    "MI355X": {"infiniband": "mi355x"},
    "L40S": {"infiniband": "l40s"},
}

# In the order of the search: what the words of a network say it is.
NETWORKS: tuple[tuple[str, str], ...] = (
    (r"\bEFA|AWS|\bp[4-6]", "efa"),
    (r"TCPXO|A3 ?Mega", "tcpxo"),
    (r"TCPX|A3 ?High", "tcpx"),
    (r"RoCE|Ethernet", "roce"),
    (r"Slingshot|CXI", "slingshot"),
    (r"\bIB\b|InfiniBand|NDR|HDR|EDR|RDMA|NVL|xGMI|PCIe|\bDGX|^$", "infiniband"),
)
_LINKS = re.compile(r"(\d+)\s*x\s*(?:NDR|HDR)?\s*(\d+)\s*Gb", re.IGNORECASE)
_NDR = re.compile(r"(\d+)\s*x\s*(?:NDR|HDR)\s*(\d+)", re.IGNORECASE)


def cluster_of(device: str, network: str) -> Cluster | None:
    """Return the cluster with this device and this network; None when autopar has none."""
    known = next((name for name in sorted(CLUSTERS, key=len, reverse=True) if device.startswith(name)), None)
    kind = next((kind for words, kind in NETWORKS if re.search(words, network, re.IGNORECASE)), None)
    if known is None or kind is None:
        return None
    cluster = load_cluster(CLUSTERS[known].get(kind, CLUSTERS[known]["infiniband"]))
    if kind not in CLUSTERS[known]:
        # The device on a network that autopar knows from other devices.
        other = next(clusters[kind] for clusters in CLUSTERS.values() if kind in clusters)
        cluster = replace(cluster, level=(*cluster.level[:-1], load_cluster(other).level[-1]))
    links = _LINKS.search(network) or _NDR.search(network)
    return _with_links(cluster, int(links[1]), int(links[2]) * 1e9 / 8) if links else cluster


def _with_links(cluster: Cluster, ports: int, port: float) -> Cluster:
    """Return the cluster with another network; the achieved share of a port's bandwidth stays."""
    *inner, outer = cluster.level
    share = outer.rate_bytes_per_second / outer.port_bytes_per_second
    if outer.units is None and (outer.ports, outer.port_bytes_per_second) != (ports, port):
        outer = replace(outer, ports=ports, port_bytes_per_second=port, achieved_bytes_per_second=share * port)
    return replace(cluster, level=(*inner, outer))


# -- readers ----------------------------------------------------------------------------------------------------------

NAMES = {"alltoall": "all_to_all", "sendrecv": "send", "allreduce": "all_reduce", "allgather": "all_gather"}
NAMES |= {"reducescatter": "reduce_scatter"}


def _kind(name: str) -> str | None:
    word = name.split("(")[0].strip().lower()
    kind = NAMES.get(word.split("_v")[0].replace("_", ""), word)
    return kind if kind in KINDS else None


def _sweep(rows: Sequence[Row]) -> list[Measured]:
    """nccl-tests over sizes: times out of place."""
    found = []
    for row in rows:
        kind, time = _kind(row["collective"]), row["oop_time_us"]
        if kind is None or not time or not int(row["size_bytes"]):
            continue
        nodes, ranks = int(row["nodes"]), int(row["gpus"])
        device, network = row["gpu"].replace(" 80GB", ""), row["network"]
        cluster = cluster_of(device, network)
        table = f"{row['system']}, {kind}, {ranks} ranks"
        nodes = _racks(cluster, ranks, nodes)
        label = f"{table}, {row['size_bytes']} bytes"
        size, seconds = float(row["size_bytes"]), float(time) / 1e6
        found.append(Measured(table, cluster, nodes, ranks, kind, size, seconds, label=label))
    return found


def _racks(cluster: Cluster | None, ranks: int, nodes: int) -> int:
    """Return the number of units of the innermost links: racks of GB200, not trays."""
    joined = cluster.ranks_per_node if cluster else None
    return nodes if joined is None or ranks // nodes >= joined else -(-ranks // joined) if joined > 8 else nodes


def _single_node(rows: Sequence[Row]) -> list[Measured]:
    """vTrain's sweeps of all-reduce inside one node."""
    found = []
    for row in rows:
        ranks, cluster = int(row["ranks"]), cluster_of(row["gpu"], "")
        table = f"{row['gpu']}, {ranks} ranks"
        size, seconds = float(row["size_bytes"]), float(row["oop_time_us"]) / 1e6
        found.append(
            Measured(table, cluster, 1, ranks, "all_reduce", size, seconds, label=f"{table}, {size:.0f} bytes")
        )
    return found


_SIZES = {"MiB": 2.0**20, "GiB": 2.0**30, "MB": 1e6, "GB": 1e9, "": 1.0}
_RANKS_PER_NODE = 8


def _plateau(rows: Sequence[Row]) -> list[Measured]:
    """Bus bandwidths at a large size. Where a row names no number of devices, its words say what was linked."""
    found = []
    for row in rows:
        kind, size = _kind(row["collective"]), re.fullmatch(r"(\d+)\s*(\w*)", row["size"])
        if kind is None or not row["gpus"] or size is None:
            continue
        ranks = int(row["gpus"])
        cluster = cluster_of(row["gpu"], row["gpu"].partition(" ")[2])
        joined = (cluster.ranks_per_node if cluster else None) or _RANKS_PER_NODE
        nodes = -(-ranks // joined)
        algorithm = row["algo"].split()[0].lower() if row["algo"] else ""
        buffer = float(size[1]) * _SIZES[size[2]]
        found.append(_by_bus_bandwidth(row["gpu"], cluster, nodes, ranks, kind, buffer, row["busbw_GB_s"], algorithm))
    return found


def _inside_nodes(rows: Sequence[Row]) -> list[Measured]:
    """Return sweeps on one node by a planner of inference servers; half of three devices' rows fitted a library."""
    found = []
    for row in rows:
        table = f"{row['gpu']}, {row['half']}"
        ranks, size, seconds = int(row["ranks"]), float(row["bytes"]), float(row["microseconds"]) / 1e6
        label = f"{table}, {row['collective']}, {ranks} ranks, {size:.0f} bytes"
        cluster = cluster_of(row["gpu"], "")
        found.append(Measured(table, cluster, 1, ranks, row["collective"], size, seconds, label=label))
    return found


def _by_nodes(rows: Sequence[Row]) -> list[Measured]:
    """Return the Ultra-Scale Playbook's bus bandwidths by nodes, of H100 nodes on AWS."""
    found = []
    cluster = load_cluster("h100-efa")
    for row in rows:
        kind = _kind(row["collective"])
        if kind is not None:
            size, nodes, ranks = float(row["size_MB"]) * 1e6, int(row["nodes"]), int(row["gpus"])
            found.append(_by_bus_bandwidth(kind, cluster, nodes, ranks, kind, size, row["bandwidth_GB_s"]))
    return found


def _by_bus_bandwidth(
    table: str, cluster: Cluster | None, nodes: int, ranks: int, kind: str, size: float, gigabytes: str, only: str = ""
) -> Measured:
    """nccl-tests' bus bandwidth, turned back into the time."""
    factor = {"all_reduce": 2 * (ranks - 1) / ranks, "send": 1.0}.get(kind, (ranks - 1) / ranks)
    seconds = size * factor / (float(gigabytes) * 1e9)
    label = f"{table}, {kind}, {ranks} ranks, {size:.0f} bytes"
    return Measured(table, cluster, nodes, ranks, kind, size, seconds, only, label)


# Keys are parts of the file's name.
READERS: Mapping[str, Callable[[Sequence[Row]], list[Measured]]] = {
    "micro_allreduce": _single_node,
    "micro_nccl_sweeps": _sweep,
    "micro_collective_plateau": _plateau,
    "micro_ultrascale_collective": _by_nodes,
    "micro_collectives": _inside_nodes,
}
