"""Layers whose saved tensors go to the host: their price, and where a search takes them."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import autopar
from autopar.cost.evaluate import evaluate
from autopar.cost.hardware.cluster import Cluster, load_cluster
from autopar.cost.lowered_step import lower_step
from autopar.cost.profile import profile
from autopar.cost.timeline import COPIES, timeline
from autopar.errors import ClusterError
from autopar.ir.graph import NamedGraph
from autopar.mesh import SubMesh
from autopar.sharding.assignment import StepPlan
from autopar.sharding.bound_layout import BoundLayout
from autopar.sharding.layout.language import Layout, parse_layout
from autopar.sharding.options import TrainingOptions
from autopar.sharding.time_slice import propagate_plan
from autopar.solver.infeasible import NoFeasiblePlan
from autopar.solver.model.build import build, plan_of
from autopar.solver.model.objective import Sum
from autopar.solver.model.recompute_variables import STATES, mode_counts
from autopar.solver.setting import PlanningProblem
from autopar.solver.solve import solve_plan
from examples.gpt import gpt

H100 = load_cluster("h100")


def with_link(rate: float | None, memory: float = math.inf) -> Cluster:
    device = replace(H100.device, host_link_bytes_per_second=rate, host_memory_bytes=memory)
    return replace(H100, device=device)


@pytest.fixture(scope="module")
def graph() -> NamedGraph:
    """Return a model whose layers are dear: long rows, of which attention takes most."""
    model, inputs = gpt(batch=2, seq=16384, d_model=2048, heads=16, vocab=1024, layers=4, device="meta")
    return autopar.trace(model.to(torch.bfloat16), inputs)


def offloaded(graph: NamedGraph) -> StepPlan:
    return propagate_plan(graph, parse_layout("batch -> dp; * -> none; recompute offload @blocks.*"), {"dp": 2})


def test_copies_are_hidden_or_added(graph: NamedGraph) -> None:
    plan = offloaded(graph)
    without = evaluate(graph, plan.with_recompute({}), H100)
    fast, slow = evaluate(graph, plan, with_link(1e13)), evaluate(graph, plan, with_link(1e9))
    copies = profile(lower_step(graph, plan), with_link(1e9)).copies
    assert len(copies) == 4
    assert sum(one.bytes for one in copies) == fast.memory.host_bytes
    assert fast.copies_seconds == 0.0
    assert fast.step_seconds == without.step_seconds
    beside = sum(one.forward_room + one.backward_room for one in copies)
    assert slow.copies_seconds == pytest.approx(2 * fast.memory.host_bytes / 1e9 - beside)
    assert slow.step_seconds == pytest.approx(without.step_seconds + slow.copies_seconds)
    assert fast.memory.peak_bytes < without.memory.peak_bytes


def test_a_timeline_shows_the_copies(graph: NamedGraph) -> None:
    plan = offloaded(graph)
    found = timeline(graph, plan, with_link(450e9))
    events = [event for event in found.events if event.stream == COPIES]
    there = [event.task.name for event in events if event.task.direction == "forward"]
    back = [event.task.name for event in events if event.task.direction == "backward"]
    assert there == [f"offloaded layer {number}" for number in range(4)]
    assert back == [f"offloaded layer {number}" for number in (2, 1, 0)], "the last layer is still on the device"
    assert all(one.end_seconds <= other.start_seconds for one, other in pairwise(events))
    slow = timeline(graph, plan, with_link(1e9))
    assert slow.seconds > found.seconds
    assert found.to_json()["traceEvents"][3]["args"]["name"] == COPIES


def test_an_unknown_link_is_an_error_with_a_fix(graph: NamedGraph) -> None:
    with pytest.raises(ClusterError, match="unknown link of a device to its host") as error:
        evaluate(graph, offloaded(graph), with_link(None))
    assert "fix: add a line as 'host_link" in str(error.value)


def test_a_mode_of_a_layer_costs_what_it_costs_where_it_is_settled() -> None:
    """Also of what one layer makes and the next one saves; all copies and all room of `evaluate` are counted."""
    model, inputs = gpt(batch=16, seq=64, d_model=64, heads=4, vocab=64, layers=3, device="meta")
    graph, cluster, axes = autopar.trace(model, inputs), with_link(450e9), SubMesh({"dp": 2})
    setting = PlanningProblem.of(graph, axes, cluster, TrainingOptions())
    layers, draw, layout = tuple(graph.ops_of_layers), random.Random(0), BoundLayout(graph, Layout(()), axes)
    assert setting.modes == STATES
    found = build(setting, layout, regather=True, open_layers=layers)
    for number in range(6):
        modes = [draw.choice(STATES) if number else "offload" for _ in layers]
        chosen = [draw.randrange(len(variable.states)) for variable in found.variables]
        for path, mode in zip(layers, modes, strict=True):
            chosen[found.place["recompute", path]] = STATES.index(mode)
        settled = build(setting, layout, regather=True, recompute=dict(zip(layers, modes, strict=True)))
        sums = found.sums(chosen)
        rest = settled.sums([chosen[found.place[variable.kind, variable.name]] for variable in settled.variables])
        copies = profile(lower_step(graph, plan_of(found, chosen)), cluster).copies
        for key in (Sum.COPIES, Sum.COPIES_FORWARD_ROOM, Sum.COPIES_BACKWARD_ROOM, Sum.DEVICE):
            assert sums[key] == pytest.approx(rest[key])
        assert sums[Sum.COPIES_FORWARD_ROOM] == pytest.approx(sum(one.forward_room for one in copies))
        assert sums[Sum.COPIES_BACKWARD_ROOM] == pytest.approx(sum(one.backward_room for one in copies))
        # A value that two ops take in one sharding counts for each of them.
        assert sums[Sum.COPIES] >= sum(one.seconds for one in copies) * (1 - 1e-9)
        assert bool(sums[Sum.COPIES]) == ("offload" in modes)


def test_a_fast_link_is_taken_and_a_slow_one_is_not(graph: NamedGraph) -> None:
    free = solve_plan(graph, {"dp": 2}, H100, time_limit=3600)
    limit = 0.75 * free.costs.memory.peak_bytes

    def under(cluster: Cluster) -> tuple[float, set[str]]:
        found = solve_plan(graph, {"dp": 2}, cluster, memory_bytes=limit, strategies=False, time_limit=3600)
        assert found.costs.memory.peak_bytes <= limit
        assert found.bound_seconds <= found.costs.step_seconds
        return found.costs.step_seconds, set(found.plan.recompute.values())

    fast, modes = under(with_link(450e9))
    slow, others = under(with_link(2e9))
    assert modes == {"offload"}
    assert others
    assert "offload" not in others
    assert free.costs.step_seconds <= fast < slow
    _, full = under(with_link(450e9, memory=1e6))
    assert "offload" not in full, "the host has no memory for it"
    with pytest.raises(NoFeasiblePlan):
        solve_plan(graph, {"dp": 2}, with_link(450e9), memory_bytes=1e6, strategies=False, time_limit=3600)


def test_counts_of_modes() -> None:
    assert mode_counts(1, 3) == [(1, 0, 0), (0, 0, 1), (0, 1, 0)]
    found = mode_counts(3, 4)
    assert len(set(found)) == len(found) == 10 + 3 * 3 - 2
    assert all(sum(one) == 3 for one in found)
