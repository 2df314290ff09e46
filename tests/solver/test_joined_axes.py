"""Meshes of three axes: neighbouring axes as one first, then each for itself."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar.cost.evaluate import evaluate
from autopar.cost.hardware.cluster import load_cluster
from autopar.ir.graph import NamedGraph
from autopar.mesh import SubMesh
from autopar.sharding.layout.language import parse_layout
from autopar.sharding.options import TrainingOptions
from autopar.solver.published_strategies import strategy_plans
from autopar.solver.search.joined_axes import joined_meshes
from autopar.solver.setting import PlanningProblem
from autopar.solver.solve import solve_plan
from examples.gpt import gpt
from tests.ranks import difference_of

CLUSTER = load_cluster("h100")
AXES = {"pod": 2, "dp": 2, "tp": 2}


@pytest.fixture(scope="module")
def graph() -> NamedGraph:
    model, inputs = gpt(layers=2, d_model=256, heads=8, vocab=512, seq=128, batch=16, device="meta")
    return autopar.trace(model, inputs)


def test_a_plan_of_joined_axes_is_the_same_plan_on_the_mesh_itself(graph: NamedGraph) -> None:
    setting = PlanningProblem.of(graph, SubMesh.of(AXES), CLUSTER, TrainingOptions())
    seen = []
    for joined, merged in joined_meshes(setting):
        seen.append(dict(merged.axes))
        for _, plan in strategy_plans(merged):
            before, after = evaluate(graph, plan, CLUSTER), evaluate(graph, joined.spread(plan), CLUSTER)
            assert after.compute == before.compute
            assert after.memory == before.memory
            assert after.step_seconds == pytest.approx(before.step_seconds)
    assert seen == [{"pod": 2, "dp*tp": 4}, {"pod*dp": 4, "tp": 2}]


def test_axes_on_different_links_are_not_joined(graph: NamedGraph) -> None:
    options = TrainingOptions(links={"pod": "network", "dp": "nvlink", "tp": "nvlink"})
    setting = PlanningProblem.of(graph, SubMesh.of(AXES), CLUSTER, options)
    found = [(dict(merged.axes), dict(merged.options.links)) for _, merged in joined_meshes(setting)]
    assert found == [({"pod": 2, "dp*tp": 4}, {"pod": "network", "dp*tp": "nvlink"})]


@pytest.mark.slow
def test_three_axes_are_no_worse_than_two_of_them_joined(graph: NamedGraph) -> None:
    found = solve_plan(graph, AXES, CLUSTER, strategies=False, time_limit=3600)
    for axes in ({"pod": 2, "t": 4}, {"d": 4, "tp": 2}):
        joined = solve_plan(graph, axes, CLUSTER, strategies=False, time_limit=3600)
        assert found.costs.step_seconds <= joined.costs.step_seconds * (1 + 1e-9)
    assert evaluate(graph, found.plan, CLUSTER).step_seconds == found.costs.step_seconds
    assert 0 < found.bound_seconds < found.costs.step_seconds


def test_a_plan_is_found_however_short_the_time(graph: NamedGraph) -> None:
    free = solve_plan(graph, AXES, CLUSTER, strategies=False, time_limit=1e-3)
    limit = 0.7 * free.costs.memory.peak_bytes
    bound = solve_plan(graph, AXES, CLUSTER, strategies=False, time_limit=1e-3, memory_bytes=limit)
    assert bound.costs.memory.peak_bytes <= limit


def test_what_a_layout_demands_holds_on_three_axes(graph: NamedGraph) -> None:
    layout = parse_layout("act@blocks.* { batch -> pod*dp }\nparam@blocks.*.up.weight { d_ff -> tp }", "test")
    found = solve_plan(graph, AXES, CLUSTER, layout=layout, time_limit=3600)
    assignment = found.plan.assignment
    assert str(assignment.stored["blocks.0.up.weight"]) == "[0 -> tp]"
    assert assignment.values["blocks.1.up/linear"].splits[0] == ("pod", "dp")


def test_a_plan_of_three_axes_computes_what_one_process_does() -> None:
    torch.manual_seed(0)
    model, inputs = gpt(layers=1, d_model=16, heads=4, vocab=32, seq=8, batch=8)
    graph, exact = autopar.trace(model, inputs), autopar.trace(model.double(), inputs)
    plan = solve_plan(graph, AXES, CLUSTER, strategies=False, time_limit=3600).plan
    assert difference_of(exact, plan.assignment, list(inputs.values())) < 1e-9


@pytest.mark.parametrize(
    "axes",
    [{"dp": 2}, pytest.param({"pod": 2, "dp": 2}, marks=pytest.mark.slow), pytest.param(AXES, marks=pytest.mark.slow)],
)
def test_a_plan_that_fits_ends_no_search_under_a_limit(axes: dict[str, int]) -> None:
    """Neither a plan that is known from the beginning nor one of axes that were joined otherwise."""
    graph = autopar.trace(*gpt(layers=4, d_model=256, heads=8, vocab=512, seq=512, batch=64, device="meta"))
    free = solve_plan(graph, axes, CLUSTER, strategies=False, time_limit=3600)
    least, cold = (
        solve_plan(
            graph, axes, CLUSTER, strategies=False, time_limit=3600, memory_bytes=share * free.costs.limited_bytes
        )
        for share in (0.4, 0.7)
    )
    assert free.costs.step_seconds < cold.costs.step_seconds < least.costs.step_seconds * 0.97
    limit, warm = 0.7 * free.costs.limited_bytes, {"known": least.plan}
    found = solve_plan(graph, axes, CLUSTER, strategies=False, time_limit=3600, memory_bytes=limit, warm=warm)
    assert found.costs.step_seconds <= cold.costs.step_seconds * 1.001
    assert found.origin == "search"
