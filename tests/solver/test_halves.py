"""Plans whose micro-batches run as two halves: what the planner believes is what `evaluate` says."""

from __future__ import annotations

import random

import numpy as np
import pytest
from torch import nn

import autopar
from autopar.cost.evaluate import evaluate
from autopar.cost.hardware.cluster import load_cluster
from autopar.cost.lowered_step import lower_step
from autopar.cost.profile import profile
from autopar.ir.graph import NamedGraph
from autopar.mesh import SubMesh
from autopar.sharding.bound_layout import BoundLayout
from autopar.sharding.layout.language import Layout, parse_layout
from autopar.sharding.layout.syntax import MicroBatches
from autopar.sharding.options import TrainingOptions
from autopar.sharding.time_slice import slice_in_time
from autopar.solver.model.build import build, plan_of
from autopar.solver.model.objective import Hinges, Sum
from autopar.solver.setting import MicroBatchedCall, PlanningProblem
from autopar.solver.solve import solve_plan
from examples.gpt import gpt
from tests.solver.test_solve import sums_of

CLUSTER = load_cluster("h100")
AXES = SubMesh.of({"dp": 2, "tp": 2})


@pytest.fixture(scope="module")
def graph() -> NamedGraph:
    model, inputs = gpt(layers=1, d_model=256, heads=4, vocab=512, seq=128, batch=16, device="meta")
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())  # no parameter is converted for two ops
    return autopar.trace(model, inputs)


def problem(graph: NamedGraph, micro: MicroBatches) -> PlanningProblem:
    options = TrainingOptions(micro_batches=micro.count)
    return PlanningProblem.of(slice_in_time(graph, micro), AXES, CLUSTER, options, MicroBatchedCall(graph, micro))


@pytest.mark.parametrize("count", [1, 4])
def test_what_the_planner_believes_is_what_evaluate_adds_up(graph: NamedGraph, count: int) -> None:
    setting = problem(graph, MicroBatches(count, halves=True))
    model = build(setting, BoundLayout(setting.graph, Layout(()), AXES))
    draw, same, beside = random.Random(0), 0, 0.0
    for _ in range(12):
        chosen = [draw.randrange(len(variable.states)) for variable in model.variables]
        plan = setting.whole_plan(plan_of(model, chosen))
        tasks = profile(lower_step(graph, plan), CLUSTER)
        believed, found = model.sums(chosen), sums_of(tasks)
        for key in (Sum.FORWARD_ROOM, Sum.BACKWARD_ROOM):
            assert believed[key] == pytest.approx(found[key], rel=1e-9)
        assert believed[Sum.DEVICE] >= found[Sum.DEVICE] * (1 - 1e-9), "what two ops want is counted twice"
        same += believed[Sum.DEVICE] == pytest.approx(found[Sum.DEVICE], rel=1e-9)
        beside += sum(task.seconds for task in tasks if task.of_halves and task.overlapped)
        sums = sums_of(tasks)
        for ways in (tasks.forward, tasks.backward):
            for key, is_once in ((Sum.HOST, False), (Sum.HOST_ONCE, True)):
                sums[key] += sum(task.host_seconds for task in ways if task.overlapped and task.once == is_once)
        assert Hinges.of(setting).seconds(sums) == pytest.approx(evaluate(graph, plan, CLUSTER).step_seconds, rel=1e-9)
    assert same > 3, "most random decisions share nothing"
    assert beside > 0.0


def test_halves_take_the_work_of_twice_as_many_micro_batches(graph: NamedGraph) -> None:
    """Each half computes and sends what a micro-batch of its size does; parameters are gathered once for both."""
    said = "batch -> dp; (heads, d_ff, vocab) -> tp; * -> none"
    halves, plain = (
        solve_plan(graph, dict(AXES), CLUSTER, layout=parse_layout(f"micro {word}; {said}"), time_limit=3600).costs
        for word in ("2 halves", "4")
    )
    # What depends on no row runs once for both.
    shares = halves.compute.forward_seconds / plain.compute.forward_seconds
    assert 0.9 < shares <= 1.0
    own, other = ([one for one in costs.communication if one.axes == ("tp",)] for costs in (halves, plain))
    for one, two in zip(own, other, strict=True):
        assert (one.kind, one.axes, one.direction) == (two.kind, two.axes, two.direction)
        assert (one.count, one.bytes) == (two.count, pytest.approx(two.bytes))
    assert halves.step_seconds < plain.step_seconds


@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 4}, {"dp": 2, "cp": 2, "tp": 2}])
def test_the_bound_holds(graph: NamedGraph, mesh: dict[str, int]) -> None:
    """No plan of a strategy, and none that was found, takes less than the bound."""
    found = solve_plan(graph, mesh, CLUSTER, layout=parse_layout("micro 2 halves"), time_limit=3600)
    assert found.bound_seconds <= found.costs.step_seconds * (1 + 1e-9)
    assert found.costs == evaluate(graph, found.plan, CLUSTER)
    for text in ("batch -> dp; (heads, d_ff, vocab) -> tp; * -> none", "batch -> dp; * -> none"):
        other = solve_plan(graph, mesh, CLUSTER, layout=parse_layout(f"micro 2 halves; {text}"), time_limit=3600)
        assert found.bound_seconds <= other.costs.step_seconds * (1 + 1e-9)
        assert found.costs.step_seconds <= other.costs.step_seconds * (1 + 1e-9)
    assert np.isfinite(found.bound_seconds)
