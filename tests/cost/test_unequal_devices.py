"""Unequal devices: which rank has which, and what a step takes on the slowest of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import autopar
from autopar.cost.collective_algorithms import TopologyLevel
from autopar.cost.costs import Costs
from autopar.cost.hardware.cluster import Cluster, load_cluster
from autopar.cost.unequal_devices import devices_of, rank_kinds
from autopar.ir.graph import NamedGraph
from autopar.mesh import Mesh, Shares, SubMesh
from autopar.plans.unequal import with_speeds
from autopar.sharding.layout.language import parse_layout
from autopar.sharding.time_slice import propagate_plan
from examples.gpt import gpt
from tests.cost.test_cluster_parts import PART, written

BATCH = 256


def traced(batch: int = BATCH) -> NamedGraph:
    model, inputs = gpt(layers=2, d_model=1024, heads=16, vocab=1024, seq=512, batch=batch, device="meta")
    return autopar.trace(model.to(torch.bfloat16), inputs)


@pytest.fixture(scope="module")
def graph() -> NamedGraph:
    return traced()


@pytest.fixture(scope="module")
def mixed() -> Cluster:
    return load_cluster("h100-a100")


def price(graph: NamedGraph, layout: str, axes: SubMesh, cluster: Cluster) -> Costs:
    return autopar.evaluate(graph, propagate_plan(graph, parse_layout(layout), axes), cluster)


def test_the_first_units_of_the_level_are_the_parts(tmp_path: Path, mixed: Cluster) -> None:
    assert [part for part, _ in devices_of(mixed, Mesh("dp=3,tp=4").whole, {})] == ["h100s"] * 4 + [""] * 8
    # A mesh within the first node has its devices alone.
    (kind,) = rank_kinds(mixed, Mesh("dp=4").whole, {})
    assert (kind.part, kind.device.name) == ("h100s", "H100 SXM5 80 GB")
    # Two old devices, a warm one and a plain one in each node of four.
    nodes = load_cluster(written(tmp_path, PART))
    assert [part for part, _ in devices_of(nodes, Mesh("dp=8").whole, {})] == ["old", "old", "warm", ""] * 2
    _, _, (_, warm), (_, plain), *_ = devices_of(nodes, Mesh("dp=8").whole, {})
    assert warm == plain.at_speed(0.5)


def test_an_axis_that_is_put_on_a_level_crosses_its_parts(mixed: Cluster) -> None:
    mesh = Mesh("tp=2,pod=2@network")
    found = devices_of(mixed, mesh.whole, mesh.links)
    assert [part for part, _ in found] == ["h100s", "", "h100s", ""]


def test_ranks_of_one_device_and_one_share_are_one_kind(mixed: Cluster) -> None:
    axes = Mesh("dp=8").whole.with_shares(Shares("batch", (("dp", (3, 3, 3, 2, 1, 1, 1, 1)),)))
    found = rank_kinds(mixed, axes, {})
    assert [(one.part, one.ranks, one.coordinate["dp"]) for one in found] == [
        ("h100s", 3, 0),
        ("h100s", 1, 3),
        ("", 4, 4),
    ]
    assert sum(one.ranks * one.samples for one in found) == pytest.approx(8)


def test_shares_by_speed_gain_nearly_what_they_can(graph: NamedGraph, mixed: Cluster) -> None:
    axes = Mesh("dp=8").whole
    even = price(graph, "batch -> dp; * -> none", axes, mixed)
    fast, slow = even.kinds
    assert even.step_seconds == max(fast.step_seconds, slow.step_seconds) == slow.step_seconds
    numbers = with_speeds(graph, parse_layout("batch -> dp by speed; * -> none"), axes, mixed, {})
    shared = price(graph, str(numbers), axes, mixed)
    # With pieces of any size all ranks would end at once.
    ideal = (1 + slow.compute_seconds / fast.compute_seconds) / 2
    assert ideal > 1.7
    assert even.step_seconds / shared.step_seconds == pytest.approx(ideal, rel=0.05)
    assert shared.kinds[0].kind.samples > 1.3


def test_a_share_takes_as_long_as_in_an_even_batch_of_such_shares(graph: NamedGraph, mixed: Cluster) -> None:
    axes = Mesh("dp=8").whole
    shared = price(graph, "batch -> dp by 48:48:48:48:16:16:16:16; * -> none", axes, mixed)
    for (_, device), number, kind in zip(devices_of(mixed, axes, {})[::4], (48, 16), shared.kinds, strict=True):
        alike = price(traced(8 * number), "batch -> dp; * -> none", axes, mixed.with_device(device))
        assert kind.compute_seconds == pytest.approx(alike.compute.seconds, rel=1e-9)
        assert kind.peak_bytes == pytest.approx(alike.memory.peak_bytes, rel=0.005)  # every rank has the whole inputs


def test_a_smaller_card_limits_its_own_share_alone(graph: NamedGraph, mixed: Cluster) -> None:
    (part,) = mixed.part
    axes = Mesh("dp=8").whole
    small = replace(part, device=replace(part.device, memory_bytes=mixed.device.memory_bytes / 8))
    cluster = replace(mixed, part=(small,))
    even = price(graph, "batch -> dp; * -> none", axes, cluster)
    assert even.memory_fraction == 1 / 8
    assert even.limited_bytes == 8 * even.memory.peak_bytes
    # With a sixteenth of the samples the small cards need less than an eighth of the others.
    shared = price(graph, "batch -> dp by 1:1:1:1:15:15:15:15; * -> none", axes, cluster)
    assert shared.kinds[0].peak_bytes < shared.kinds[1].peak_bytes / 4
    assert shared.limited_bytes < even.limited_bytes


def test_a_slower_part_is_the_device_at_that_speed(graph: NamedGraph, tmp_path: Path) -> None:
    cluster = load_cluster("h100")
    slow = replace(load_cluster("h100-a100").part[0], name="warm", device=cluster.device, speed_fraction=0.5)
    axes = Mesh("dp=16").whole
    layout = "batch -> dp; * -> none"
    found = price(graph, layout, axes, replace(cluster, part=(slow,)))
    plain = price(graph, layout, axes, cluster)
    # The first unit of the network is a node, the second one has the devices of the cluster.
    assert [one.kind.part for one in found.kinds] == ["warm", ""]
    assert found.kinds[1].compute_seconds == plain.compute.seconds
    assert found.compute.seconds == pytest.approx(2 * plain.compute.seconds, rel=1e-3)
    assert plain.kinds == ()


def test_a_part_with_slower_links_sends_slower(graph: NamedGraph, mixed: Cluster) -> None:
    """Messages inside its nodes take longer for its own ranks, messages between nodes for all."""
    (part,), (inside, between) = mixed.part, mixed.level
    axes = Mesh("dp=2,tp=4").whole

    def times(layout: str, *links: TopologyLevel) -> list[float]:
        cluster = replace(mixed, part=(replace(part, device=mixed.device, links=links),))
        return [one.step_seconds for one in price(graph, layout, axes, cluster).kinds]

    slow = [replace(one, achieved_bytes_per_second=one.rate_bytes_per_second / 4) for one in (inside, between)]
    inner, outer = "batch -> dp; (heads, d_ff) -> tp; * -> none", "batch -> dp*tp; * -> none"
    own, others = times(inner, slow[0])
    assert others == times(inner)[1]
    assert own > 1.2 * others
    own, others = times(outer, slow[1])
    assert own == others
    assert own > times(outer)[1]


def test_a_stage_is_priced_on_its_own_devices(mixed: Cluster) -> None:
    graph = traced(64)
    axes = Mesh("pp=2,dp=4").whole
    layout = "micro 4; pipeline pp 1f1b; cut pp before @blocks.1; batch -> dp; * -> none"
    both = price(graph, layout, axes, mixed)
    for stage, part in enumerate((mixed.part[0].device, mixed.device)):
        alone = price(graph, layout, axes, mixed.with_device(part))
        assert both.stages[stage].forward_seconds == alone.stages[stage].forward_seconds
    assert both.stages[0].forward_seconds != both.stages[1].forward_seconds
