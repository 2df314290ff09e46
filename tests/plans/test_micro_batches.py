"""Plans with micro-batches: their price, their text, the search for their number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.cost.lowered_step import lower_step
from autopar.ir.precision import PRESETS
from autopar.plans.find import PlanRequest, plan_graph
from autopar.sharding.layout.language import parse_layout
from autopar.sharding.time_slice import propagate_plan, slice_in_time
from autopar.solver.infeasible import NoFeasiblePlan
from examples.gpt import gpt
from examples.hf import hf


class Blocks(nn.Module):
    """Layers whose activations are the most of their memory."""

    def __init__(self, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, device="meta") for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return x.square().mean()


def planned(layout: str | None, batch: int = 4096, **more: Any) -> autopar.Plan:
    inputs = (torch.empty(batch, 256, device="meta"),)
    return autopar.plan(Blocks(), "dp=2", inputs, layout=layout, cluster="h100", cache=False, **more)


@pytest.mark.parametrize(
    "model", ["gpt", "llama", pytest.param("t5", marks=pytest.mark.slow), pytest.param("bert", marks=pytest.mark.slow)]
)
def test_the_graph_of_a_micro_batch_is_that_of_a_smaller_batch(model: str) -> None:
    """Sizes, work and memory are those of a trace of one micro-batch."""
    whole, part = (autopar.trace(*(gpt(batch=n) if model == "gpt" else hf(model, batch=n))) for n in (8, 2))
    (micro,) = parse_layout("micro 4")
    sliced = slice_in_time(whole, micro)  # type: ignore[arg-type]
    # Values that follow from no input, as positions, are computed once for the whole batch.
    given = set(whole.inputs)
    for node, found, wanted in zip(whole.nodes, sliced.nodes, part.nodes, strict=True):
        if given.isdisjoint(node.operands):
            continue
        given.update(name for name in node.outputs if name is not None)
        assert found.sizes == wanted.sizes, node.name
        for name in filter(None, found.outputs):
            assert sliced.tensors[name].shape == part.tensors[name].shape
        saved = sliced.footprints[node.node].internal_bytes
        assert saved == pytest.approx(part.footprints[node.node].internal_bytes, abs=64), node.name
    assert len(given) > len(whole.inputs)


@pytest.mark.parametrize("layout", ["micro 4", "micro 4; batch -> dp; * -> none", "micro 8; fsdp(fsdp=dp)"])
def test_a_plan_is_read_as_it_was_written(layout: str) -> None:
    plan = planned(layout)
    assert layout.split(";")[0] in plan.text.splitlines()
    again = autopar.Plan.read(plan.text, plan.graph)
    assert again.decided == plan.decided
    assert again.costs == plan.costs


def test_micro_batches_take_less_memory_and_more_time() -> None:
    plans = [planned(f"micro {count}; batch -> dp; * -> none") for count in (1, 4, 16)]
    saved = [plan.costs.memory.saved_bytes for plan in plans]
    assert saved[0] == pytest.approx(4 * saved[1], rel=0.01)
    assert saved[1] == pytest.approx(4 * saved[2], rel=0.01)
    assert plans[0].step_seconds < plans[1].step_seconds < plans[2].step_seconds
    assert plans[0].costs.flops == plans[1].costs.flops == plans[2].costs.flops


@pytest.mark.parametrize("precision", list(PRESETS))
@pytest.mark.parametrize("layout", ["micro 4; batch -> dp; * -> none", "micro 4; pipeline dp 1f1b; * -> none"])
def test_steps_in_any_precision_are_planned_without_processes(layout: str, precision: str) -> None:
    """Ranks that scale a loss agree about gradients that overflow: a plan alone has no group for that."""
    plan = planned(layout, precision=precision)
    assert plan.decided.options.precision == PRESETS[precision]
    assert plan.step_seconds > 0.0


@pytest.mark.parametrize(("rest", "gathers", "reductions"), [("", 1, 1), ("regather @*; ", 8, 4)])
def test_parameters_are_gathered_as_they_are_at_run_time(rest: str, gathers: int, reductions: int) -> None:
    """Once in a call, or in the forward and the backward of each micro-batch."""
    graph = autopar.trace(Blocks(), (torch.empty(64, 256, device="meta"),))
    text = f"micro 4; {rest}batch -> dp; * -> none; param, grad, opt {{ * -> dp | none }}"
    plan = propagate_plan(graph, parse_layout(text), {"dp": 2})  # type: ignore[arg-type]
    costs = autopar.evaluate(graph, plan, autopar.load_cluster("h100"))
    counts: dict[str, int] = {}
    for one in costs.communication:
        if one.of == "parameters":
            counts[one.kind] = counts.get(one.kind, 0) + one.count
    buckets = len([one for one in lower_step(graph, plan).buckets if one.gathers])
    assert counts["all_gather"] == gathers * buckets
    assert counts["reduce_scatter"] == reductions * buckets


def test_the_search_settles_the_number() -> None:
    whole = planned(None)
    assert whole.decided.micro is None
    limit = whole.costs.memory.peak_bytes / 3
    plan = planned("micro ?; batch -> dp; * -> none", memory=limit)
    assert plan.decided.micro is not None
    assert plan.fits
    assert planned("micro ?{2, 1}; batch -> dp; * -> none").decided.micro is None, "less time"


def test_a_batch_that_is_too_large_gets_micro_batches() -> None:
    graph = autopar.trace(Blocks(layers=2), (torch.empty(4096, 256, device="meta"),))
    mesh = autopar.Mesh("dp=1")
    least = plan_graph(graph, (mesh,), "recompute full @layers.*", PlanRequest("h100", cache=False)).memory_bytes
    request = PlanRequest("h100", least / 4, cache=False)
    plan = plan_graph(graph, (mesh,), None, request)
    assert plan.fits
    assert plan.decided.micro is not None
    with pytest.raises(NoFeasiblePlan, match="no plan was found that fits"):
        plan_graph(graph, (mesh,), None, replace(request, memory=2**20))


def test_refusals() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    with pytest.raises(autopar.LayoutError, match="E5: micro 2 cannot split the batch"):
        autopar.plan(model, "dp=2", (torch.empty(8, 3, 16, 16),), layout="micro 2", cluster="h100", cache=False)
    with pytest.raises(autopar.LayoutError, match="E5: micro 2 halves cannot split the batch") as halves:
        autopar.plan(model, "dp=2", (torch.empty(8, 3, 16, 16),), layout="micro 2 halves", cluster="h100", cache=False)
    assert "^" in str(halves.value), "it shows the statement"
    assert "fix: micro 1, or " in str(halves.value)
    with pytest.raises(
        autopar.LayoutError, match=r"micro 3(.|\n)*fix: write 'micro 2' or 'micro 4', or give a batch of"
    ):
        planned("micro 3")
    with pytest.raises(autopar.LayoutError, match="dp = 2 does not divide 1, in one of 4096 micro-batches"):
        planned("micro 4096; batch -> dp; * -> none")
    with pytest.raises(autopar.LayoutError, match="one 'micro' line"):
        parse_layout("micro 3; micro ?")
    assert str(parse_layout("micro ?{8, 16} of images")) == "micro ?{8, 16} of images\n"
