"""Plans with pipelines: the price of their stages, their text, the search on the axes that are left."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from math import prod

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.cost.lowered_step import lower_step
from autopar.cost.memory.peak import check_memory, memory, memory_over_time
from autopar.cost.network import Network
from autopar.cost.order_times import PartCosts, run_orders
from autopar.errors import LayoutError
from autopar.lowering.emit import emit
from autopar.lowering.modules.bucket import ParameterHandling
from autopar.lowering.modules.pipeline_loop import PipelineLoop
from autopar.lowering.passes.bucket_parameters import BucketedParameters
from autopar.plans.find import PlanRequest, plan_graph, plan_under_layout
from autopar.plans.open_mesh import meshes_of
from autopar.plans.strategies import price_strategies
from autopar.plans.views.summary import side_by_side
from autopar.sharding.layout.language import choose_layout, parse_layout
from autopar.sharding.layout.syntax import CutStatement, MicroBatches, PipelineStatement
from autopar.sharding.options import TrainingOptions
from autopar.sharding.pipelining import late_weights
from autopar.sharding.propagation import propagate
from autopar.sharding.schedules import Schedule, orders
from autopar.solver.published_strategies import strategy_plans
from autopar.solver.setting import PlanningProblem
from examples.gpt import gpt
from examples.hf import hf
from tests.ranks import SimulatedGroups, on_ranks
from tests.traced import traced

REQUEST = PlanRequest("h100", cache=False)


class Layers(nn.Module):
    """Equal layers and a loss that takes no time beside them."""

    def __init__(self, layers: int = 8, width: int = 1024) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False, device="meta") for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x[:, :1].mean()


class Products(nn.Module):
    """Products whose weights have gradients, and some that put off none."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.bias = (nn.Parameter(torch.empty(shape, device="meta")) for shape in ((6, 6), (6,)))
        self.frozen = nn.Parameter(torch.empty(6, 6, device="meta"), requires_grad=False)
        self.batched = nn.Parameter(torch.empty(1, 6, 6, device="meta"))
        self.last = nn.Linear(6, 4, bias=False, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, x, self.w) @ self.frozen
        z = torch.matmul(y[:, None], self.batched)[:, 0]
        return self.last(z @ (z.t() @ z) if z.shape[0] == 1 else z).square().mean()


def layers_of(batch: int) -> tuple[nn.Module, tuple[Tensor]]:
    return Layers(), (torch.empty(batch, 1024, device="meta"),)


def priced(mesh: str, layout: str, batch: int = 2**16) -> autopar.Plan:
    return plan_under_layout(traced(layers_of, batch), autopar.Mesh(mesh), layout, REQUEST)


@pytest.mark.parametrize(("schedule", "in_flight"), [("1f1b", (4, 3, 2, 1)), ("gpipe", (16,) * 4)])
def test_equal_stages_take_as_long_as_the_formula(schedule: str, in_flight: Sequence[int]) -> None:
    """A step lasts for all micro-batches of one stage, and one more for each other stage."""
    costs = priced("pp=4", f"micro 16; pipeline pp {schedule}; batch -> none; * -> none").costs
    one = max(stage.forward_seconds + stage.backward_seconds for stage in costs.stages)
    least = (16 + 4 - 1) * one + costs.compute.optimizer_seconds
    # Sends delay a stage that has no forward in reserve.
    assert least <= costs.step_seconds <= (1.1 if schedule == "1f1b" else 1.02) * least
    assert costs.bubble_seconds >= 2.9 * one
    assert tuple(stage.in_flight for stage in costs.stages) == in_flight
    # The first stage reads an input, which is no activation.
    saved = [stage.memory.saved_bytes / stage.in_flight for stage in costs.stages[1:]]
    assert max(saved) <= 1.01 * min(saved)
    assert len({stage.memory.parameters_bytes for stage in costs.stages}) == 1
    assert costs.memory.peak_bytes == max(stage.memory.peak_bytes for stage in costs.stages)


def test_gathered_parameters_count_once() -> None:
    """All micro-batches in flight read one copy of the parameters that a stage gathers before the first."""
    text = "micro 16; pipeline pp gpipe; batch -> dp; * -> none"
    whole, gathered = priced("pp=2,dp=4", text), priced("pp=2,dp=4", text + "; param, grad, opt { * -> dp }")
    for one, other in zip(whole.costs.stages, gathered.costs.stages, strict=True):
        assert other.memory.parameters_bytes == one.memory.parameters_bytes / 4
        assert other.memory.copies_bytes == one.memory.parameters_bytes
        assert other.memory.saved_bytes == pytest.approx(one.memory.saved_bytes, rel=1e-3)


