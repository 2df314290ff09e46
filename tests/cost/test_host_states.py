"""Price of optimizer states on the host: time over the link, memory of the device and of the host."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

import autopar
from autopar.cost.evaluate import evaluate
from autopar.cost.hardware.cluster import load_cluster
from autopar.errors import AutoparError, ClusterError
from autopar.ir.graph import NamedGraph
from autopar.sharding.assignment import StepPlan
from autopar.sharding.layout.language import choose_layout
from autopar.sharding.options import TrainingOptions
from autopar.sharding.time_slice import propagate_plan
from autopar.solver.infeasible import NoFeasiblePlan
from autopar.solver.solve import solve_plan
from examples.gpt import gpt

H100 = load_cluster("h100")
HOSTED = TrainingOptions(offload_states=True)


@pytest.fixture(scope="module")
def graph() -> NamedGraph:
    return autopar.trace(*gpt(batch=8, seq=64, d_model=512, heads=8, vocab=1024, layers=2, device="meta"))


def count_of(graph: NamedGraph) -> int:
    return sum(prod(tensor.shape) for tensor in graph.parameters)


def plan_of(graph: NamedGraph, options: TrainingOptions = HOSTED) -> StepPlan:
    return propagate_plan(graph, choose_layout("zero1", {"dp": 2}), {"dp": 2}).with_options(options)


def test_states_leave_the_device(graph: NamedGraph) -> None:
    usual, hosted = evaluate(graph, plan_of(graph, TrainingOptions()), H100), evaluate(graph, plan_of(graph), H100)
    assert usual.memory.optimizer_bytes == hosted.memory.host_bytes == pytest.approx(4 * count_of(graph), rel=0.01)
    assert hosted.memory.optimizer_bytes == usual.memory.host_bytes == 0
    saved = usual.memory.peak_bytes - hosted.memory.peak_bytes
    assert 0 < saved <= usual.memory.optimizer_bytes
    tight = replace(H100, device=replace(H100.device, host_memory_bytes=hosted.memory.host_bytes - 1))
    assert not evaluate(graph, plan_of(graph), tight).fits_host


def test_the_slower_of_step_and_link_counts(graph: NamedGraph) -> None:
    usual = evaluate(graph, plan_of(graph, TrainingOptions()), H100).compute.optimizer_seconds
    for rate in (1e9, 1e10, 1e15):
        linked = replace(H100, device=replace(H100.device, host_link_bytes_per_second=rate))
        found = evaluate(graph, plan_of(graph), linked)
        copies = found.memory.host_bytes / rate
        # A step has a launch besides.
        assert found.compute.optimizer_seconds == pytest.approx(max(copies, usual), rel=0.02)


def test_a_step_is_priced_at_its_own_rate(graph: NamedGraph) -> None:
    """AdamW reads parameter, gradient and two states, and writes all but the gradient; the search prices the same."""
    plan = plan_of(graph, TrainingOptions())
    for rate in (None, 1e9):
        cluster = replace(H100, device=replace(H100.device, optimizer_bytes_per_second=rate))
        bytes_moved = 7 * 4 * count_of(graph) / 2
        seconds = bytes_moved / (rate or H100.device.stream)
        found = evaluate(graph, plan, cluster).compute.optimizer_seconds
        assert found == pytest.approx(
            max(seconds + cluster.device.start_seconds, cluster.device.launch_seconds), rel=0.02
        )
        solved = solve_plan(graph, {"dp": 1}, cluster, memory_bytes=1e12, time_limit=60)
        # Of one plan, so the bound is its price by the tables of the search.
        assert solved.bound_seconds == pytest.approx(solved.costs.step_seconds, rel=0.02)


def test_a_search_fits_more(graph: NamedGraph) -> None:
    # Parameters, gradients and states take 16 bytes a parameter, those on the device alone eight.
    limit = 15.5 * count_of(graph)
    with pytest.raises(NoFeasiblePlan):
        solve_plan(graph, {"dp": 1}, H100, memory_bytes=limit, time_limit=60)
    found = solve_plan(graph, {"dp": 1}, H100, memory_bytes=limit, options=HOSTED, time_limit=60)
    assert found.costs.memory.peak_bytes <= limit
    assert found.costs.memory.host_bytes == 8 * count_of(graph)
    assert found.bound_seconds <= found.costs.step_seconds


def test_refusals(graph: NamedGraph) -> None:
    unlinked = replace(H100, device=replace(H100.device, host_link_bytes_per_second=None))
    with pytest.raises(ClusterError, match="as states of the optimizer are offloaded") as error:
        evaluate(graph, plan_of(graph), unlinked)
    assert "leave offload_states out" in str(error.value)
    model, inputs = gpt(batch=4, seq=8, d_model=16, heads=2, vocab=16, layers=1)
    with pytest.raises(AutoparError, match="states of the optimizer 'adafactor' on the host"):
        autopar.plan(model, "dp=2", inputs, cluster="h100", optimizer="adafactor", offload_states=True, cache=False)
