"""Plans that the planner finds: what it believes is what `evaluate` says, and nothing known is better."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import numpy as np
import pytest
from torch import nn

import autopar
from autopar.cost.evaluate import evaluate
from autopar.cost.hardware.cluster import load_cluster
from autopar.cost.lowered_step import LoweredStep
from autopar.cost.profile import Profile, profile
from autopar.errors import LayoutError
from autopar.ir.graph import NamedGraph
from autopar.ir.precision import parse_precision
from autopar.mesh import SubMesh
from autopar.sharding.assignment import StepPlan
from autopar.sharding.bound_layout import BoundLayout
from autopar.sharding.contracts import sharding_text
from autopar.sharding.layout.language import Layout, parse_layout
from autopar.sharding.options import TrainingOptions
from autopar.solver import Floats
from autopar.solver.infeasible import NoFeasiblePlan
from autopar.solver.model.build import build, plan_of
from autopar.solver.model.cost_tables import CostTables
from autopar.solver.model.objective import Hinges, Sum
from autopar.solver.published_strategies import StrategyOffers, strategy_plans
from autopar.solver.search import lagrangian
from autopar.solver.search.lower_memory import least_memory
from autopar.solver.search.phases import Incumbent, SearchPhases
from autopar.solver.setting import PlanningProblem
from autopar.solver.solve import SolvedPlan, solve_plan
from examples.gpt import gpt

CLUSTER = load_cluster("h100")
AXES = {"dp": 2, "tp": 2}


def traced(precision: str = "own") -> NamedGraph:
    model, inputs = gpt(layers=1, d_model=256, heads=4, vocab=512, seq=128, batch=8, device="meta")
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())  # no parameter is converted for two ops
    return autopar.trace(model, inputs, precision=precision)


@pytest.fixture(scope="module")
def graph() -> NamedGraph:
    return traced()


def sums_of(found: Profile) -> Floats:
    """The sums of the planner, of what `evaluate` adds up."""
    sums = np.zeros(len(Sum))
    ways = (
        (found.forward, Sum.FORWARD_ROOM, Sum.FORWARD_EACH, Sum.FORWARD_ONCE),
        (found.backward, Sum.BACKWARD_ROOM, Sum.BACKWARD_EACH, Sum.BACKWARD_ONCE),
    )
    for tasks, room, each, once in ways:
        for task in tasks:
            if task.overlapped:
                sums[once if task.once else each] += task.seconds
                continue
            if task.once:
                sums[Sum.DEVICE_ONCE] += task.seconds
                sums[Sum.HOST_ONCE] += task.host_seconds
                continue
            sums[Sum.DEVICE] += task.seconds
            sums[Sum.HOST] += task.host_seconds
            sums[room] += task.seconds if task.kind == "compute" else 0.0
    # Its start is a constant of the hinges.
    sums[Sum.OPTIMIZER] += sum(task.seconds - CLUSTER.device.start_seconds for task in found.optimizer)
    return sums


@pytest.mark.parametrize(
    ("compiled", "precision", "count"),
    [
        (False, "own", 1),
        (True, "own", 1),
        (False, "bf16", 1),
        (False, "fp8, gathers=fp8", 1),
        # Weights are cast once for all micro-batches, but for those that each gathers.
        (False, "fp8", 3),
    ],
)
def test_what_the_planner_believes_is_what_evaluate_adds_up(compiled: bool, precision: str, count: int) -> None:
    """All but what is shared: conversions that two ops want, and the buckets of parameters."""
    graph = traced(precision)
    options = TrainingOptions(compiled=compiled, precision=parse_precision(precision), micro_batches=count)
    setting = PlanningProblem.of(graph, SubMesh.of(AXES), CLUSTER, options)
    model = build(setting, BoundLayout(graph, Layout(()), AXES))
    draw = random.Random(0)
    same = 0
    for _ in range(12):
        chosen = [draw.randrange(len(variable.states)) for variable in model.variables]
        believed, found = model.sums(chosen), sums_of(profile(LoweredStep(graph, plan_of(model, chosen)), CLUSTER))
        for key in (Sum.FORWARD_ROOM, Sum.BACKWARD_ROOM):
            assert believed[key] == pytest.approx(found[key], rel=1e-9)
        for key in (Sum.FORWARD_EACH, Sum.FORWARD_ONCE, Sum.BACKWARD_EACH, Sum.BACKWARD_ONCE):
            assert believed[key] <= found[key] * (1 + 1e-9), "no bucket sends a byte in less"
        assert believed[Sum.DEVICE] >= found[Sum.DEVICE] * (1 - 1e-9), "what two ops want is counted twice"
        same += believed[Sum.DEVICE] == pytest.approx(found[Sum.DEVICE], rel=1e-9)
    assert same > 3, "most random decisions share nothing"


def test_hinges_are_the_seconds_of_evaluate(graph: NamedGraph) -> None:
    options = TrainingOptions(micro_batches=3)
    setting = PlanningProblem.of(graph, SubMesh.of(AXES), CLUSTER, options)
    plans = list(strategy_plans(setting))[:6]
    assert len(plans) == 6
    for _, plan in plans:
        found = profile(LoweredStep(graph, plan), CLUSTER)
        sums = sums_of(found)
        for tasks in (found.forward, found.backward):
            for key, is_once in ((Sum.HOST, False), (Sum.HOST_ONCE, True)):
                sums[key] += sum(task.host_seconds for task in tasks if task.overlapped and task.once == is_once)
        seconds = Hinges.of(setting).seconds(sums)
        assert seconds == pytest.approx(evaluate(graph, plan, CLUSTER).step_seconds, rel=1e-9)


def test_no_strategy_is_better(graph: NamedGraph) -> None:
    solved = solve_plan(graph, AXES, CLUSTER, time_limit=3600)
    assert solved.costs == evaluate(graph, solved.plan, CLUSTER), "what is claimed is what evaluate says"
    assert solved.bound_seconds <= solved.costs.step_seconds
    setting = PlanningProblem.of(graph, SubMesh.of(AXES), CLUSTER, TrainingOptions())
    for name, plan in strategy_plans(setting):
        assert solved.costs.step_seconds <= evaluate(graph, plan, CLUSTER).step_seconds * (1 + 1e-9), name


def small() -> NamedGraph:
    model, inputs = gpt(batch=4, seq=8, d_model=16, heads=2, vocab=16, layers=1)
    return autopar.trace(model, inputs)


def asked(graph: NamedGraph, text: str, warm: Mapping[str, StepPlan] | None = None) -> SolvedPlan:
    return solve_plan(graph, {"dp": 2}, CLUSTER, layout=parse_layout(text), warm=warm, time_limit=3600)


def test_an_earlier_plan_is_not_taken_for_what_a_layout_demands() -> None:
    graph = small()
    free = solve_plan(graph, {"dp": 2}, CLUSTER, time_limit=3600)
    found = asked(graph, "batch -> dp", warm={"an earlier plan": free.plan})
    inputs = [found.plan.assignment.stored[name].splits for name in graph.inputs]
    assert inputs == [(("dp",), ())] * len(inputs)
    again = solve_plan(graph, {"dp": 2}, CLUSTER, warm={"an earlier plan": free.plan}, time_limit=3600)
    assert again.costs.step_seconds <= free.costs.step_seconds


def test_guards_steer() -> None:
    """With the batch split, the gradients of whole parameters are added up; where that is forbidden, ops run whole."""
    graph = small()
    said = "batch -> dp; * -> none"
    free, kept = asked(graph, said), asked(graph, f"{said}; forbid all_reduce(grad) over dp")
    sums = [[one for one in found.costs.communication if one.kind == "all_reduce"] for found in (free, kept)]
    assert [bool([one for one in each if one.of == "parameters"]) for each in sums] == [True, False]
    assert kept.costs.step_seconds >= free.costs.step_seconds
    held = asked(graph, "batch -> dp; forbid all_gather(act) over dp")
    assert held.plan.assignment.stored[graph.inputs[0]].splits[0] == ("dp",)


def test_lines_that_conflict_are_told_and_no_others() -> None:
    with pytest.raises(LayoutError) as refused:
        asked(
            small(),
            "seq -> none\nuse@blocks.0.up.weight { d_ff -> dp }\nbatch -> ?\nuse@blocks.0.up.bias { d_ff -> none }",
        )
    shown = [line for line in str(refused.value).splitlines() if line.strip().startswith("<layout>")]
    assert refused.value.code == "E7"
    assert [line.split("|")[0].strip() for line in shown] == ["<layout>:2", "<layout>:4"]


@pytest.mark.parametrize("few", [0, lagrangian.FEW])
def test_where_memory_is_short_the_layout_is_named_if_it_is_to_blame(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a larger model, whose plans that surely fit are not priced at first."""
    monkeypatch.setattr(lagrangian, "FEW", few)
    graph, said = small(), parse_layout("* -> none")
    whole = solve_plan(graph, {"dp": 4}, CLUSTER, layout=said, strategies=False, time_limit=3600)
    limit = 0.8 * whole.costs.memory.peak_bytes
    with pytest.raises(NoFeasiblePlan, match=r"this line is to blame, .*: without the layout, .* would do") as refused:
        solve_plan(graph, {"dp": 4}, CLUSTER, layout=said, memory_bytes=limit, strategies=False, time_limit=3600)
    assert refused.value.least_bytes is not None
    assert refused.value.least_bytes > limit
    found = solve_plan(
        graph,
        {"dp": 4},
        CLUSTER,
        layout=said,
        memory_bytes=refused.value.least_bytes,
        strategies=False,
        time_limit=3600,
    )
    assert found.costs.memory.peak_bytes <= refused.value.least_bytes
    with pytest.raises(NoFeasiblePlan, match=r"without the layout it is (no less|.*, which is too much as well)"):
        solve_plan(graph, {"dp": 4}, CLUSTER, layout=said, memory_bytes=1000, strategies=False, time_limit=3600)


