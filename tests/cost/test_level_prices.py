"""All-reduces by level: when the links choose them, what they cost, and how a plan says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from autopar.cost.hardware.cluster import Cluster, load_cluster
from autopar.cost.level_prices import WORTH, cheapest_ways, seconds_by_level
from autopar.cost.network import Network
from autopar.sharding.level_sums import LevelPhase, LevelSum, LevelSums

SLOW_NETWORK = Path(__file__).with_name("slow_network.toml")


@pytest.fixture
def cluster() -> Cluster:
    return load_cluster(SLOW_NETWORK)


def test_a_slow_network_is_chosen_by_cost(cluster: Cluster) -> None:
    network = Network(cluster, {"pod": 2, "dp": 2})
    (one,) = network.level_sums(("pod", "dp"))
    assert one.groups == (("dp",), ("pod",))
    assert one.most_bytes == inf
    size = 1e9
    whole = network.library_seconds("all_reduce", ("pod", "dp"), size)
    phases = [
        network.library_seconds("reduce_scatter", ("dp",), size),
        network.library_seconds("all_reduce", ("pod",), size / 2),
        network.library_seconds("all_gather", ("dp",), size),
    ]
    # One ring sends 3/2 of the buffer over one wire; by level each rank sends 1/2 of it over its own.
    assert network.seconds("all_reduce", ("pod", "dp"), size) == sum(phases)
    assert whole == pytest.approx(1.5, rel=1e-3)
    assert sum(phases) == pytest.approx(0.5 + 2 * 0.5 / 50, rel=1e-3)
    # Below the least size one collective is taken, and priced.
    small = one.least_bytes / 2
    assert network.by_level(("pod", "dp"), small) is None
    assert network.seconds("all_reduce", ("pod", "dp"), small) == network.library_seconds(
        "all_reduce", ("pod", "dp"), small
    )


def test_the_axes_on_fast_links_are_scattered(cluster: Cluster) -> None:
    for axes, links in (({"dp": 2, "pod": 2}, {"pod": "network"}), ({"dp": 2, "pod": 2}, {"dp": "network"})):
        (one,) = Network(cluster, axes, links).level_sums(("dp", "pod"))
        assert one.groups[-1] == tuple(links)


def test_more_axes_are_scattered_in_turn(cluster: Cluster) -> None:
    node, network = cluster.level
    racks = replace(network, name="racks", units=4, port_bytes_per_second=5e9)
    deep = replace(cluster, level=(node, racks, replace(network, port_bytes_per_second=0.2e9)))
    priced = Network(deep, {"site": 2, "pod": 4, "dp": 2})
    ways = priced.level_sums(("site", "pod", "dp"))
    assert ways[-1].groups == (("dp",), ("pod",), ("site",))
    kinds = [(phase.kind, phase.axes, phase.share) for phase in ways[-1].phases(priced.axes)]
    assert kinds == [
        ("reduce_scatter", ("dp",), 1.0),
        ("reduce_scatter", ("pod",), 0.5),
        ("all_reduce", ("site",), 0.125),
        ("all_gather", ("pod",), 0.5),
        ("all_gather", ("dp",), 1.0),
    ]


def halves(whole: float) -> Callable[[str, tuple[str, ...], float], float]:
    """Prices on two axes of 2: a byte takes 1 s in one collective, and `whole` by level."""
    shares = {"reduce_scatter": 0.25, "all_gather": 0.25, "all_reduce": 1.0}
    return lambda kind, axes, size: size * (1.0 if len(axes) == 2 else whole * shares[kind])


def test_a_small_gain_is_not_taken() -> None:
    sizes = {"a": 2, "b": 2}
    assert cheapest_ways(["a", "b"], sizes, halves(WORTH + 0.01), {}) == ()
    assert len(cheapest_ways(["a", "b"], sizes, halves(WORTH - 0.01), {})) == 1


def test_the_launches_of_the_host_must_be_won_back() -> None:
    sizes, host = {"a": 2, "b": 2}, dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather"), 1e4)
    price = halves(0.5)
    (one,) = cheapest_ways(["a", "b"], sizes, price, host)
    assert one.least_bytes == 65536  # two launches more: 2e4 s, of the 0.4 s that a byte saves
    assert seconds_by_level(one, sizes, price, 8.0) == pytest.approx(4.0)


def test_nothing_is_done_by_level_on_one_axis_or_equal_links(cluster: Cluster) -> None:
    network = Network(cluster, {"pod": 1, "dp": 2})
    assert network.level_sums(("pod", "dp")) == ()
    assert network.level_sums(("dp",)) == ()
    assert Network(load_cluster("h100"), {"dp": 4, "tp": 2}).by_level(("dp", "tp"), 1e8) is None


def test_a_plan_reads_what_it_prints() -> None:
    sums = LevelSums((LevelSum((("tp",), ("pod", "dp")), 1024.0), LevelSum((("dp",), ("pod",)), 65536.0, 131071.0)))
    assert str(sums) == "tp, pod*dp from 1024; dp, pod from 65536 to 131071"
    assert LevelSums.parse(str(sums)) == sums
    assert LevelSums.parse("") == LevelSums()
    assert [one.groups for one in sums.over(["pod", "dp"])] == [(("dp",), ("pod",))]
    assert next(sums.found[1].phases({"dp": 2, "pod": 2})) == LevelPhase("reduce_scatter", ("dp",), 1.0)
    for wrong in ("dp", "dp, pod from many", "from 5", "dp; pod from 1"):
        with pytest.raises(ValueError, match="expected axes and bytes"):
            LevelSums.parse(wrong)
