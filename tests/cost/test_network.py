"""The price of collectives on the links that axes span: limits, exact values, sharing, placement."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from autopar.cost.collective_algorithms import KINDS
from autopar.cost.hardware.cluster import Cluster, cluster_names, load_cluster
from autopar.cost.network import Curve, Network
from autopar.errors import ClusterError
from autopar.mesh import Mesh
from autopar.sharding.reshard.reshard import StepKind

TWO_LEVELS = Path(__file__).with_name("two_levels.toml")
BUS, WIRE = 80e9, 100e9
"""Of a device, and of a node, in both directions each: two ports of 40 GB/s, four of 25 GB/s."""


@pytest.fixture
def cluster() -> Cluster:
    return load_cluster(TWO_LEVELS)


def network_of(cluster: Cluster, mesh: Mesh) -> Network:
    links = {axis: link for axis in mesh.names if (link := mesh.link(axis)) is not None}
    return Network(cluster, mesh.whole, links)


def only(cluster: Cluster, name: str, **changes: object) -> Cluster:
    """The cluster with one algorithm."""
    kept = tuple(replace(entry, **changes) for entry in cluster.library.algorithm if entry.name == name)  # type: ignore[arg-type]
    return replace(cluster, library=replace(cluster.library, algorithm=kept))


# -- the formula ------------------------------------------------------------------------------------------------------


def test_seconds_of_a_curve() -> None:
    curve = Curve("ring", 16e-6, 1e-9, (16e-6 * 1e-9) ** 0.5, 1e-3)
    assert curve.seconds(0) == 16e-6
    assert curve.seconds(1e6) == pytest.approx(16e-6 + 1e-3 + (16e-6 * 1e-3) ** 0.5)
    assert curve.seconds(1e9) == pytest.approx(16e-6 + 1 + 1e-3)  # no more than it takes to fill the pipeline


@pytest.mark.parametrize("name", cluster_names())
@pytest.mark.parametrize("kind", KINDS)
def test_every_collective_on_every_shipped_cluster(name: str, kind: str) -> None:
    cluster = load_cluster(name)
    for axes in ({"a": 1, "b": 4}, {"a": 2, "b": 3}, {"a": 16, "b": 8}):
        network = Network(cluster, axes)
        for over in (("a",), ("b",), ("a", "b")):
            times = [network.seconds(kind, over, size) for size in (0.0, 1.0, 1e4, 1e8, 1e14, 1e16)]
            if prod(axes[axis] for axis in over) == 1:
                assert times == [0.0] * len(times)
            else:
                assert times[0] == 0.0
                assert times == sorted(set(times)), "more bytes take longer"
                assert times[-1] / times[-2] == pytest.approx(100, rel=0.01), "large sizes cost by the byte"


def test_without_latency_a_ring_is_bound_by_bandwidth(cluster: Cluster) -> None:
    free = only(cluster, "ring", base_seconds=0.0, hop_seconds={})
    free = replace(free, level=tuple(replace(level, hop_seconds={}) for level in free.level))
    inside = Network(free, {"a": 4})
    assert inside.seconds("all_reduce", ("a",), 1e9) == pytest.approx(2 * 3 / 4 * 1e9 / BUS)
    across = Network(free, {"a": 2, "b": 4})
    # The bus is the slower of the two: all four devices of a node share its wires.
    assert across.seconds("all_reduce", ("a", "b"), 1e9) == pytest.approx(2 * 7 / 8 * 1e9 / BUS)
    assert across.seconds("all_gather", ("a", "b"), 1e9) == pytest.approx(7 / 8 * 1e9 / BUS)
    slow = replace(free, level=(free.level[0], replace(free.level[1], ports=2)))
    assert Network(slow, {"a": 2, "b": 4}).seconds("all_gather", ("a", "b"), 1e9) == pytest.approx(7 / 8 * 1e9 / 50e9)


def test_a_ring_copies_the_piece_that_comes_last(cluster: Cluster) -> None:
    plain, copying = (only(cluster, "ring", copy_bytes_per_second=rate) for rate in (None, 400e9))
    for axes in ({"a": 4}, {"a": 2, "b": 4}):
        for kind, copied in (("all_gather", 1.0), ("reduce_scatter", 1.0), ("all_reduce", 1.0), ("broadcast", 0.0)):
            before, after = (Network(one, axes).seconds(kind, tuple(axes), 1e9) for one in (plain, copying))
            assert after - before == pytest.approx(copied * 1e9 / prod(axes.values()) / 400e9)


def test_an_exchange_copies_the_own_part(cluster: Cluster) -> None:
    plain, copying = (only(cluster, "direct", copy_bytes_per_second=rate) for rate in (None, 400e9))
    for kind, copied in (("all_to_all", 1 / 4), ("gather", 0.0), ("send", 0.0)):
        before, after = (Network(one, {"a": 4}).seconds(kind, ("a",), 1e9) for one in (plain, copying))
        assert after - before == pytest.approx(copied * 1e9 / 400e9)


def test_the_links_with_the_most_in_flight_fill_a_pipeline(cluster: Cluster) -> None:
    """A bound for one kind of links bounds nothing where others without a bound are part of the group."""
    changed = only(cluster, "ring", pipelined=True, fill_bytes={"nvlink": 1e3})
    level = replace(changed.level[0], link="nvlink")
    changed = replace(changed, level=(level, changed.level[1]))
    (inside,) = Network(changed, {"a": 4}).curves("all_gather", ("a",))
    (across,) = Network(changed, {"a": 2, "b": 4}).curves("all_gather", ("a", "b"))
    assert inside.fill_seconds == pytest.approx(1e3 / BUS)
    assert across.fill_seconds == float("inf")


def test_without_bandwidth_hops_count(cluster: Cluster) -> None:
    (curve,) = Network(only(cluster, "ring"), {"a": 2, "b": 4}).curves("all_reduce", ("a", "b"))
    # 14 steps in a ring of 8, whose edges are 6 on the buses and 2 on the wire.
    assert curve.latency_seconds == pytest.approx(5e-6 + 14 * (6 / 8 * 2e-6 + 2 / 8 * (10 + 3) * 1e-6))
    (curve,) = Network(only(cluster, "torus"), {"a": 2, "b": 4}).curves("all_reduce", ("a", "b"))
    assert curve.latency_seconds == pytest.approx(5e-6 + 6 * 2e-6 + 2 * (10 + 1) * 1e-6)
    # Inside at most 60 GB/s; of the wire only half carries data; one after the other.
    assert curve.seconds_per_byte == pytest.approx(2 * 3 / 4 / 60e9 + 2 * 1 / 2 / (WIRE / 2))


def test_the_cheapest_algorithm_counts(cluster: Cluster) -> None:
    network = Network(cluster, {"a": 8, "b": 4})
    for size in (1e3, 1e5, 1e7, 1e9):
        curves = network.curves("all_reduce", ("a", "b"))
        assert {curve.algorithm for curve in curves} == {"ring Simple", "torus"}
        assert network.seconds("all_reduce", ("a", "b"), size) == min(curve.seconds(size) for curve in curves)
    assert network.algorithm("all_reduce", ("a", "b"), 1e3) == "torus"  # fewer hops


# -- who shares what --------------------------------------------------------------------------------------------------


def test_groups_of_a_node_share_its_wires(cluster: Cluster) -> None:
    network = Network(cluster, {"dp": 2, "tp": 4})
    (span,) = network.group(("dp",))
    assert (span.units, span.members, span.rate) == (2, 1, WIRE / 4)
    inner, outer = network.group(("dp", "tp"))
    assert (inner.units, inner.rate) == (4, BUS)
    assert (outer.units, outer.members, outer.rate, outer.lone_rate) == (2, 4, WIRE, WIRE / 4)
    # Two devices of each node to a group: half of the wires for each group.
    network = Network(cluster, {"dp": 4, "tp": 2})
    inner, outer = network.group(("dp",))
    assert (inner.units, outer.units, outer.members, outer.rate) == (2, 2, 2, WIRE / 2)


def test_one_device_has_no_more_than_its_own_wires(cluster: Cluster) -> None:
    (span,) = Network(cluster, {"dp": 2}, {"dp": "network"}).group(("dp",))
    assert span.rate == WIRE / 4
    narrow = replace(cluster, level=(cluster.level[0], replace(cluster.level[1], ports=1)))
    (span,) = Network(narrow, {"dp": 2}, {"dp": "network"}).group(("dp",))
    assert span.rate == 25e9, "nobody else is on these nodes"
    (span,) = Network(narrow, {"dp": 2, "tp": 2}, {"dp": "network"}).group(("dp",))
    assert span.rate == 25e9 / 2
    (span,) = Network(narrow, {"dp": 2, "tp": 4}).group(("dp",))
    assert span.rate == 25e9 / 4
    _, outer = Network(narrow, {"dp": 2, "tp": 4}).group(("dp", "tp"))
    assert outer.rate == 25e9


def test_a_backplane_is_shared_by_all(cluster: Cluster) -> None:
    shared = replace(cluster, level=(replace(cluster.level[0], backplane_bytes_per_second=100e9), cluster.level[1]))
    for axes, over in (({"a": 4}, ("a",)), ({"a": 2, "b": 2}, ("a",)), ({"a": 2, "b": 2}, ("b",))):
        (span,) = Network(shared, axes).group(over)
        assert span.rate == 25e9, "a quarter for each of the four"
    (span,) = Network(shared, {"a": 2}).group(("a",))
    assert span.rate == 50e9


def test_wires_between_pairs() -> None:
    cluster = load_cluster("v100")
    link = cluster.level[0].rate_bytes_per_second
    rates = {}
    for ranks in (2, 4, 8):
        (span,) = Network(cluster, {"a": ranks}).group(("a",))
        rates[ranks] = span.rate / link
    assert rates == {2: 1, 4: 4, 8: 6}


@pytest.mark.parametrize(
    ("axes", "over", "spans"),
    [
        ({"a": 4}, ("a",), [4]),
        ({"a": 8}, ("a",), [4, 2]),
        ({"a": 2, "b": 4}, ("a",), [2]),
        ({"a": 2, "b": 4}, ("b",), [4]),
        ({"a": 4, "b": 2}, ("a",), [2, 2]),
        ({"a": 2, "b": 2, "c": 2}, ("a", "c"), [2, 2]),
        ({"a": 2, "b": 2, "c": 2}, ("b", "c"), [4]),
        ({"a": 6}, ("a",), [4, 2]),  # the second node is not full
        ({"a": 1, "b": 1}, ("a", "b"), []),
    ],
)
def test_where_groups_lie(cluster: Cluster, axes: dict[str, int], over: tuple[str, ...], spans: list[int]) -> None:
    assert [span.units for span in Network(cluster, axes).group(over)] == spans


def test_the_mesh_says_where_an_axis_lies(cluster: Cluster) -> None:
    network = network_of(cluster, Mesh("dp=2@network,tp=2"))
    assert [span.level.name for span in network.group(("dp",))] == ["network"]
    assert [span.level.name for span in network.group(("tp",))] == ["node"]
    assert [span.level.name for span in network_of(cluster, Mesh("dp=2,tp=2")).group(("dp",))] == ["node"]
    with pytest.raises(ClusterError, match=r"has no links called 'netwrk', of axis 'dp'; did you mean 'network'\?"):
        network_of(cluster, Mesh("dp=2@netwrk,tp=2"))


def test_what_does_not_fit_or_cannot_be_done(cluster: Cluster) -> None:
    closed = replace(cluster, level=(cluster.level[0], replace(cluster.level[1], units=2)))
    with pytest.raises(ClusterError, match="mesh 'dp=4,tp=4' has 16 devices; cluster 'two-levels' has 8"):
        Network(closed, {"dp": 4, "tp": 4})
    with pytest.raises(ClusterError, match=r"library 'Library'.* has no algorithm for all_to_all over tp"):
        Network(only(cluster, "ring"), {"tp": 4}).seconds("all_to_all", ("tp",), 1.0)


# -- for the search ---------------------------------------------------------------------------------------------------


def test_every_step_of_a_reshard_has_a_price(cluster: Cluster) -> None:
    network = Network(cluster, {"dp": 2, "tp": 4})
    for kind in StepKind:
        price = network.seconds(kind.value, ("tp",), 1e6)
        assert (price == 0.0) == (kind.value in ("slice", "keep_one", "pad"))


def test_the_same_question_is_answered_from_memory(cluster: Cluster) -> None:
    network = Network(cluster, {"dp": 2, "tp": 4})
    assert network.curves("all_reduce", ("dp",)) is network.curves("all_reduce", ("dp",))
    assert network.seconds("all_reduce", ("dp",), 1e6) == network.seconds("all_reduce", ("dp",), 1e6)
