"""Published strategies that do not fit, with layers recomputed and parameters gathered again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache

import pytest
import torch

import autopar
from autopar.cost.evaluate import evaluate
from autopar.cost.hardware.cluster import load_cluster
from autopar.ir.graph import NamedGraph
from autopar.mesh import SubMesh
from autopar.sharding.assignment import StepPlan
from autopar.sharding.bound_layout import BoundLayout
from autopar.sharding.layout.language import Layout, choose_layout, parse_layout
from autopar.sharding.options import TrainingOptions
from autopar.sharding.time_slice import propagate_plan
from autopar.solver.less_memory import offer_with_less_memory
from autopar.solver.search.phases import Incumbent
from autopar.solver.setting import PlanningProblem
from autopar.solver.solve import solve_plan
from benchmarks.models import causal_lm
from examples.gpt import gpt

H100 = load_cluster("h100")
AXES = SubMesh({"dp": 8})
MODES = ("", "recompute selective @{0}; ", "recompute full @{0}; ")


@cache
def traced() -> NamedGraph:
    return autopar.trace(*gpt(layers=8, d_model=2048, heads=16, vocab=4096, seq=1024, batch=16, device="meta"))


def incumbent_of(limit: float) -> Incumbent:
    setting = PlanningProblem.of(traced(), AXES, H100, TrainingOptions("loss"))
    return Incumbent(setting, limit, time.monotonic(), None, BoundLayout(traced(), Layout(()), AXES))


def by_hand(graph: NamedGraph, axes: SubMesh, strategy: str, layers: str) -> Iterator[StepPlan]:
    """Yield a strategy with all layers recomputed in a mode, their parameters kept or gathered again."""
    for mode in MODES:
        for again in ("", "regather @{0}.*"):
            lines = parse_layout((mode + again).format(layers)) if mode + again else Layout(())
            said = choose_layout(strategy, axes)
            yield propagate_plan(graph, Layout((*said, *lines), said.name), axes).with_options(TrainingOptions("loss"))


def test_a_strategy_fits_at_the_least_cost_of_time() -> None:
    """No way of all layers alike, written as a layout, fits and is faster; between two ways, layers are mixed."""
    plans = list(by_hand(traced(), AXES, "fsdp", "blocks.*"))
    every = [evaluate(traced(), plan, H100) for plan in plans]
    least, most = (bound(one.limited_bytes for one in every) for bound in (min, max))
    assert least < 0.7 * most
    mixed = 0
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        incumbent = incumbent_of(least + share * (every[0].limited_bytes - least))
        offer_with_less_memory(incumbent, "fsdp", plans[0], every[0])
        assert incumbent.plan is not None
        assert incumbent.costs == evaluate(traced(), incumbent.plan, H100)
        assert incumbent.costs.limited_bytes <= incumbent.limit
        fitting = [one.step_seconds for one in every if one.limited_bytes <= incumbent.limit]
        assert every[0].step_seconds < incumbent.seconds <= min(fitting)
        mixed += incumbent.seconds < min(fitting)
    assert mixed >= 3


def test_nothing_is_offered_that_cannot_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = next(by_hand(traced(), AXES, "fsdp", "blocks.*"))
    costs, offered = evaluate(traced(), plan, H100), list[str]()
    incumbent, offer = incumbent_of(1e6), Incumbent.offer
    monkeypatch.setattr(Incumbent, "offer", lambda *given: (offered.append(given[1]), offer(*given))[1])
    offer_with_less_memory(incumbent, "fsdp", plan, costs)
    assert incumbent.plan is None
    # The ways of least memory alone.
    assert len(offered) <= 3
    # Layers that a layout recomputes are left as they are.
    offer_with_less_memory(incumbent, "fsdp", plan.with_recompute({"blocks.0": "full"}), costs)
    assert len(offered) <= 3


@pytest.mark.slow
def test_no_textbook_plan_of_a_mixture_is_faster() -> None:
    """The first layers of DeepSeek-V3 on 64 devices, of which no strategy fits as it is."""
    torch.set_default_dtype(torch.bfloat16)
    model, inputs = causal_lm("DeepseekV3", 5, 64, 4096, {})
    torch.set_default_dtype(torch.float32)
    graph, axes = autopar.trace(model, inputs), SubMesh({"dp": 8, "ep": 8})
    found = solve_plan(graph, axes, H100, options=TrainingOptions("loss"), time_limit=120)
    fitting = []
    for strategy in ("fsdp(fsdp=dp*ep)", "gshard_moe(dp=none, ep=dp*ep)", "fsdp_tp(fsdp=dp, tp=ep)"):
        for plan in by_hand(graph, axes, strategy, "model.layers.*"):
            costs = evaluate(graph, plan, H100)
            if costs.limited_bytes <= H100.device.memory_bytes:
                fitting.append(costs.step_seconds)
    assert len(fitting) >= 3
    assert found.costs.step_seconds <= 1.005 * min(fitting)