class Head(Layers):
    """Layers whose last stage makes much more in its forward than it keeps."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.repeat(1, 8).sum(1, keepdim=True).mean()


def test_a_forward_runs_beside_saved_micro_batches() -> None:
    """The peak of the forward counts what waits for its backward: under gpipe all other micro-batches."""
    graph = autopar.trace(Head(4), (torch.empty(2**14, 1024, device="meta"),))
    layout = "micro 8; pipeline pp gpipe; batch -> none; * -> none"
    last = plan_under_layout(graph, autopar.Mesh("pp=2"), layout, REQUEST).costs.stages[-1].memory
    assert "the forward of" in last.peak_at
    # Of one micro-batch: 8 MiB of float32 in each value, and eight times as much before the sum.
    assert last.peak_bytes >= last.parameters_bytes + last.saved_bytes + 64 * 2**20


def test_interleaving_shortens_the_bubble() -> None:
    plain = priced("pp=4", "micro 16; pipeline pp 1f1b; batch -> none; * -> none").costs
    finer = priced("pp=4", "micro 16; pipeline pp interleaved(2); batch -> none; * -> none").costs
    assert finer.bubble_seconds == pytest.approx(plain.bubble_seconds / 2, rel=0.2)
    assert finer.step_seconds < plain.step_seconds
    assert [stage.parts for stage in finer.stages] == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_zero_bubble_takes_as_long_as_the_formula() -> None:
    """The idle time is that of 3 times F + I - W; operands of put-off gradients are inputs and gradients of layers."""
    layout = "micro 16; pipeline pp {}; batch -> none; * -> none"
    whole, costs = (priced("pp=4", layout.format(name)).costs for name in ("1f1b", "zero_bubble"))
    each = costs.stages[1]
    assert each.late_seconds == pytest.approx(each.backward_seconds / 2, rel=0.2)
    idle = 3 * (each.forward_seconds + each.backward_seconds - 2 * each.late_seconds)
    busy = 16 * max(stage.forward_seconds + stage.backward_seconds for stage in costs.stages)
    least = busy + idle + costs.compute.optimizer_seconds
    assert least <= costs.step_seconds <= 1.05 * least  # sends delay a stage that has no forward in reserve
    assert costs.step_seconds < 0.9 * whole.step_seconds
    assert [stage.in_flight for stage in costs.stages] == [4, 3, 2, 1]
    layer = 2**16 // 16 * 1024 * 4
    for number, (stage, plain) in enumerate(zip(costs.stages, whole.stages, strict=True)):
        assert stage.busy_seconds == pytest.approx(plain.busy_seconds)
        kept = stage.memory.saved_bytes - plain.memory.saved_bytes
        # The last of two layers has the loss behind it; the first stage reads an input, which takes no memory twice.
        assert kept == pytest.approx(number * 4 * layer, rel=0.1)


@pytest.mark.parametrize(
    ("layout", "late"),
    [
        ("param { * -> dp | none }", {"w", "bias", "last.weight"}),
        ("param { * -> dp | none }; regather @last.weight", {"w", "bias"}),
        ("param { * -> none }; regather @*", {"w", "bias", "last.weight"}),  # nothing is gathered
    ],
)
def test_which_gradients_are_put_off(layout: str, late: set[str]) -> None:
    graph = autopar.trace(Products(), (torch.empty(8, 6, device="meta"),))
    text = f"micro 2; pipeline pp zero_bubble; cut pp before @last; batch -> dp; * -> none; {layout}"
    plan = plan_under_layout(graph, autopar.Mesh("pp=2,dp=2"), text, REQUEST)
    found = late_weights(plan.graph, plan.decided.assignment)
    assert {name for names in found.values() for name in names} == {
        {"head": "last.weight"}.get(one, one) for one in late
    }
    other = plan_under_layout(graph, autopar.Mesh("pp=2,dp=2"), text.replace("zero_bubble", "1f1b"), REQUEST)
    assert not late_weights(other.graph, other.decided.assignment)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(6, 6, dtype=torch.complex64, device="meta") for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)).abs().mean()


def test_complex_products_put_nothing_off() -> None:
    """Their gradients are products with conjugates, which autograd computes."""
    graph = autopar.trace(Complex(), (torch.empty(8, 6, dtype=torch.complex64, device="meta"),))
    text = "micro 2; pipeline pp zero_bubble; cut pp before @last; * -> none"
    plan = plan_under_layout(graph, autopar.Mesh("pp=2"), text, REQUEST)
    assert not late_weights(plan.graph, plan.decided.assignment)


def test_stages_share_the_model() -> None:
    """Parameters, work and collectives of all stages are those of the model on the other axes."""
    whole = priced("dp=2", "micro 8; batch -> dp; * -> none").costs
    cut = priced("pp=4,dp=2", "micro 8; pipeline pp 1f1b; batch -> dp; * -> none").costs
    assert sum(stage.memory.parameters_bytes for stage in cut.stages) == whole.memory.parameters_bytes
    busy = sum(stage.busy_seconds for stage in cut.stages)
    assert busy == pytest.approx(whole.compute.forward_seconds + whole.compute.backward_seconds, rel=0.02)
    assert cut.flops == whole.flops
    assert cut.mfu < whole.mfu


def test_one_value_crosses_each_cut_of_a_gpt() -> None:
    graph = traced(gpt, layers=4, batch=8)
    plan = plan_under_layout(graph, autopar.Mesh("pp=4"), "micro 4; pipeline pp 1f1b; * -> none", REQUEST)
    crossing = lower_step(plan.graph, plan.decided).crossing
    assert sorted((making, tuple(reading)) for _, making, reading in crossing) == [(0, (1,)), (1, (2,)), (2, (3,))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "cut", "shapes"),
    [
        ("llama", "@model.layers.1", [(8, 16, 48)]),
        # The residual stream, what the encoder makes, and the bias of positions, which one layer makes for all.
        ("t5", "@decoder.block.1", [(1, 4, 15, 15), (8, 15, 48), (8, 16, 48)]),
    ],
)
def test_values_that_cross(architecture: str, cut: str, shapes: list[tuple[int, ...]]) -> None:
    """Masks, positions and integers are computed where they are read."""
    model, inputs = hf(architecture, batch=8, seq=16, device="meta")
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    layout = f"micro 4; pipeline pp 1f1b; cut pp before {cut}; * -> none"
    plan = plan_under_layout(autopar.trace(model, inputs), autopar.Mesh("pp=2"), layout, REQUEST)
    crossing = [plan.graph.tensors[name] for name, _, _ in lower_step(plan.graph, plan.decided).crossing]
    assert sorted(tuple(tensor.shape) for tensor in crossing) == shapes
    assert all(tensor.dtype.is_floating_point for tensor in crossing)


TIED = [
    ("pp=2,dp=2", "micro 4; pipeline pp 1f1b; batch -> dp; * -> none"),
    ("pp=2,dp=2", "micro 4; pipeline pp 1f1b; fsdp"),
    ("pp=2,tp=2", "micro 4; pipeline pp interleaved(2); megatron"),
    ("pp=2,dp=2", "micro 4; pipeline pp 1f1b; batch -> dp; * -> none; param { * -> dp | none }; regather @*"),
]


@pytest.mark.parametrize(("mesh", "layout"), TIED)
def test_tied_parameters_are_priced_as_they_are_sent(mesh: str, layout: str) -> None:
    """The table of tokens and logits: its bytes in the price are those that the graph of a rank sends."""
    plan = plan_under_layout(traced(gpt, layers=4, vocab=104, batch=8), autopar.Mesh(mesh), layout, REQUEST)
    step = lower_step(plan.graph, plan.decided)
    axes = plan.decided.mesh
    assignment = propagate(plan.graph, choose_layout(layout, axes), axes)
    again = plan.decided.regather
    handling = {one.name: ParameterHandling(*3 * [one.dtype], again=one.name in again) for one in plan.graph.parameters}

    def loop(groups: SimulatedGroups) -> list[PipelineLoop]:
        emitted = emit(plan.graph, assignment, groups, "sharded", False, BucketedParameters(handling))
        return [one for one in emitted.graph_module.modules() if isinstance(one, PipelineLoop)]

    (priced,) = step.tied
    for (found,) in on_ranks(axes, loop):
        (one,) = found.tied
        assert (one.source, one.targets) == (priced.source, priced.targets) == (1, (0,))
        assert prod(one.shape) * one.dtype.itemsize == priced.bytes == priced.gradient_bytes

    # The first stage begins when it has the table, the last one reduces when it has its gradient.
    line = autopar.timeline(plan.graph, plan.decided, plan.cluster)
    events = [[event for event in line.events if event.stream == f"stage {stage}"] for stage in range(2)]
    parts = [[event for event in each if event.task.name.startswith("part ")] for each in events]
    sending = Network(plan.cluster, plan.decided.mesh).seconds("send", ("pp",), priced.bytes)
    beside = [event for event in line.events if event.stream == "parameters of stage 1"]
    gathering = sum(event.task.seconds for event in beside if event.task.name == "parameters")
    assert parts[0][0].start_seconds == pytest.approx(gathering + sending)
    if "regather" not in layout and "tp" not in mesh:
        reducing = [event.start_seconds for event in beside if event.task.name == "gradients"]
        assert max(reducing) == pytest.approx(parts[0][-1].end_seconds + sending)


def test_values_that_a_stage_receives_are_resharded_where_they_are_made() -> None:
    """The bias of positions under a mask: in designs of the search the second stage sends it to the first."""
    sizes = {"decoder_start_token_id": 0, "dropout_rate": 0.0, "num_layers": 3, "num_decoder_layers": 3}
    model, inputs = hf("t5", batch=16, seq=16, device="meta", **sizes)
    inputs = {"input_ids": inputs["input_ids"], "labels": inputs["input_ids"]}
    layout = "micro 2; pipeline pp 1f1b; seq -> sp pad | none !19; heads -> none; head_dim -> none; * -> none"
    plan = autopar.plan(model, "pp=2,sp=2", inputs, layout=layout, cluster="h100", cache=False, time_limit=3)
    assert len(plan.costs.stages) == 2


@pytest.mark.parametrize(("mesh", "layout"), TIED)
def test_tied_parameters_are_stored_once(mesh: str, layout: str) -> None:
    graph = traced(gpt, layers=4, vocab=104, batch=8)
    plan = plan_under_layout(graph, autopar.Mesh(mesh), layout, REQUEST)
    step = lower_step(plan.graph, plan.decided)
    alone = re.sub(r"pipeline \w+ [^;]*; ", "", layout)
    whole = plan_under_layout(graph, autopar.Mesh(mesh.removeprefix("pp=2,")), alone, REQUEST).costs.memory
    for kind in ("parameters_bytes", "optimizer_bytes", "gradients_bytes"):
        total = sum(getattr(stage.memory, kind) for stage in plan.costs.stages)
        assert total == pytest.approx(getattr(whole, kind)), kind
    # The first stage has the table beside its own parameters.
    stage = plan.costs.stages[0].memory
    assert stage.copies_bytes >= step.tied[0].bytes
    # Its gradient is there from the first backward on, and that of one micro-batch beside it.
    frozen = step.at(0)
    frozen.__dict__["tied"] = (replace(step.tied[0], gradient_bytes=0.0),)
    without = memory(frozen)
    assert stage.peak_bytes >= without.peak_bytes + step.tied[0].gradient_bytes


def test_a_limit_is_that_of_the_fullest_stage() -> None:
    plan = priced("pp=4", "micro 16; pipeline pp 1f1b; batch -> none; * -> none")
    for share in (1.01, 0.99):
        layout = parse_layout(f"limit memory {int(share * plan.memory_bytes)}B")
        with nullcontext() if share > 1 else pytest.raises(LayoutError, match="out of memory"):
            check_memory(layout, plan.graph, plan.decided)


@pytest.mark.parametrize("waits", [False, True])
def test_a_send_delays_what_follows_it(waits: bool) -> None:
    parts = [PartCosts(1.0, 2.0, 0.25), PartCosts(1.0, 2.0, 0.25)]
    ran = run_orders(parts, orders(2, 1, "1f1b"), [0.5, 0.0], waits)
    finished, busy = ran.finished, ran.busy
    assert finished[0] == pytest.approx(0.5 + 1.0 + 0.25 + 3.0 + 0.25 + 2.0)
    assert busy == pytest.approx((3.25, 3.25) if waits else (3.0, 3.0))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
def test_unequal_parts(schedule: Schedule) -> None:
    """The longest part bounds the step from below, all parts in a row bound it too."""
    chunks = 2 if schedule == "interleaved" else 1
    parts = [PartCosts(1.0 + 0.5 * place, 2.0 + place) for place in range(3 * chunks)]
    ran = run_orders(parts, orders(3, 6, schedule, chunks), [0.0] * 3, sends_wait=False)
    finished, busy = ran.finished, ran.busy
    assert max(finished) >= max(busy)
    assert max(finished) >= sum(part.forward_seconds + part.backward_seconds for part in parts)
    for stage in range(3):
        mine = [part for place, part in enumerate(parts) if place % 3 == stage]
        assert busy[stage] == pytest.approx(6 * sum(part.forward_seconds + part.backward_seconds for part in mine))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved(2)", "zero_bubble"])
def test_parameters_move_beside_the_stages(schedule: str) -> None:
    """Later stages hide all of their gathers and reductions, the first one only what its own tasks leave room for."""
    plan = priced("pp=4,dp=2", f"micro 8; pipeline pp {schedule}; fsdp(fsdp=dp)")
    found = plan.costs.stages
    assert all(0.0 <= one.exposed_seconds <= one.parameters_seconds for one in found)
    assert found[0].exposed_seconds < found[0].parameters_seconds
    line = autopar.timeline(plan.graph, plan.decided, plan.cluster)
    tasks = {number: [each for each in line.events if each.stream == f"stage {number}"] for number in range(4)}
    for number, stage in enumerate(found):
        sent = [each for each in line.events if each.stream == f"parameters of stage {number}"]
        ways = [each.task.kind for each in sent]
        assert ways == sorted(ways)  # gathers, then reductions
        assert ways.count("all_gather") == ways.count("reduce_scatter") == len(stage.parts)
        assert sum(each.task.seconds for each in sent) >= stage.parameters_seconds * (1 - 1e-9)
        # No reduction begins before the last backward of its part.
        begins: dict[str, float] = {}
        for each in tasks[number]:
            name = each.task.name.removeprefix("weights of ")
            begins[name] = max(begins.get(name, 0.0), each.start_seconds)
        last = min(begins[f"part {part}"] for part in stage.parts)
        assert all(each.start_seconds >= last - 1e-12 for each in sent if each.task.kind == "reduce_scatter")
    # Stage 3 waits for the others before its first forward and after its last backward.
    assert found[3].exposed_seconds < found[0].exposed_seconds


def test_the_timeline_shows_the_stages() -> None:
    plan = priced("pp=4,dp=2", "micro 8; pipeline pp interleaved(2); fsdp(fsdp=dp)")
    line = autopar.timeline(plan.graph, plan.decided, plan.cluster)
    assert line.seconds == pytest.approx(plan.step_seconds)
    for number, stage in enumerate(plan.costs.stages):
        own = [event for event in line.events if event.stream == f"stage {number}"]
        ways = [event.task.direction for event in own if event.task.name.startswith("part ")]
        assert ways.count("forward") == ways.count("backward") == 16
        assert {event.task.name for event in own} >= {f"part {part}" for part in stage.parts}
        assert all(one.end_seconds <= other.start_seconds + 1e-12 for one, other in pairwise(own))
    names = [row["args"]["name"] for row in line.to_json()["traceEvents"] if row["ph"] == "M"]
    assert names == [name for number in range(4) for name in (f"stage {number}", f"parameters of stage {number}")]
    halved = priced("pp=4,dp=2", "micro 8; pipeline pp zero_bubble; fsdp(fsdp=dp)")
    line = autopar.timeline(halved.graph, halved.decided, halved.cluster)
    assert line.seconds == pytest.approx(halved.step_seconds)
    for number, stage in enumerate(halved.costs.stages):
        own = [event for event in line.events if event.task.name == f"weights of part {number}"]
        assert len(own) == 8
        assert own[0].end_seconds - own[0].start_seconds == pytest.approx(stage.late_seconds)
    assert "stage 3" in plan.plot()._repr_html_()


# -- the search --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        ("pp=2,dp=2", "micro 4; pipeline pp 1f1b; batch -> dp; * -> none"),
        ("pp=2,tp=2", "micro 4; pipeline pp interleaved(2)"),
        ("pp=2,dp=2", "micro ?; pipeline pp 1f1b(+1); cut pp before @blocks.1"),
    ],
)
def test_a_plan_is_read_as_it_was_written(mesh: str, layout: str) -> None:
    plan = plan_graph(traced(gpt, layers=4, batch=8), (autopar.Mesh(mesh),), layout, REQUEST)
    again = autopar.Plan.read(plan.text, plan.graph)
    assert again.decided == plan.decided
    assert again.costs == plan.costs
    cut = plan.layout.cut
    assert isinstance(cut, CutStatement)
    assert all("/" not in name for name in cut.before), "modules, not ops"
    assert plan.bound_seconds is not None
    assert 0 <= plan.bound_seconds <= plan.step_seconds


def test_parts_take_equal_time() -> None:
    """The loss counts by its time: by its multiplications alone the last stage would be the slowest by far."""
    graph = traced(gpt, layers=12, d_model=1024, heads=16, vocab=50000, seq=1024, batch=64, device="meta")
    plan = plan_graph(graph, (autopar.Mesh("pp=2"),), "micro 4; pipeline pp 1f1b", REQUEST)
    busy = [stage.busy_seconds for stage in plan.costs.stages]
    assert max(busy) < 1.25 * min(busy)


def test_memory_limits_the_fullest_stage() -> None:
    graph = traced(gpt, layers=8, d_model=256, heads=8, seq=256, batch=64, device="meta")
    text = "micro 8; pipeline pp 1f1b; cut pp before @blocks.4"
    free = plan_graph(graph, (autopar.Mesh("pp=2"),), text, REQUEST)
    limit = 0.6 * free.memory_bytes
    tight = plan_graph(graph, (autopar.Mesh("pp=2"),), text, PlanRequest("h100", limit, cache=False))
    assert all(stage.memory.peak_bytes <= limit for stage in tight.costs.stages)
    assert tight.step_seconds > free.step_seconds
    assert tight.decided.recompute


def test_a_limit_of_a_layout_is_that_of_a_stage() -> None:
    """Layouts without a search are checked too: the model is larger than the limit, none of its stages is."""
    plan = priced("pp=4", "micro 16; pipeline pp 1f1b; batch -> none; * -> none")
    whole = priced("pp=1", "micro 16; batch -> none; * -> none").memory_bytes
    assert whole > plan.memory_bytes + 1
    for limit in (int(plan.memory_bytes) + 1, int(plan.memory_bytes) - 1):
        layout = parse_layout(f"limit memory {limit}B")
        if limit > plan.memory_bytes:
            check_memory(layout, plan.graph, plan.decided)
        else:
            with pytest.raises(LayoutError, match=r"out of memory.* of stage 1, which has 3 micro-batches in flight"):
                check_memory(layout, plan.graph, plan.decided)


def test_an_open_schedule_is_the_fastest_that_fits() -> None:
    graph = traced(gpt, layers=8, d_model=256, heads=8, seq=256, batch=64, device="meta")
    mesh = (autopar.Mesh("pp=2"),)
    found = plan_graph(graph, mesh, "micro 8; pipeline pp ?; cut pp ?; * -> none", REQUEST)
    assert "?" not in str(found.layout)
    for schedule in ("1f1b", "1f1b(+1)", "interleaved(2)", "zero_bubble"):
        other = plan_graph(graph, mesh, f"micro 8; pipeline pp {schedule}; * -> none", REQUEST)
        assert found.step_seconds <= other.step_seconds * (1 + 1e-9)
    named = plan_graph(graph, mesh, "micro 8; pipeline pp ?; cut pp before @blocks.3; * -> none", REQUEST)
    assert named.layout.cut == CutStatement("pp", ("blocks.3",))
    assert named.layout.pipeline == PipelineStatement("pp", "zero_bubble")
    text = "pipeline pp ?\ncut pp ?\n"
    assert str(parse_layout(text)) == text


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["h100", "local-cpu"])
def test_an_open_number_of_micro_batches_is_the_fastest(cluster: str) -> None:
    # The bound is far below these steps, so it excludes no number.
    graph = traced(gpt, layers=2, d_model=64, heads=4, vocab=48, seq=64, batch=16, device="meta")
    request, mesh = PlanRequest(cluster, cache=False), (autopar.Mesh("pp=2,dp=2"),)
    layout = "pipeline pp 1f1b; batch -> dp; * -> none"
    times = {n: plan_graph(graph, mesh, f"micro {n}; {layout}", request).step_seconds for n in (2, 4, 8)}
    assert len(set(times.values())) == 3
    found = plan_graph(graph, mesh, f"micro ?{{2, 4, 8}}; {layout}", request)
    assert found.step_seconds == min(times.values())
    assert f"micro {min(times, key=times.__getitem__)}\n" in found.text


def test_open_meshes_may_have_one_stage() -> None:
    """An axis of one rank has no stages, and needs no micro-batches."""
    meshes = meshes_of("pp=?,dp=?", 2)
    graph = traced(gpt, layers=4, batch=8)
    plan = plan_graph(graph, meshes, "micro ?{1, 2}; pipeline pp ?; batch -> dp; * -> none", REQUEST)
    alone = plan_under_layout(graph, autopar.Mesh("pp=1,dp=2"), "pipeline pp 1f1b; batch -> dp; * -> none", REQUEST)
    assert plan.step_seconds <= alone.step_seconds
    assert alone.decided.assignment.pipelining is None


def test_an_axis_of_one_rank_takes_a_strategy() -> None:
    model, inputs = gpt(batch=8)
    plan = autopar.plan(model, "dp=2,tp=1", inputs, layout="megatron", cluster="h100", cache=False)
    assert autopar.Plan.read(plan.text, plan.graph).costs == plan.costs


@pytest.mark.parametrize(
    ("mesh", "layout", "note"),
    [
        ("pp=2", "micro 4; pipeline pp 1f1b; * -> none", ""),
        ("pp=2,dp=2", "micro 4; pipeline pp 1f1b; batch -> dp; * -> none", ""),
        (
            "pp=2,dp=2",
            "micro 4; pipeline pp 1f1b; * -> none",
            "nothing is split over dp: each rank of it computes the same",
        ),
        ("pp=2,dp=2", "batch -> dp; * -> none", "nothing is split over pp: each rank of it computes the same"),
        ("pp=2,dp=2", "* -> none", "nothing is split: every device computes everything"),
    ],
)
def test_the_summary_names_axes_that_do_nothing(mesh: str, layout: str, note: str) -> None:
    plan = priced(mesh, layout)
    summary = plan.summary()
    told = [line.partition("note")[2].strip() for line in summary.splitlines() if "  note " in line]
    assert [one for one in told if "range" not in one] == [note] * bool(note)
    if "pipeline" in layout:
        assert "from stage to stage of pp" in plan.text
        assert "1f1b on pp, 4 micro-batches: stage " in summary
        assert "communication\n  none" not in summary


def test_stages_and_micro_batches_stand_side_by_side() -> None:
    layouts = "micro 8; pipeline pp interleaved(2); * -> none", "micro 4; pipeline pp 1f1b(+1); * -> none", "* -> none"
    plans = {f"{number}": priced("pp=2", layout) for number, layout in enumerate(layouts)}
    text = side_by_side(plans)
    rows = [line.split() for line in text.splitlines()]
    assert "2: the same shardings, and other stages\n" in f"{text}\n"
    assert "1: the same shardings\n" not in f"{text}\n"
    assert ["stages", "2,", "interleaved(2)", "2,", "1f1b(+1)", "-"] in rows
    assert ["micro-batches", "8", "4", "1"] in rows


def test_an_explanation_names_the_stages() -> None:
    graph = traced(gpt, layers=2, batch=8)
    plan = plan_under_layout(graph, autopar.Mesh("pp=2"), "micro 4; pipeline pp 1f1b; * -> none", REQUEST)
    expected = {
        "blocks.0.up.weight": "stored on stage 0 of 2",
        "tokens.weight": "stored on stage 1 of 2, and sent to stage 0",
        "blocks.0/add.1": "made on stage 0 of 2, and sent to stage 1",
        "blocks.1/add": "made on stage 1 of 2",
        "ids": "on all 2 stages",
    }
    for name, text in expected.items():
        assert f"  stage   {text}\n" in f"{plan.explain(name)}\n", name
    alone = plan_under_layout(graph, autopar.Mesh("dp=2"), "batch -> dp; * -> none", REQUEST)
    assert "stage" not in str(alone.explain("tokens.weight"))


def test_the_page_shows_the_fullest_stage() -> None:
    plan = priced("pp=4", "micro 16; pipeline pp 1f1b; batch -> none; * -> none")
    stages = plan.costs.stages
    fullest = max(stages, key=lambda stage: stage.memory.peak_bytes)
    step = lower_step(plan.graph, plan.decided).at(stages.index(fullest))
    moments = memory_over_time(step, fullest.memory)
    assert max(one.bytes for one in moments) == pytest.approx(plan.memory_bytes, rel=0.01)


# -- ops at other parts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "code", "text"),
    [
        ("pipeline pp 1f1b; op @layers.9 at part 0", "E1", "no module or op of the micro-batches 'layers.9'"),
        ("pipeline pp 1f1b; op @layers.1 at part 2", "E4", "there is no part 2: the pipeline has 2, from 0 to 1"),
        ("pipeline pp 1f1b; op @layers.1 at part 1", "E5", "layers.1/linear in part 1 feeds .* in part 0"),
        ("pipeline pp 1f1b; op @layers.1 at part 1; op @layers.*/linear at part 0", "E2", "cannot be at part"),
        ("pipeline pp 1f1b; cut pp before @layers.4; op @layers.4 at part 0", "E3", "begins part 1, and another line"),
        ("op @layers.1 at part 1", "E3", "'at part 1' is a part of no pipeline"),
    ],
)
def test_parts_that_cannot_be(lines: str, code: str, text: str) -> None:
    with pytest.raises(LayoutError, match=text) as error:
        priced("pp=2", f"micro 4; {lines}; * -> none")
    assert error.value.code == code
    assert "fix: " in str(error.value)
    # A mesh without the axis, or with one rank on it, has no parts.
    if "pipeline" in lines:
        assert priced("pp=1", f"micro 4; {lines}; * -> none").decided.assignment.pipelining is None


def test_strategies_and_searches_keep_ops_where_they_are_put() -> None:
    text = "micro 4; pipeline pp 1f1b; cut pp before @layers.4; op @/relu.3 at part 1; {}"
    plain, plan = (
        priced("pp=2", text.replace("op @/relu.3 at part 1; ", "").format("ddp")),
        priced("pp=2", text.format("ddp")),
    )
    searched = plan_graph(plan.graph, (autopar.Mesh("pp=2"),), text.format("* -> none"), REQUEST)
    stages = [one.decided.assignment.pipelining for one in (plain, plan, searched)]
    before, after, found = (one.parts for one in stages if one is not None)
    assert {op for op in before if before[op] != after[op]} == {"/relu.3"}
    assert found == after
    assert autopar.Plan.read(searched.text, searched.graph).decided == searched.decided


class Towers(nn.Module):
    """Two towers of equal layers, which the last op joins."""

    def __init__(self) -> None:
        super().__init__()

        def layer() -> nn.Module:
            return nn.Sequential(nn.Linear(1024, 1024, device="meta"), nn.ReLU())

        self.first, self.second = (nn.ModuleList(layer() for _ in range(4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.first:
            x = layer(x)
        for layer in self.second:
            y = layer(y)
        return (x + y)[:, :1].mean()


def test_cuts_balance_what_stands_elsewhere() -> None:
    graph = autopar.trace(Towers(), (torch.empty(4096, 1024, device="meta"),))
    first, second = ({f"{tower}.{layer}.0/linear" for layer in range(4)} for tower in ("first", "second"))
    cases = {
        "": first,
        "op @second at part 0; ": second | {"first.0.0/linear"},
        "op @second.0 at part 1; ": first,
        "op @first.0 at part 0; op @second.0 at part 0; ": first - {"first.3.0/linear"} | {"second.0.0/linear"},
    }
    for lines, expected in cases.items():
        text = f"micro 4; pipeline pp 1f1b; {lines}* -> none"
        plan = plan_under_layout(graph, autopar.Mesh("pp=2"), text, REQUEST)
        assert plan.decided.assignment.pipelining is not None
        parts = plan.decided.assignment.pipelining.parts
        assert {op for op, part in parts.items() if part == 0 and op.endswith("linear")} == expected
        assert autopar.Plan.read(plan.text, plan.graph).decided == plan.decided


# -- strategies with stages --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "layout", "batch", "count"),
    [
        ("pp=4", "pipeline", 64, 8),
        ("pp=4,dp=2", "pipeline", 64, 8),
        ("pp=4,dp=2", "pipeline", 24, 12),  # a rank has 12 rows
        ("pp=4,dp=2", "pipeline", 8, 4),
        ("pp=3", "pipeline pp interleaved(2); pipeline", 72, 6),
        ("pp=3", "pipeline pp interleaved(2); pipeline", 45, 9),
        ("pp=2", "micro ?{3, 16}; pipeline", 48, 16),
        ("pp=2", "micro 6; pipeline", 48, 6),
        ("pp=1,dp=2", "pipeline", 64, None),
    ],
)
def test_the_number_of_micro_batches_follows_from_the_batch(
    mesh: str, layout: str, batch: int, count: int | None
) -> None:
    plan = priced(mesh, layout, batch)
    assert plan.decided.micro == (None if count is None else MicroBatches(count))
    assert (plan.decided.assignment.pipelining is None) == (count is None)


@pytest.mark.parametrize(
    ("layout", "batch", "text"),
    [
        ("pipeline", 2, "no number of them divides 'batch', 1 on a rank"),
        ("pipeline pp interleaved(2); pipeline", 10, "no number of them divides 'batch', 5 on a rank"),
        ("pipeline pp 1f1b; * -> dp", 8, "the dims"),
        ("pipeline pp 1f1b; batch -> pp; * -> none", 8, "the axis 'pp' has the stages"),
        ("pipeline qq 1f1b; * -> none", 8, "there is no axis 'qq'"),
    ],
)
def test_without_a_number_that_divides(layout: str, batch: int, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        priced("pp=2,dp=2", layout, batch)


def test_a_search_chooses_the_micro_batches_of_a_strategy() -> None:
    graph = traced(gpt, layers=4, batch=8)
    for layout in ("pipeline", "pipeline pp 1f1b; batch -> dp; * -> none"):
        plan = plan_graph(graph, (autopar.Mesh("pp=2,dp=2"),), layout, REQUEST)
        assert plan.decided.micro is not None
        assert plan.decided.assignment.pipelining is not None
        priced_alone = plan_under_layout(graph, plan.mesh, layout, REQUEST)
        assert plan.step_seconds <= priced_alone.step_seconds * (1 + 1e-9)
        assert autopar.Plan.read(plan.text, plan.graph).costs == plan.costs


def test_strategies_with_stages_are_priced_where_the_mesh_has_their_axis() -> None:
    graph = traced(gpt, layers=4, batch=8)
    staged_names = {"megatron_3d(pp=pp, dp=none, tp=tp)", "pipeline(pp=pp, dp=tp)"}
    for mesh, layout, expected in (("pp=2,tp=2", "ddp(dp=none)", staged_names), ("dp=4", "ddp", set())):
        plan = plan_under_layout(graph, autopar.Mesh(mesh), layout, REQUEST)
        found = price_strategies(plan)
        staged = {name for name, one in found.items() if one.decided.assignment.pipelining is not None}
        assert staged == expected
        assert all(found[name].decided.micro == MicroBatches(4) for name in staged)
        setting = PlanningProblem.of(graph, plan.mesh.whole, plan.cluster, TrainingOptions())
        offered = {name for name, one in strategy_plans(setting) if one.assignment.pipelining is not None}
        assert bool(offered) == bool(expected)


def test_a_plan_has_stages_where_no_strategy_is_faster() -> None:
    """Weights are large beside the batch, and the links are slow; nine micro-batches divide the batch."""
    graph = autopar.trace(Layers(width=4093), (torch.empty(9 * 134, 4093, device="meta"),))
    plan = plan_graph(graph, (autopar.Mesh("pp=4@network"),), None, PlanRequest("h100", time_limit=1e-3, cache=False))
    assert plan.origin == "pipeline(pp=pp)"
    assert plan.decided.micro == MicroBatches(9)
    assert plan.bound_seconds is not None
    assert plan.bound_seconds <= plan.step_seconds
    assert autopar.Plan.read(plan.text, plan.graph).decided == plan.decided


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(6, 7), nn.Linear(7, 5), nn.BatchNorm1d(7)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu()).mean()


def test_no_stages_where_an_op_needs_the_whole_batch() -> None:
    """Statistics of the batch are refused as they are in a layout."""
    graph = autopar.trace(Normed(), (torch.empty(8, 6),))
    mesh = autopar.Mesh("pp=2")
    with pytest.raises(LayoutError, match="cannot split the batch"):
        plan_under_layout(graph, mesh, "pipeline", REQUEST)
    plan = plan_under_layout(graph, mesh, "ddp", REQUEST)
    setting = PlanningProblem.of(graph, mesh.whole, plan.cluster, TrainingOptions())
    for names in (price_strategies(plan), dict(strategy_plans(setting))):
        assert names
        assert not any(name.startswith("pipeline") for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["micro 2", "micro 2; pipeline pp ?"])
@pytest.mark.parametrize("architecture", ["bart", "bert", "gemma2", "mixtral", "opt", "phi", "t5", "vit"])
def test_architectures(architecture: str, layout: str) -> None:
    graph = traced(hf, architecture, batch=4, device="meta")
    mesh = "pp=2,dp=2" if "pp" in layout else "dp=2,tp=2"
    plan = plan_graph(graph, (autopar.Mesh(mesh),), layout, REQUEST)
    again = autopar.Plan.read(plan.text, plan.graph)
    assert again.decided == plan.decided
    assert again.costs == plan.costs
    assert again.text.splitlines()[2:] == plan.text.splitlines()[2:]