def test_holes_with_candidates_take_one_of_them() -> None:
    graph = small()
    for text, allowed in (
        ("batch -> ?{tp}", {("tp",)}),
        ("batch -> ?{tp, dp*tp}", {("tp",), ("dp", "tp")}),
        ("batch -> dp?", {("dp",), ("dp", "tp")}),
    ):
        found = solve_plan(graph, AXES, CLUSTER, layout=parse_layout(text), strategies=False, time_limit=3600)
        places = [(graph.tensors[name].dims.index("batch"), name) for name in graph.inputs]
        assert {found.plan.assignment.stored[name].splits[place] for place, name in places} <= allowed, text


def test_holds_are_kept() -> None:
    graph = small()
    text = "param { * -> dp | none }; batch -> dp; regather @*"
    found = asked(graph, text)
    assert any(found.plan.assignment.stored[name].axes for name in found.plan.regather)
    split = {tensor.name for tensor in graph.parameters if found.plan.assignment.stored[tensor.name].axes}
    assert found.plan.regather == split
    assert not asked(graph, "param { * -> dp | none }; batch -> dp; keep @*").plan.regather


def layered() -> NamedGraph:
    model, inputs = gpt(batch=4, seq=8, d_model=16, heads=2, vocab=16, layers=2)
    return autopar.trace(model, inputs)


