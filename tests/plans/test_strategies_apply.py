"""A strategy is dealt no axis of the mesh for dims that the model lacks."""

from __future__ import annotations

from collections.abc import Set

import pytest

import autopar
from autopar.cost.hardware.cluster import load_cluster
from autopar.mesh import Mesh, SubMesh
from autopar.plans.find import PlanRequest, plan_under_layout
from autopar.plans.strategies import price_strategies
from autopar.sharding.layout.language import applies_to, load_strategy, usable_axes
from autopar.sharding.options import TrainingOptions
from autopar.solver.published_strategies import strategy_plans
from autopar.solver.setting import PlanningProblem
from examples.gpt import gpt
from examples.moe import moe
from tests.traced import traced

TEXT = ("batch", "seq", "d_model", "heads", "d_ff", "vocab")


@pytest.mark.parametrize(
    ("strategy", "dims", "usable"),
    [
        ("ddp", TEXT, {"dp"}),
        ("fsdp", TEXT, {"fsdp"}),
        ("zero1", ("rows",), {"dp"}),
        ("gshard_moe", TEXT, {"dp"}),
        ("gshard_moe", (*TEXT, "expert"), {"dp", "ep"}),
        ("spatial", TEXT, {"dp"}),
        ("spatial", ("batch", "height", "width"), {"dp", "sy", "sx"}),
        ("spatial", ("batch", "width"), {"dp", "sx"}),
        ("megatron", ("batch", "height", "width"), {"dp"}),
        ("megatron_sp", ("batch", "seq2"), {"dp", "tp"}),
    ],
)
def test_which_axes_a_model_has_a_use_for(strategy: str, dims: tuple[str, ...], usable: Set[str]) -> None:
    assert set(usable_axes(load_strategy(strategy), dims)) == usable


def test_a_strategy_is_not_faster_by_splitting_nothing() -> None:
    """On a model so small that nothing pays, the strategies are still listed under their own names."""
    plan = plan_under_layout(traced(gpt), Mesh("dp=2"), "ddp", PlanRequest("h100"))
    names = list(price_strategies(plan))
    assert {"ddp(dp=dp)", "fsdp(fsdp=dp)", "zero1(dp=dp)", "a layout that splits nothing"} <= {*names}
    assert not any(name.startswith(("gshard_moe", "spatial")) for name in names)


@pytest.mark.parametrize(
    ("strategy", "dims", "applies"),
    [
        ("ddp", TEXT, True),
        ("gshard_moe", TEXT, False),
        ("gshard_moe", (*TEXT, "expert"), True),
        ("spatial", ("batch", "width"), True),
        ("megatron", TEXT, True),
    ],
)
def test_which_strategies_apply(strategy: str, dims: tuple[str, ...], applies: bool) -> None:
    assert applies_to(load_strategy(strategy), dims) == applies


@pytest.mark.parametrize(("model", "has_experts"), [(gpt, False), (moe, True)])
def test_strategies_without_their_dims_are_not_listed(model: object, has_experts: bool) -> None:
    graph = autopar.trace(*(gpt() if model is gpt else moe()))
    setting = PlanningProblem.of(graph, SubMesh.of({"dp": 2, "tp": 2}), load_cluster("local-cpu"), TrainingOptions())
    plan = plan_under_layout(graph, Mesh("dp=2,tp=2"), "batch -> dp; * -> none", PlanRequest("local-cpu"))
    for names in ([name for name, _ in strategy_plans(setting)], list(price_strategies(plan))):
        assert not any(name.startswith("spatial") for name in names)
        assert any(name.startswith("gshard_moe") for name in names) == has_experts
        assert any(name.startswith("megatron(") for name in names)
    assert "ddp(dp=dp)" in [name for name, _ in strategy_plans(setting)], "an axis of the mesh may be idle"
