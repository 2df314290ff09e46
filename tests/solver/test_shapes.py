"""Shapes of meshes: what their segments add up to, and the plans that open meshes get."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

import autopar
from autopar.cost.evaluate import evaluate
from autopar.cost.hardware.cluster import load_cluster
from autopar.ir.graph import NamedGraph
from autopar.mesh import Mesh, SubMesh
from autopar.plans.find import PlanRequest, plan_graph
from autopar.plans.open_mesh import meshes_of
from autopar.rules.ops.routed import GROUPED_ROWS
from autopar.sharding.choices import group_sites
from autopar.sharding.layout.language import Layout, parse_layout
from autopar.sharding.layout.syntax import MicroBatches
from autopar.sharding.options import TrainingOptions
from autopar.sharding.time_slice import propagate_plan, slice_in_time
from autopar.solver import short_plans
from autopar.solver.mesh_shape import Shape, Split
from autopar.solver.model.recompute_variables import STATES
from autopar.solver.search.joined_axes import kind_of
from autopar.solver.segments import ACTIVATIONS, GROWING, ONCE, ROOMS
from autopar.solver.shapes import SLACK, ShapeSearch
from autopar.solver.solve import solve_plan
from autopar.solver.split_plans import SplitPlans
from autopar.solver.stage_design import SCHEDULES, _least_seconds, design_stages
from autopar.solver.staged_plan import StagedPlan, plan_without_stages, with_bound
from examples.gpt import gpt
from examples.hf import hf

H100 = load_cluster("h100")


@cache
def traced(layers: int = 8, batch: int = 32) -> NamedGraph:
    return autopar.trace(*gpt(layers=layers, d_model=1024, heads=16, vocab=8192, seq=1024, batch=batch, device="meta"))


def search_of(graph: NamedGraph, devices: int, limit: float = math.inf) -> ShapeSearch:
    found = ShapeSearch.of(graph, H100, TrainingOptions("loss"), devices, limit, math.inf)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "shape",
    [
        Shape(4, 2, 1, 8, 2),
        Shape(2, 2, 2, 4, 4, halves=True),
        pytest.param(Shape(2, 2, 2, 16, 1), marks=pytest.mark.slow),
    ],
    ids=lambda shape: f"pp={shape.stages},dp={shape.data},tp={shape.model}{' halves' * shape.halves}",
)
def test_the_costs_of_segments_add_up(shape: Shape) -> None:
    """Time and memory of the stages, from their segments, are those of the whole plan by `evaluate`."""
    search = search_of(traced(), shape.stages * shape.data * shape.model, 100 * 2**30)
    search.price(shape)
    priced = min(search.found, key=lambda one: one.seconds)
    solved = StagedPlan(search, priced).improved().solved
    assert solved is not None
    assert solved.costs == evaluate(search.graph, solved.plan, H100)
    assert priced.design.seconds == pytest.approx(solved.costs.step_seconds, rel=0.05)
    for stage, peak in zip(solved.costs.stages, priced.design.stage_peaks, strict=True):
        assert peak == pytest.approx(stage.memory.peak_bytes, rel=0.12)
    assert 0 < with_bound(search, priced, solved).bound_seconds <= solved.costs.step_seconds


@pytest.mark.parametrize(
    "shape",
    [Shape(1, 4, 1, 4, 2), Shape(1, 2, 2, 1, 16), Shape(1, 2, 2, 2, 8, halves=True)],
    ids=["micro 4", "whole batch", "halves"],
)
def test_a_search_begins_from_the_proposed_plan(shape: Shape) -> None:
    """Without any time for a search, a mesh has the plan of its shape, in as much time as was estimated."""
    search = search_of(traced(), 4)
    search.price(shape)
    priced = min(search.found, key=lambda one: one.seconds)
    first = plan_without_stages(search, priced)
    assert first is not None
    layout = None if shape.micro is None else Layout((shape.micro,))
    found = solve_plan(
        search.graph,
        SubMesh(shape.mesh),
        H100,
        layout=layout,
        options=search.options,
        warm={"a shape": first},
        time_limit=0.0,
        beat_seconds=math.inf,
        strategies=False,
        until_one_fits=False,
    )
    assert found.costs == evaluate(search.graph, found.plan, H100)
    assert found.costs.step_seconds <= priced.seconds * 1.01


def test_an_open_mesh_gets_stages_where_nothing_else_fits() -> None:
    """A lower limit takes more stages or micro-batches, and a plan that fits is found as long as there is one."""
    graph, before = traced(batch=64), 0.0
    for gib in (20.0, 6.0, 3.0):
        request = PlanRequest("h100", gib * 2**30, TrainingOptions("loss"), cache=False, any_mesh=True)
        plan = plan_graph(graph, meshes_of("?", 8), None, request)
        assert plan.fits
        assert plan.mesh.whole.size == 8
        assert plan.bound_seconds is not None
        assert plan.bound_seconds <= plan.step_seconds
        assert plan.step_seconds >= before * (1 - 1e-3)
        before = plan.step_seconds


@pytest.mark.slow
@pytest.mark.parametrize("gib", [20.0, 4.0])
def test_no_given_mesh_is_faster_than_the_proposed_one(gib: float) -> None:
    """Searches of each mesh by itself find nothing that is more than a few percent faster."""
    graph = traced(layers=4)
    request = PlanRequest("h100", gib * 2**30, TrainingOptions("loss"), time_limit=60, cache=False)
    found = plan_graph(graph, meshes_of("?", 4), None, PlanRequest(**{**vars(request), "any_mesh": True}))
    others = []
    for mesh in ("dp=4,tp=1", "dp=2,tp=2", "dp=1,tp=4", "pp=2,dp=2", "pp=2,tp=2", "pp=4"):
        layout = "micro ?{4, 8, 16}; pipeline pp ?" if mesh.startswith("pp") else "micro ?{1, 2, 4, 8}"
        try:
            others.append(plan_graph(graph, (Mesh(mesh),), layout, request).step_seconds)
        except autopar.AutoparError:
            continue  # it does not fit there
    assert found.step_seconds <= 1.1 * min(others)


@pytest.mark.slow
@pytest.mark.parametrize("gib", [40.0, 3.0])
def test_ranks_that_split_the_batch_need_no_other_dim(gib: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best stages take as long as those of plans in which these ranks may split any dim of an op."""

    def found() -> float:
        search = search_of(traced(layers=4), 8, gib * 2**30)
        search.price(Shape(2, 2, 2, 16, 1))
        return search.best

    few = found()
    assert math.isfinite(few)
    monkeypatch.setattr(short_plans, "_roles", lambda *given: None)
    assert few == pytest.approx(found(), rel=1e-2)


