"""Price of weights that the first rank alone has."""

from __future__ import annotations

from math import prod

import pytest

import autopar
from autopar.cost.network import Network
from autopar.ir.graph import NamedGraph
from autopar.mesh import Mesh
from autopar.plans.find import PlanRequest, plan_under_layout
from autopar.plans.plan import Plan
from examples.gpt import gpt


@pytest.fixture(scope="module")
def graph() -> NamedGraph:
    return autopar.trace(*gpt(layers=2, d_model=64, heads=4, vocab=64, seq=16, batch=8, device="meta"))


def plan_of(graph: NamedGraph, mesh: str, layout: str) -> Plan:
    return plan_under_layout(graph, Mesh(mesh), layout, PlanRequest("h100"))


def sizes(graph: NamedGraph) -> list[float]:
    return [4.0 * prod(one.shape) for one in graph.tensors.values() if one.kind == "param"]


def test_whole_parameters_are_broadcast(graph: NamedGraph) -> None:
    plan = plan_of(graph, "dp=8", "ddp")
    network = Network(plan.cluster, Mesh("dp=8").whole)
    assert plan.loading.whole_bytes == sum(sizes(graph))
    expected = sum(network.seconds("broadcast", ("dp",), size) for size in sizes(graph))
    assert plan.loading.scatter_seconds == pytest.approx(expected)
    assert plan.loading.gather_seconds == 0, "the first rank has them"


def test_split_parameters_are_scattered_and_gathered(graph: NamedGraph) -> None:
    plan = plan_of(graph, "dp=8", "batch -> dp; * -> none; param, grad, opt { * -> dp | none }")
    network = Network(plan.cluster, Mesh("dp=8").whole)
    for kind, found in (("scatter", plan.loading.scatter_seconds), ("gather", plan.loading.gather_seconds)):
        assert found == pytest.approx(sum(network.seconds(kind, ("dp",), size) for size in sizes(graph)))


def test_copies_get_their_pieces_from_the_first_rank_that_has_them(graph: NamedGraph) -> None:
    """Along one axis pieces are scattered, along the other one each is broadcast."""
    plan = plan_of(graph, "dp=2,tp=4", "batch -> dp; * -> none; param, grad, opt { * -> tp | none }")
    network = Network(plan.cluster, Mesh("dp=2,tp=4").whole)
    expected = sum(
        network.seconds("scatter", ("tp",), size) + network.seconds("broadcast", ("dp",), size / 4)
        for size in sizes(graph)
    )
    assert plan.loading.scatter_seconds == pytest.approx(expected)


def test_a_stage_gets_its_parameters_alone(graph: NamedGraph) -> None:
    plan = plan_of(graph, "pp=2,dp=4", "micro 2; pipeline pp 1f1b; batch -> dp; * -> none")
    network = Network(plan.cluster, Mesh("pp=2,dp=4").whole)
    expected = sum(
        network.seconds("scatter", ("pp",), size) + network.seconds("broadcast", ("dp",), size) for size in sizes(graph)
    )
    assert plan.loading.scatter_seconds == pytest.approx(expected)
    assert 0 < plan.loading.gather_seconds < plan.loading.scatter_seconds


def test_plans_say_it_as_data(graph: NamedGraph) -> None:
    plan = plan_of(graph, "dp=2", "ddp")
    assert plan.to_json()["loading"]["scatter_seconds"] == plan.loading.scatter_seconds
