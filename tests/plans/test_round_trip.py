"""A plan's text says all of it: completed, it gives the same decisions, whoever made them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import LayoutError
from autopar.ir.graph import NamedGraph
from autopar.mesh import Mesh
from autopar.plans.find import PlanRequest, plan_under_layout
from autopar.plans.plan import Plan
from autopar.plans.to_layout import write_layout
from autopar.sharding.assignment import Assignment
from autopar.sharding.layout.language import (
    axes_of,
    choose_layout,
    load_strategy,
    parse_layout,
    print_layout,
    strategy_names,
)
from autopar.sharding.layout.syntax import Hole, TensorPattern
from autopar.sharding.propagation import propagate
from autopar.tracing.trace import trace
from examples.gpt import gpt
from examples.hf import hf
from examples.moe import moe
from examples.resnet import resnet
from tests.runtime.random_decisions import random_decisions
from tests.runtime.random_programs import program_of
from tests.traced import traced

MODELS = {"gpt": gpt, "moe": moe, "resnet": resnet, "llama": lambda: hf("llama"), "t5": lambda: hf("t5")}
MESHES: tuple[Mapping[str, int], ...] = (
    {"dp": 2, "ep": 2}, {"dp": 1, "sy": 2, "sx": 2}, {"dp": 2, "fsdp": 2, "tp": 2},
)  # fmt: skip
SMALL_MESHES: tuple[Mapping[str, int], ...] = (
    {"a": 2}, {"a": 3}, {"a": 4}, {"a": 1, "b": 3}, {"a": 2, "b": 2}, {"a": 3, "b": 2}, {"a": 2, "b": 2, "c": 2},
)  # fmt: skip


def check(graph: NamedGraph, assignment: Assignment) -> str:
    """The text of decisions, which says all of them."""
    text = print_layout(write_layout(graph, assignment).layout)
    layout = parse_layout(text)
    assert not any(isinstance(value, Hole) for value in _terms(layout)), "a plan has no holes"
    again = propagate(graph, layout, assignment.axes)
    assert (again.stored, again.ops, again.values) == (assignment.stored, assignment.ops, assignment.values), text
    if assignment.gather_policies:
        assert again == assignment, text
    return text


def _terms(layout: object) -> list[object]:
    statements = list(layout)  # type: ignore[call-overload]
    rules = [rule for statement in statements for rule in getattr(statement, "rules", ())]
    places = [value for one in (*statements, *rules) if isinstance(value := getattr(one, "place", None), TensorPattern)]
    return [term for place in places for term in place.terms]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:strategy .* splits nothing:autopar.errors.AutoparWarning")
@pytest.mark.parametrize("model", MODELS)
def test_what_experts_wrote(model: str) -> None:
    torch.manual_seed(0)
    graph = trace(*MODELS[model]())
    tried = staged = 0
    for axes, name in product(MESHES, strategy_names()):
        strategy = load_strategy(name)
        roles = axes_of(strategy)
        for order in dict.fromkeys((roles, roles[::-1])):
            meaning = {role: tuple(axes)[place : place + 1] for place, role in enumerate(order)}
            layout = strategy.on_axes(meaning)
            try:
                if layout.pipeline is None and layout.drift is None:
                    check(graph, propagate(graph, layout, axes))
                else:  # the text has stages and micro-batches too, or replicas
                    plan = plan_under_layout(graph, Mesh(**axes), layout, PlanRequest("h100"))
                    assert Plan.read(plan.text, plan.graph).decided == plan.decided
                    staged += layout.pipeline is not None
            except LayoutError:
                continue
            tried += 1
    assert tried > 8
    assert staged


@pytest.mark.parametrize("first_seed", [0, 50])
def test_random_decisions(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 4):
        torch.manual_seed(seed)
        program, draw = program_of(seed), random.Random(seed)
        graph = trace(program, (program.example(),), dims=program.dims)
        for _ in range(2):
            check(graph, random_decisions(draw, graph, draw.choice(SMALL_MESHES)))


@pytest.mark.parametrize(
    "text",
    [
        "batch -> dp; * -> none; param, grad, opt { * -> fsdp | none }; regather @blocks.0.*",
        "batch -> dp; * -> none; param, grad, opt { * -> fsdp | none }; regather @*",
        "batch -> dp*fsdp pad; * -> none; grad, opt { * -> fsdp | none }",
        "batch -> fsdp*dp pad; * -> none; opt { * -> fsdp*dp | none }",
        "batch -> dp; d_ff -> fsdp; * -> none; @blocks.*.down/linear[* -> none] + partial(fsdp)",
        "batch -> dp; * -> none; @blocks.1.*norm.weight[* -> none] + broadcast(fsdp)",
        "batch -> dp; * -> none; op @blocks.0.up/linear[n -> fsdp]",
        "batch -> dp; * -> none; recompute full @blocks.*",
        "batch -> dp; * -> none; recompute selective @blocks.1",
        "batch -> dp; (heads, d_ff) -> fsdp; * -> none; use@blocks.0.* { * -> none }",
    ],
)
def test_layouts_by_hand(text: str) -> None:
    graph = traced(gpt)
    axes = {"dp": 2, "fsdp": 2}
    found = check(graph, propagate(graph, parse_layout(text), axes))
    again = propagate(graph, parse_layout(found), axes)
    assert print_layout(write_layout(graph, again).layout) == found, "written again, it is the same"


def test_repeated_layers_are_one_line() -> None:
    axes = {"dp": 2, "tp": 2}
    lines = []
    for layers in (2, 12):
        graph = traced(hf, "llama", batch=4, num_hidden_layers=layers)
        assignment = propagate(graph, choose_layout("megatron_sp", axes), axes)
        lines.append(len(check(graph, assignment).splitlines()))
    assert lines[1] <= lines[0] + 4


def test_a_layer_that_is_unlike_the_others_has_its_own_lines() -> None:
    graph = traced(gpt, layers=4)
    axes = {"tp": 2}
    text = "* -> none; @blocks.2.up.weight[d_ff -> tp]; @blocks.2.up.bias[d_ff -> tp]"
    assignment = propagate(graph, parse_layout(text), axes)
    assert "blocks.2" in check(graph, assignment)


def test_holdings_are_compared() -> None:
    """The check above would see another holding."""
    graph = traced(gpt)
    axes = {"fsdp": 2}
    one = propagate(graph, choose_layout("fsdp", axes), axes)
    name, policy = next((name, policy) for name, policy in one.gather_policies.items() if not policy.regather)
    other = replace(one, gather_policies={**one.gather_policies, name: replace(policy, regather=True)})
    assert write_layout(graph, one) != write_layout(graph, other)


class Shared(nn.Module):
    """A norm and a layer that is whole where it is used; other layers are split over `d_ff`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8, bias=False)
        self.up, self.down, self.last = nn.Linear(8, 16, False), nn.Linear(16, 8, False), nn.Linear(16, 8, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(self.norm(x)).relu()
        return (self.last(hidden) + self.down(hidden)).square().sum()


def test_tensors_that_are_stored_alike_and_used_unlike() -> None:
    """Norm and layer are stored in one way. Rules for all tensors get the use of the norm right, not of the layer."""
    layout = """
        batch -> dp
        d_ff -> tp
        * -> none
        param@norm.weight, grad@norm.weight, opt@norm.weight { d_model -> dp*tp, * -> none }
        param@last.weight, grad@last.weight, opt@last.weight { d_model -> dp*tp, * -> none }
        use@last.weight { * -> none }
    """
    given = (torch.randn(8, 8),)
    dims = {"x": "batch d_model", "up.weight": "d_ff d_model", "last.weight": "d_model d_ff"}
    plan = autopar.plan(Shared(), "dp=2,tp=2", given, layout=layout, dims=dims, cluster="h100", cache=False)
    assert "use@last.weight { * -> none }" in plan.text
    again = autopar.Plan.read(plan.text, autopar.trace(Shared(), given, dims=dims))
    assert again.text == plan.text
