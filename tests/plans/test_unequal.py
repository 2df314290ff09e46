"""Plans on unequal devices and links: shares by speed, stages by speed, nothing but gradients over a slow link."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import autopar
from autopar.cost.hardware.cluster import load_cluster
from autopar.errors import LayoutError
from autopar.plans.find import PlanRequest, plan_under_layout
from autopar.plans.unequal import with_speeds
from autopar.sharding.layout.language import parse_layout
from examples.gpt import gpt
from examples.mlp import mlp

EVEN = "batch -> dp; * -> none"


def words(batch: int, **sizes: int) -> tuple[torch.nn.Module, object]:
    model, inputs = gpt(
        **{"layers": 2, "d_model": 1024, "heads": 16, "vocab": 1024, "seq": 512, **sizes}, batch=batch, device="meta"
    )
    return model.to(torch.bfloat16), inputs


def test_a_search_takes_shares_by_speed_itself() -> None:
    model, inputs = mlp(batch=2**20, device="meta")
    plan = autopar.plan(model, "dp=8", inputs, cluster="h100-a100", memory="100TiB", time_limit=4, cache=False)
    even = autopar.plan(model, "dp=8", inputs, layout=EVEN, cluster="h100-a100", memory="100TiB", cache=False)
    shares = plan.decided.axes.shares
    assert shares is not None
    assert even.decided.axes.shares is None
    assert plan.step_seconds < 0.8 * even.step_seconds
    text = plan.summary()
    assert "4 × H100 SXM5 80 GB, 4 × A100 SXM4 80 GB (h100-a100)" in text
    assert "whole samples, with the gradients of one process" in text
    assert "unequal ranks: the slowest ones give the step time" in text
    again = autopar.Plan.read(plan.text, plan.graph)
    assert (again.text, again.step_seconds) == (plan.text, plan.step_seconds)
    assert again.decided.axes.shares == shares
    # Equal devices need no shares.
    alike = autopar.plan(model, "dp=8", inputs, cluster="h100", memory="100TiB", time_limit=4, cache=False)
    assert alike.decided.axes.shares is None
    assert "unequal ranks" not in alike.summary()


@pytest.mark.parametrize("layout", ["micro 4; batch -> dp by 3:1; * -> none", "batch -> dp by 100:1; * -> none"])
def test_a_plan_that_leaves_a_rank_without_samples_is_read_as_it_was_written(layout: str) -> None:
    model, inputs = mlp(batch=8, device="meta")
    plan = autopar.plan(model, "dp=2", inputs, layout=layout, cluster="h100", cache=False)
    assert "batch -> dp by 1:0" in plan.text
    again = autopar.Plan.read(plan.text, plan.graph)
    assert (again.decided, again.costs) == (plan.decided, plan.costs)


def test_stages_have_the_memory_of_their_longest_shards() -> None:
    """The search looks at the fastest ranks, so that its bound is one; its costs are those of all ranks."""
    model, inputs = gpt(batch=16, device="meta")
    layout = "micro 2; pipeline pp ?; batch -> dp by 3:1; * -> none"
    plan = autopar.plan(model, "pp=2,dp=2", inputs, layout=layout, cluster="h100", cache=False)
    assert plan.decided.axes.shares is not None
    assert plan.costs == autopar.evaluate(plan.graph, plan.decided, plan.cluster)


def test_by_speed_becomes_numbers_of_the_cluster() -> None:
    model, inputs = mlp(batch=96, device="meta")
    graph = autopar.trace(model, inputs)
    request = PlanRequest("h100-a100", "100TiB")
    plan = plan_under_layout(graph, autopar.Mesh("dp=2,tp=4"), "batch -> dp by speed; * -> none", request)
    # So few samples wait for the host on both devices.
    assert plan.decided.axes.shares is None
    cluster = load_cluster("h100")
    layout = parse_layout("batch -> dp by speed; * -> none")
    assert str(with_speeds(graph, layout, autopar.Mesh("dp=2").whole, cluster, {})) == "batch -> dp\n* -> none\n"
    mixed, axes = load_cluster("h100-a100"), autopar.Mesh("pod=2,dp=7").whole
    layout = parse_layout("batch -> pod*dp by speed")
    with pytest.raises(LayoutError, match="E4: 'dp' = 7 does not divide"):
        with_speeds(graph, layout, axes, mixed, {})


@pytest.mark.slow
def test_stages_have_work_by_the_speed_of_their_devices() -> None:
    model, inputs = words(256, layers=8, d_model=2048, seq=2048)
    graph = autopar.trace(model, inputs)
    layout = "micro 8; pipeline pp 1f1b; {} batch -> dp; * -> none"
    request = PlanRequest("h100-a100", "100TiB", time_limit=10, cache=False)
    mesh = autopar.Mesh("pp=2,dp=4")
    found = autopar.plan(
        model, "pp=2,dp=4", inputs, layout=layout.format(""), cluster="h100-a100", memory="100TiB", cache=False
    )
    even = plan_under_layout(graph, mesh, layout.format("cut pp before @blocks.4;"), request)
    assert "cut pp before @blocks.4" not in found.text
    assert found.step_seconds < 0.75 * even.step_seconds
    fast, slow = found.costs.stages
    assert slow.busy_seconds == pytest.approx(fast.busy_seconds, rel=0.25)


@pytest.mark.slow
def test_no_activation_crosses_the_slow_link() -> None:
    # So many samples that the second site pays, although gradients take long to get there.
    model, inputs = words(2**18)
    plan = autopar.plan(
        model, "pod=2@wan,tp=8", inputs, cluster="h100-two-sites", memory="1000TiB", time_limit=15, cache=False
    )
    crossing = [one for one in plan.collectives if "pod" in one.axes]
    tensors = plan.graph.tensors
    assert any(tensors[one.tensor].kind == "param" for one in crossing)
    # A loss and the number of its targets are all else.
    assert all(one.bytes <= 16 for one in crossing if tensors[one.tensor].kind != "param")
    # The same plan on a link between sites as fast as that within a site.
    *inner, wan = plan.cluster.level
    fast = replace(wan, ports=8, port_bytes_per_second=inner[-1].port_bytes_per_second, hop_seconds={})
    near = replace(plan.cluster, level=(*inner, fast))
    assert autopar.evaluate(plan.graph, plan.decided, near).step_seconds < plan.step_seconds


@pytest.mark.slow
def test_a_searched_mesh_keeps_activations_within_a_site() -> None:
    """Stages on both sides of the slow link would wait for their messages: at most gradients cross it instead."""
    model, inputs = words(1024, layers=8, d_model=2048, vocab=32000, seq=2048)
    plan = autopar.plan(model, "?", inputs, cluster="h100-two-sites", devices=32, time_limit=120, cache=False)
    assert plan.decided.assignment.pipelining is None
    tensors, levels = plan.graph.tensors, plan.network.group
    crossing = [one for one in plan.collectives if any(span.level.name == "wan" for span in levels(one.axes))]
    assert all(one.bytes <= 16 for one in crossing if tensors[one.tensor].kind != "param")
    over = autopar.plan(
        model,
        "pp=2,dp=8,tp=2",
        inputs,
        layout="micro 16; pipeline pp 1f1b; megatron",
        cluster="h100-two-sites",
        memory="1TiB",
        cache=False,
        time_limit=10,
    )
    assert plan.step_seconds < over.step_seconds
