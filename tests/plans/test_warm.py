"""A changed model is planned from the plan that was found for it before."""

from __future__ import annotations

from pathlib import Path

import pytest

import autopar
from autopar.cost.costs import Costs
from autopar.cost.hardware.cluster import load_cluster
from autopar.ir.graph import NamedGraph
from autopar.ir.precision import PRESETS
from autopar.mesh import Mesh
from autopar.plans.find import PlanRequest, plan_graph
from autopar.sharding.assignment import StepPlan
from autopar.sharding.options import TrainingOptions
from autopar.solver.search.phases import Incumbent
from examples.gpt import gpt


def traced(layers: int, batch: int) -> NamedGraph:
    model, inputs = gpt(batch=batch, seq=8, d_model=16, heads=2, vocab=16, layers=layers)
    return autopar.trace(model, inputs)


def test_a_changed_model_begins_from_the_old_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a layer more, and with another batch: what the old plan says of tensors that are still there is kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    mesh, asked = (Mesh("dp=2"),), PlanRequest(cluster=load_cluster("h100"), time_limit=60)
    old = plan_graph(traced(layers=1, batch=4), mesh, None, asked).decided.assignment.stored
    offered: list[tuple[str, StepPlan, float]] = []
    offer = Incumbent.offer

    def told(incumbent: Incumbent, origin: str, plan: StepPlan) -> Costs:
        costs = offer(incumbent, origin, plan)
        offered.append((origin, plan, costs.step_seconds))
        return costs

    monkeypatch.setattr(Incumbent, "offer", told)
    for layers, batch in ((2, 4), (1, 8)):
        offered.clear()
        found = plan_graph(traced(layers, batch), mesh, None, asked)
        origin, first, seconds = offered[0]
        assert origin == "an earlier plan"
        assert {name: first.assignment.stored[name] for name in old} == old
        assert found.step_seconds <= seconds


def test_an_earlier_plan_takes_the_options_of_the_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    graph = traced(layers=1, batch=4)
    for options in (TrainingOptions(), TrainingOptions(optimizer="sgd", precision=PRESETS["fp32"])):
        asked = PlanRequest(load_cluster("h100"), options=options, time_limit=60)
        found = plan_graph(graph, (Mesh("dp=2"),), None, asked)
        given = (found.decided.options.optimizer, found.decided.options.precision)
        assert given == (options.optimizer, options.precision), found.origin
