"""What a device waits for: its host, and the processors that communication takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar
from autopar.cost.evaluate import OverlapCost, evaluate
from autopar.cost.hardware.cluster import cluster_names, load_cluster
from autopar.cost.lowered_step import LoweredStep
from autopar.cost.profile import profile
from autopar.ir.graph import NamedGraph
from autopar.sharding.assignment import StepPlan
from autopar.sharding.layout.language import choose_layout
from autopar.sharding.options import TrainingOptions
from autopar.sharding.time_slice import propagate_plan

CLUSTER = load_cluster("h100")
AXES = {"dp": 2}


def graph_of(rows: int) -> NamedGraph:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64))
        inputs = (torch.zeros(rows, 64),)
    return autopar.trace(model, inputs)


def plan_of(graph: NamedGraph) -> StepPlan:
    return propagate_plan(graph, choose_layout("ddp", AXES), AXES)


def test_a_small_eager_step_waits_for_its_host() -> None:
    graph = graph_of(8)
    costs = evaluate(graph, plan_of(graph), CLUSTER)
    assert costs.waiting_seconds > 0
    device, host = CLUSTER.device, CLUSTER.device.host_seconds
    # Four ops forward; backward, two products for a linear and one pass for its bias, one each for GELU and norm.
    # The copy of the gradients into their bucket is one more.
    launched = 4 + (2 + 1) + 1 + 1 + (1 + 1) + 1
    found = profile(LoweredStep(graph, plan_of(graph)), CLUSTER)
    computed = [task for task in (*found.forward, *found.backward) if task.kind == "compute"]
    assert sum(task.host_seconds for task in computed) == pytest.approx(launched * host)
    slower = replace(CLUSTER, device=replace(device, host_seconds=2 * host))
    assert evaluate(graph, plan_of(graph), slower).step_seconds > 1.7 * costs.step_seconds


def test_a_large_step_does_not_wait() -> None:
    graph = graph_of(2**24)
    assert evaluate(graph, plan_of(graph), CLUSTER).waiting_seconds == 0


def test_a_compiled_step_waits_less() -> None:
    graph = graph_of(8)
    compiled = plan_of(graph).with_options(TrainingOptions(compiled=True))
    assert evaluate(graph, compiled, CLUSTER).step_seconds < 0.5 * evaluate(graph, plan_of(graph), CLUSTER).step_seconds


def test_gradients_of_micro_batches_are_added_up() -> None:
    graph = graph_of(8)
    tasks = profile(LoweredStep(graph, plan_of(graph).with_options(TrainingOptions(micro_batches=4))), CLUSTER).backward
    added = {task.name: task.bytes for task in tasks if ".grad +=" in task.name}
    assert len(added) == len(graph.parameters)
    assert added["0.weight.grad +="] == 64 * 64 * 4 * 3
    assert not any(".grad +=" in task.name for task in profile(LoweredStep(graph, plan_of(graph)), CLUSTER).backward)


def test_overlapped_communication_takes_processors() -> None:
    share, overlap = CLUSTER.library.processors / 132, OverlapCost.of(CLUSTER)
    assert overlap.seconds(1.0, 4.0) == pytest.approx(share)
    assert overlap.seconds(3.0, 2.0) == pytest.approx(1.0 + 2 * share)
    assert overlap.seconds(0.0, 2.0) == 0


@pytest.mark.parametrize(("sent", "compute"), [(0.0, 1.0), (0.5, 1.0), (1.0, 1.0), (3.0, 1.0), (2.0, 0.0)])
def test_the_overlap_is_a_linear_part_and_a_hinge(sent: float, compute: float) -> None:
    """The solver's objective uses this form."""
    overlap = OverlapCost(overlap_fraction=0.8, occupied=0.25)
    hinge = max(0.0, sent - overlap.overlap_fraction * compute)
    assert overlap.seconds(sent, compute) == pytest.approx(overlap.occupied * sent + (1 - overlap.occupied) * hinge)


def test_a_device_that_is_long_busy_is_slower() -> None:
    graph = graph_of(2**24)
    fresh = replace(CLUSTER, device=replace(CLUSTER.device, sustained_fraction=1.0))
    assert evaluate(graph, plan_of(graph), fresh).step_seconds < evaluate(graph, plan_of(graph), CLUSTER).step_seconds


@pytest.mark.parametrize("name", [name for name in cluster_names() if name != "local-cpu"])
def test_clusters_of_gpus_say_what_their_hosts_take(name: str) -> None:
    cluster = load_cluster(name)
    assert 0 < cluster.device.launch_seconds < cluster.device.host_seconds < 1e-4
    assert all(cluster.library.host_seconds[kind] > 0 for kind in ("all_reduce", "all_gather", "reduce_scatter"))
    assert cluster.library.processors > 0