def test_layers_are_computed_again_as_a_layout_says() -> None:
    found = asked(layered(), "batch -> dp; recompute full @blocks.0; recompute none @blocks.1")
    assert {path: mode for path, mode in found.plan.recompute.items() if mode != "none"} == {"blocks.0": "full"}


def test_tensors_that_are_to_share_a_layout_do() -> None:
    graph = small()
    one, other = "blocks.0.up.weight", "blocks.0.attention.qkv.weight"
    found = solve_plan(
        graph,
        AXES,
        CLUSTER,
        layout=parse_layout(f"batch -> dp; same @{one} @{other}"),
        strategies=False,
        time_limit=3600,
    )
    stored = found.plan.assignment.stored
    texts = [sharding_text(graph.tensors[name], stored[name]) for name in (one, other)]
    assert texts[0] == texts[1]


def test_where_the_host_is_slow_no_expert_is_much_better() -> None:
    """Of a small model, which takes the host longer than the devices: a launch more is some percent of the step."""
    model, inputs = gpt(layers=2, d_model=64, heads=4, vocab=128, seq=32, batch=8, device="meta")
    graph, axes = autopar.trace(model, inputs), {"dp": 8}
    setting = PlanningProblem.of(graph, SubMesh.of(axes), CLUSTER, TrainingOptions())
    experts = [evaluate(graph, plan, CLUSTER) for _, plan in strategy_plans(setting)]
    for limit in sorted({costs.memory.peak_bytes for costs in experts}):
        found = solve_plan(graph, axes, CLUSTER, memory_bytes=limit, strategies=False, time_limit=3600)
        fits = [costs.step_seconds for costs in experts if costs.memory.peak_bytes <= limit]
        assert found.costs.step_seconds <= min(fits) * 1.04, limit


@pytest.mark.slow
def test_the_least_memory_that_is_told_is_what_no_search_goes_below() -> None:
    model, inputs = gpt(layers=2, d_model=64, heads=4, vocab=128, seq=32, batch=8, device="meta")
    graph = autopar.trace(model, inputs)
    with pytest.raises(NoFeasiblePlan) as refused:
        solve_plan(graph, {"dp": 8}, CLUSTER, memory_bytes=1000, time_limit=3600)
    least = refused.value.least_bytes
    assert least is not None
    found = solve_plan(graph, {"dp": 8}, CLUSTER, memory_bytes=least, time_limit=3600)
    assert found.costs.memory.peak_bytes == least
    with pytest.raises(NoFeasiblePlan):
        solve_plan(graph, {"dp": 8}, CLUSTER, memory_bytes=0.99 * least, time_limit=3600)


