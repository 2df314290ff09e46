"""Shapes of meshes for long sequences: ranks that split the sequence have an axis of their own."""

from __future__ import annotations

import math
from functools import cache

import pytest

import autopar
from autopar.cost.evaluate import evaluate
from autopar.cost.hardware.cluster import load_cluster
from autopar.ir.graph import NamedGraph
from autopar.mesh import Mesh
from autopar.plans.find import PlanRequest, plan_graph
from autopar.plans.folded import fold_that_pays
from autopar.plans.open_mesh import meshes_of
from autopar.sharding.layout.syntax import MicroBatches
from autopar.sharding.options import TrainingOptions
from autopar.sharding.time_slice import slice_in_time
from autopar.solver import short_plans
from autopar.solver.mesh_shape import Shape
from autopar.solver.search.joined_axes import kind_of
from autopar.solver.shapes import ShapeSearch
from autopar.solver.staged_plan import StagedPlan, with_bound
from examples.gpt import gpt

H100 = load_cluster("h100")


@cache
def traced(seq: int = 16384) -> NamedGraph:
    return autopar.trace(*gpt(layers=8, d_model=1024, heads=8, vocab=8192, seq=seq, batch=4, device="meta"))


def folded() -> NamedGraph:
    found = fold_that_pays(traced(), "loss")
    assert found is not None
    return found


def search_of(graph: NamedGraph, devices: int, limit: float = 40 * 2**30) -> ShapeSearch:
    found = ShapeSearch.of(graph, H100, TrainingOptions("loss"), devices, limit, math.inf)
    assert found is not None
    return found


def test_a_folded_sequence_has_ranks_of_its_own() -> None:
    assert {shape.context for shape in search_of(traced(), 64).space} == {1}
    every = list(search_of(folded(), 64).space)
    assert {shape.context for shape in every} == {1, 2, 4, 8, 16, 32, 64}
    assert all(math.prod(shape.mesh.values()) == 64 for shape in every)
    assert list(Shape(2, 2, 4, 2, 1, context=4).mesh.items()) == [("pp", 2), ("dp", 2), ("cp", 4), ("tp", 4)]


def test_ranks_of_a_sequence_split_nothing_else() -> None:
    short, micro = search_of(folded(), 16).short, MicroBatches(4)
    sliced = slice_in_time(short.graph, micro)
    roles = short_plans._roles(short, sliced, micro, has_experts=False)
    assert roles is not None
    linear = [node for node in sliced.nodes if node.name.startswith("blocks.") and "linear" in node.name]
    for node in linear:
        (site,) = roles.sites[kind_of(node)]["cp"]
        assert node.atoms[site[0]][site[1]] == 16384 / 2
        assert len(roles.sites[kind_of(node)]["tp"]) > 2


def test_the_costs_of_segments_add_up_where_a_sequence_is_split() -> None:
    """Time and memory of the stages are those of the whole plan, and the plan splits the sequence over `cp`."""
    search = search_of(folded(), 16)
    search.price(Shape(2, 1, 2, 4, 1, context=4))
    priced = min(search.found, key=lambda one: one.seconds)
    solved = StagedPlan(search, priced).improved().solved
    assert solved.costs == evaluate(search.graph, solved.plan, H100)
    assert priced.design.seconds == pytest.approx(solved.costs.step_seconds, rel=0.05)
    for stage, peak in zip(solved.costs.stages, priced.design.stage_peaks, strict=True):
        assert peak == pytest.approx(stage.memory.peak_bytes, rel=0.12)
    bounded = with_bound(search, priced, solved)
    # On three axes the bound is that of equal shares of the work.
    assert 0.5 * bounded.costs.step_seconds < bounded.bound_seconds < bounded.costs.step_seconds
    attention = [node for node in search.graph.nodes if node.attention is not None]
    assert len(attention) == 8
    for node in attention:
        splits = dict(solved.plan.assignment.ops[node.name].choice.splits)
        assert any("cp" in axes and factor == "s" for (factor, _), axes in splits.items())


@pytest.mark.slow
def test_an_open_mesh_splits_long_sequences() -> None:
    """Four sequences on 64 devices take more than one node each; a mesh without such ranks is slower."""
    request = PlanRequest("h100", options=TrainingOptions("loss"), time_limit=600, cache=False, any_mesh=True)
    found = plan_graph(traced(), meshes_of("?", 64), None, request)
    assert found.fits
    assert found.graph.fold is not None
    assert found.mesh.whole["cp"] > 1
    assert found.bound_seconds is not None
    assert found.bound_seconds <= found.step_seconds
    given = PlanRequest("h100", options=TrainingOptions("loss"), time_limit=60, cache=False)
    other = plan_graph(traced(), (Mesh("dp=4,tp=16"),), "fold seq none", given)
    assert found.step_seconds < other.step_seconds
    again = plan_graph(traced(2048), meshes_of("?", 64), None, request)
    assert again.graph.fold is None
    assert "cp" not in again.mesh.whole
