"""The shipped libraries of collectives: they price everything, and choose what the libraries choose."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.cost.collective_algorithms import KINDS
from autopar.cost.hardware.cluster import Cluster, load_cluster
from autopar.cost.network import Network

LINKS = {"gloo": "memory", "mpich": "memory", "openmpi": "memory", "horovod": "nvlink"}

CLUSTER = """
name = "nodes"
description = "Nodes of 4"
library = "{library}"

[device]
name = "Device"
memory = "16 GiB"
hbm = "100 GB/s"
launch = "5 us"

[device.peak]
float32 = "1 TFLOP/s"

[[level]]
name = "node"
link = "{link}"
units = 4
ports = 1
port = "10 GB/s"

[[level]]
name = "network"
link = "network"
ports = 1
port = "100 Gb/s"

[sources]
"""


@pytest.fixture
def with_library(tmp_path: Path) -> dict[str, Cluster]:
    found = {}
    for name, link in LINKS.items():
        path = tmp_path / f"{name}.toml"
        path.write_text(CLUSTER.format(library=name, link=link))
        found[name] = load_cluster(path)
    return found


@pytest.mark.parametrize("name", LINKS)
def test_every_collective_has_a_price(with_library: dict[str, Cluster], name: str) -> None:
    for axes in ({"a": 1, "b": 3}, {"a": 2, "b": 4}, {"a": 5, "b": 4}, {"a": 32, "b": 4}, {"a": 256, "b": 4}):
        network = Network(with_library[name], axes)
        for kind in KINDS:
            for over in (("a",), ("b",), ("a", "b")):
                times = [network.seconds(kind, over, size) for size in (1e3, 1e5, 1e7, 1e9, 1e11)]
                assert times[-1] >= times[0] >= 0
                assert times == sorted(times) or name in ("mpich", "openmpi"), "a switch of algorithms may be early"


@pytest.mark.parametrize(
    ("name", "kind", "ranks", "size", "algorithm"),
    [
        ("mpich", "all_reduce", 4, 8, "recursive_doubling"),
        ("mpich", "all_reduce", 3, 1e6, "halving_doubling"),
        ("mpich", "all_gather", 4, 1e4, "recursive_doubling"),
        ("mpich", "all_gather", 3, 1e4, "bruck"),
        ("mpich", "all_gather", 3, 1e6, "ring"),
        ("mpich", "reduce_scatter", 4, 1e5, "halving_doubling"),
        ("mpich", "reduce_scatter", 4, 1e6, "pairwise"),
        ("mpich", "broadcast", 4, 1e7, "binomial"),
        ("mpich", "reduce", 4, 1e3, "binomial"),
        ("mpich", "reduce", 4, 1e5, "halving_doubling"),
        ("openmpi", "all_reduce", 3, 1e5, "ring"),
        ("openmpi", "all_reduce", 4, 8191, "recursive_doubling"),
        ("openmpi", "all_reduce", 4, 8192, "halving_doubling"),
        ("openmpi", "reduce_scatter", 4, 1e6, "ring"),
        ("gloo", "all_reduce", 4, 1e6, "ring"),
        ("gloo", "reduce_scatter", 4, 1e6, "ring_and_slice"),
        ("gloo", "broadcast", 4, 1e6, "binomial"),
        ("horovod", "all_reduce", 4, 1e9, "ring"),
    ],
)
def test_the_algorithm_of_the_library_is_taken(
    with_library: dict[str, Cluster], name: str, kind: str, ranks: int, size: float, algorithm: str
) -> None:
    network = Network(with_library[name], {"a": ranks})
    assert network.algorithm(kind, ("a",), size).split()[0] == algorithm


def test_torch_sums_whole_tensors_to_reduce_and_scatter_them(with_library: dict[str, Cluster]) -> None:
    network = Network(with_library["gloo"], {"a": 4})
    assert network.seconds("reduce_scatter", ("a",), 1e6) == network.seconds("all_reduce", ("a",), 1e6)


def test_horovod_reduces_by_level_between_nodes(with_library: dict[str, Cluster]) -> None:
    network = Network(with_library["horovod"], {"a": 16, "b": 4})
    assert network.algorithm("all_reduce", ("a", "b"), 1e9).split()[0] == "ring"
    assert network.algorithm("all_reduce", ("a", "b"), 1e6).split()[0] == "torus"