def test_a_late_search_under_a_limit_prices_a_plan(graph: NamedGraph) -> None:
    """The time may end after the plans of least memory and before the first multipliers."""
    setting = PlanningProblem.of(graph, SubMesh.of({"dp": 2, "tp": 2}), CLUSTER, TrainingOptions())
    bound_layout = BoundLayout(graph, Layout(()), setting.axes)
    incumbent = Incumbent(setting, 2.0**30, 0.0, None, bound_layout)
    work = SearchPhases(setting, bound_layout, incumbent, CostTables(setting), 0.0)
    search = work.search(work.model(is_limited=True), 1.0, deadline=0.0)
    assert least_memory(search).peak_gib <= 1.0
    assert search.is_late()
    search.run()
    assert len(search.looked) == 1
    assert search.best == incumbent.seconds < np.inf


def test_strategies_are_not_tried_when_it_is_late(graph: NamedGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are those that do not apply, and are never offered: to find that out takes as long."""
    tried: list[Layout] = []

    def none(setting: PlanningProblem, layout: Layout, known: object = None) -> StepPlan | None:
        tried.append(layout)
        return None

    monkeypatch.setattr("autopar.solver.published_strategies.plan_under", none)
    axes = SubMesh.of({"pod": 2, "dp": 2, "tp": 2})
    setting = PlanningProblem.of(graph, axes, CLUSTER, TrainingOptions())
    incumbent = Incumbent(setting, 2.0**40, 0.0, None, BoundLayout(graph, Layout(()), axes))
    offers = StrategyOffers(incumbent)
    offers.run(0.0, 0.0, until_one_fits=False)
    assert tried == []
    monkeypatch.setattr("time.monotonic", lambda: float(len(tried)))
    offers.run(0.0, 3.5, until_one_fits=False)
    assert len(tried) == 4
    # The next run goes on with those that are left.
    offers.run(0.0, math.inf, until_one_fits=False)
    assert incumbent.plan is None
    assert len(tried) > 20
    later = list(tried)
    assert list(strategy_plans(setting)) == []
    assert tried == later * 2


@pytest.mark.parametrize("axes", [AXES, pytest.param({"pod": 2, "dp": 2, "tp": 2}, marks=pytest.mark.slow)])
def test_without_time_to_search_the_best_expert_stands(graph: NamedGraph, axes: dict[str, int]) -> None:
    solved = solve_plan(graph, axes, CLUSTER, time_limit=1e-3)
    assert solved.origin != "search"
    assert solved.costs == evaluate(graph, solved.plan, CLUSTER)
    assert 0 < solved.bound_seconds < solved.costs.step_seconds
    longer = solve_plan(graph, axes, CLUSTER, time_limit=3600)
    assert longer.origin == "search"
    assert solved.bound_seconds <= longer.costs.step_seconds <= solved.costs.step_seconds


def test_without_time_and_without_experts_that_may_be_taken_a_plan_is_found(graph: NamedGraph) -> None:
    # What is stored alone does not fit: the time is kept, and the least memory is not known.
    with pytest.raises(NoFeasiblePlan, match="time limit") as refused:
        solve_plan(graph, AXES, CLUSTER, memory_bytes=1000, strategies=False, time_limit=1e-3)
    assert refused.value.least_bytes is None
    with pytest.raises(NoFeasiblePlan) as refused:
        solve_plan(graph, AXES, CLUSTER, memory_bytes=1000, strategies=False)
    least = refused.value.least_bytes
    assert least is not None
    found = solve_plan(graph, AXES, CLUSTER, memory_bytes=least, strategies=False, time_limit=1e-3)
    assert found.costs.memory.peak_bytes <= least
    said = parse_layout("batch -> ?; forbid all_gather(act) over dp")
    assert solve_plan(graph, AXES, CLUSTER, layout=said, time_limit=1e-3).plan.assignment.axes == AXES


@pytest.mark.parametrize("precision", ["bf16", "fp8, gathers=fp8"])
def test_weights_that_are_gathered_again_have_a_price_in_any_dtype(precision: str) -> None:
    """Under a limit the search may gather them in the backward once more."""
    model, inputs = gpt(layers=4, d_model=1024, heads=8, vocab=4096, seq=512, batch=16, device="meta")
    plan = autopar.plan(model, "dp=4", inputs, precision=precision, cluster="h100", memory=0.9e9, cache=False)
    assert plan.memory_bytes <= 0.9e9
    assert plan.gap is not None
    assert plan.gap >= 0.0
