"""Plans of the planner run: on simulated ranks the results and the gradients are those of one process."""

from __future__ import annotations

import random

import pytest
import torch

import autopar
from autopar.cost.hardware.cluster import load_cluster
from autopar.ir.graph import NamedGraph
from autopar.mesh import SubMesh
from autopar.sharding.bound_layout import BoundLayout
from autopar.sharding.layout.language import Layout
from autopar.sharding.options import TrainingOptions
from autopar.solver.model.build import build, plan_of
from autopar.solver.setting import PlanningProblem
from autopar.solver.solve import solve_plan
from examples.gpt import gpt
from tests.ranks import difference_of

AXES = {"dp": 2, "tp": 2}
CLUSTER = load_cluster("h100")
Traced = tuple[NamedGraph, NamedGraph, list[torch.Tensor]]
"""A graph in single precision, for which there are prices; the same in double precision; inputs."""


@pytest.fixture(scope="module")
def traced() -> Traced:
    torch.manual_seed(0)
    model, inputs = gpt(layers=1, d_model=16, heads=4, vocab=32, seq=8, batch=4)
    return autopar.trace(model, inputs), autopar.trace(model.double(), inputs), list(inputs.values())


def test_a_solved_plan_computes_what_one_process_does(traced: Traced) -> None:
    graph, exact, inputs = traced
    assert difference_of(exact, solve_plan(graph, AXES, CLUSTER, time_limit=3600).plan.assignment, inputs) < 1e-9


@pytest.mark.parametrize("seed", range(6))
def test_whatever_may_be_decided_computes_the_same(traced: Traced, seed: int) -> None:
    graph, exact, inputs = traced
    setting = PlanningProblem.of(graph, SubMesh.of(AXES), CLUSTER, TrainingOptions())
    model = build(setting, BoundLayout(graph, Layout(()), AXES), regather=True)
    draw = random.Random(seed)
    chosen = [draw.randrange(len(variable.states)) for variable in model.variables]
    assert difference_of(exact, plan_of(model, chosen).assignment, inputs) < 1e-9