def test_ranks_that_split_the_batch_may_split_tables() -> None:
    short = search_of(traced(layers=4), 8).short
    micro = MicroBatches(8)
    roles = short_plans._roles(short, slice_in_time(short.graph, micro), micro, has_experts=False)
    assert roles is not None
    every = {node.name: roles.sites[kind_of(node)]["dp"] for node in slice_in_time(short.graph, micro).nodes}
    assert {len(sites) for name, sites in every.items() if name.startswith("blocks.") and "linear" in name} == {1}
    assert len(every["tokens/embedding"]) > 1


def test_costs_on_fewer_rows_are_no_more_than_those_on_more_rows() -> None:
    """What costs on one and two rows leave to four is at most what four rows cost, and not much less."""
    search = search_of(traced(layers=4), 4, 20 * 2**30)
    shapes = [Shape(2, 2, 1, 16 // rows, rows) for rows in (1, 2, 4)]
    plan = search.plans.of(shapes[0])[0]
    one, two, four = (search._costs(shape, plan, STATES[:-1]) for shape in shapes)
    found = two.on_more_rows(2.0, one, 2.0, SLACK)
    for name in (*GROWING, *ACTIVATIONS, *ONCE):
        assert (found.column(name).sum(axis=1) <= four.column(name).sum(axis=1) * (1 + 1e-9)).all(), name
    for name in ROOMS:
        assert (found.column(name) >= four.column(name) * (1 - 1e-9)).all(), name
    assert found.seconds.sum() == pytest.approx(four.seconds.sum(), rel=0.05)
    assert found.column("saved_bytes").sum() == pytest.approx(four.column("saved_bytes").sum(), rel=0.05)


def test_no_design_takes_less_than_its_least_time() -> None:
    """What rules designs out before tasks are simulated is a lower bound, and a close one."""
    search, shape = search_of(traced(), 4), Shape(4, 1, 1, 16, 2)
    costs = search._costs(shape, search.plans.of(shape)[0], STATES[:-1])
    sends = search.sends(costs, shape)
    for choice in SCHEDULES[:6]:
        found = design_stages(costs, H100, 4, 16, choice, [math.inf] * 4, sends)
        if found is None:
            continue  # too few layers
        modes = np.array(found.modes)
        least = _least_seconds(costs, modes, found.starts, 4, 16, choice[0], H100)
        assert 0.8 * found.seconds < least <= found.seconds, choice


@cache
def mixture() -> NamedGraph:
    pytest.importorskip("transformers")
    config = {"num_hidden_layers": 4, "num_local_experts": 8, "intermediate_size": 512, "hidden_size": 256}
    with torch.device("meta"):
        model, given = hf("mixtral", batch=64, seq=64, train=True, dropout=0.0, **config)
    return autopar.trace(model, {**given, "labels": given["input_ids"]})


def test_experts_have_ranks_of_their_own() -> None:
    """Along `ep` rows go to the ranks of their experts, and the batch is split elsewhere; prices are of such a plan."""
    search = search_of(mixture(), 16, 10 * 2**30)
    assert {shape.expert for shape in search.space} == {1, 2, 4, 8}
    assert all(shape.model == 1 for shape in search.space if shape.expert > 1)
    assert search.space.stages_for(Split(1, 8)) <= search.space.stages_for(Split(1))
    shape = Shape(2, 2, 1, 4, 2, expert=4)
    assert shape in list(search.space)
    search.price(shape)
    priced = min(search.found, key=lambda one: one.seconds)
    solved = StagedPlan(search, priced).improved().solved
    assert solved.costs == evaluate(search.graph, solved.plan, H100)
    assert priced.design.seconds == pytest.approx(solved.costs.step_seconds, rel=0.05)
    plan = solved.plan.assignment
    for node in search.graph.nodes:
        axes = {axis: site for site, used in plan.ops[node.name].choice.splits for axis in used}
        if node.op == str(GROUPED_ROWS):
            assert axes["ep"] == group_sites(node)[0]
            assert axes["dp"] not in group_sites(node)
    experts = [tensor.name for tensor in search.graph.parameters if ".experts." in tensor.name]
    assert len(experts) == 8
    assert all("ep" in plan.values[name].axes for name in experts)
    sent = [one for one in solved.costs.communication if one.kind == "all_to_all" and one.of == "values"]
    assert {one.axes for one in sent} == {("ep",)}
    # Two in the forward and two in the backward, for both layers of a stage and each micro-batch.
    assert sum(one.count for one in sent) == 4 * 2 * 4


def test_halves_are_tried_where_activations_are_sent() -> None:
    """A mesh without stages that is followed in halves is followed without them, too: estimates are rough."""
    search = search_of(mixture(), 16, 10 * 2**30)
    followed = search.promising()
    assert any(split.expert > 1 for split in search.plans.found)
    for split in search.plans.found:
        tried = {halves for own, _, halves in search.layer_seconds if own == split}
        assert tried == ({False} if split == Split(1) else {False, True}), split
    for one in search.found:
        assert one.shape.count * one.shape.rows * one.shape.data * one.shape.expert == 64
    alone = [one.shape for one in followed if one.shape.stages == 1]
    for mesh in {tuple(shape.axes.items()) for shape in alone}:
        assert any(not shape.halves for shape in alone if tuple(shape.axes.items()) == mesh)


def test_halves_that_are_the_best_have_plans_of_their_own() -> None:
    """Plans that send more, and hide it, are faster in halves than those of whole micro-batches."""
    graph, shapes = traced(batch=64), [Shape(2, 2, 8, 16, 2), Shape(2, 2, 8, 8, 4)]
    search, of_whole = search_of(graph, 32, 100 * 2**30), search_of(graph, 32, 100 * 2**30)
    search._price_split(Split(8), shapes)
    for shape in (*shapes, *(halved for whole in shapes for halved in whole.in_halves())):
        of_whole.price(shape)
    best, other = (min(one.found, key=lambda priced: priced.seconds) for one in (search, of_whole))
    assert (best.shape.halves, other.shape.halves) == (True, True)
    assert (best.for_halves, other.for_halves) == (True, False)
    own, lent = (StagedPlan(search, one).improved().solved.costs.step_seconds for one in (best, other))
    assert own < 0.98 * lent


def test_plans_for_another_number_of_expert_ranks_are_as_good() -> None:
    """Shapes on other numbers of ranks for the experts are priced with the plans that were found for the first one."""
    graph, first, other = mixture(), Shape(2, 2, 1, 4, 2, expert=4), Shape(2, 4, 1, 4, 2, expert=2)
    lent, own = search_of(graph, 16, 10 * 2**30), search_of(graph, 16, 10 * 2**30)
    lent.price(first)
    lent.found.clear()
    for search in (lent, own):
        search.price(other)
    assert (lent.plans.lent, own.plans.lent) == ({other.split}, set())
    assert own.best < math.inf
    assert lent.best <= 1.01 * own.best


def test_the_best_number_of_expert_ranks_has_plans_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    search, searched = search_of(mixture(), 16, 10 * 2**30), list[Split]()
    first, other = Shape(2, 2, 1, 4, 2, expert=4), Shape(2, 4, 1, 4, 2, expert=2)
    of_shape = SplitPlans._searched
    monkeypatch.setattr(SplitPlans, "_searched", lambda self, one: (searched.append(one.split), of_shape(self, one))[1])
    search.price(first)
    search._price_splits({other.split: [other]})
    assert searched == [first.split]
    assert search.plans.lent == {other.split}
    search.found.clear()
    search._price_splits({other.split: [other]})
    assert searched == [first.split, other.split]
    assert not search.plans.lent
    assert search.plans.found[other.split] is not search.plans.found[first.split]


def test_more_ranks_than_experts() -> None:
    """A plan whose experts lie on the batch's ranks holds for as many of these as there are experts."""
    graph = mixture()
    for data in (8, 16):
        search = search_of(graph, 2 * data, 10 * 2**30)
        micro, axes = MicroBatches(2), {"dp": 8, "tp": 1}
        layout = parse_layout("batch -> dp; @*experts* { expert -> dp }; * -> none")
        plan = propagate_plan(slice_in_time(search.short.graph, micro), layout, axes)
        search.plans.found[Split(1)] = (plan,)
        search.price(Shape(2, data, 1, 4, 64 // data // 4))
        assert bool(search.found) == (data == 8)


def test_a_design_to_beat_changes_no_faster_design() -> None:
    """Cuts that leave no chance with one set of recompute modes are made again, as without anything to beat."""
    search, shape = search_of(traced(), 4), Shape(4, 1, 1, 16, 2)
    costs = search._costs(shape, search.plans.of(shape)[0], STATES[:-1])
    # Many layers of one kind, so that cuts can move work between stages.
    layers = (costs.sequence[0], *[costs.sequence[2]] * 40, costs.sequence[-1])
    costs = replace(costs, sequence=layers, layers=("", *["layer"] * 40, ""), _columns={})
    sends = np.zeros(len(layers))
    free = design_stages(costs, H100, 4, 512, SCHEDULES[0], [math.inf] * 4, sends)
    assert free is not None
    for share in np.linspace(0.3, 1.0, 15):
        limits = [share * free.peak_bytes] * 4
        found = design_stages(costs, H100, 4, 512, SCHEDULES[0], limits, sends)
        if found is not None:
            beat = found.seconds * (1 + 1e-6)
            assert design_stages(costs, H100, 4, 512, SCHEDULES[0], limits, sends, beat) == found
