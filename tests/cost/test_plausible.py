"""FLOPs of a step counted by hand, and what is said of costs that cannot be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar
from autopar.cost.compute.expected_flops import expected_flops
from autopar.cost.hardware.cluster import load_cluster
from autopar.cost.plausible import doubts
from autopar.ir.precision import OWN
from examples.hf import hf

QUICK = ("llama", "t5", "mixtral")
LONG = ("gpt2", "gemma2", "bert", "deepseek_v3", "gpt_oss", "whisper", "bart")


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in LONG)])
def test_flops_by_rules_equal_those_by_hand(name: str) -> None:
    model, inputs = hf(name, batch=4)
    plan = autopar.plan(model, "dp=2", inputs, cluster="h100", layout="micro 2; batch -> dp")
    expected = expected_flops(plan.graph)
    if any(isinstance(module, nn.Conv1d) for module in model.modules()):
        assert expected is None
        return
    assert expected is not None
    assert plan.costs.flops == pytest.approx(expected.total, rel=1e-3)
    assert "implausible" not in plan.summary()


def test_active_parameters_are_those_of_the_experts_of_a_token() -> None:
    model, inputs = hf("mixtral", num_local_experts=8, num_experts_per_tok=2, tie_word_embeddings=False)
    experts = sum(tensor.numel() for name, tensor in model.named_parameters() if "experts" in name)
    others = sum(
        tensor.numel()
        for name, tensor in model.named_parameters()
        if tensor.ndim == 2 and "experts" not in name and "embed" not in name
    )
    expected = expected_flops(autopar.trace(model, inputs))
    assert expected is not None
    assert expected.active_parameters == pytest.approx(others + experts * 2 / 8)
    assert expected.tokens == inputs["input_ids"].numel()


@pytest.fixture(scope="module")
def plan() -> autopar.Plan:
    return autopar.plan(nn.Linear(64, 64, bias=False), "dp=2", (torch.zeros(32, 64),), cluster="h100", layout="ddp")


@pytest.mark.parametrize("times", [6.0, 0.5])
def test_flops_far_from_those_by_hand_are_told(plan: autopar.Plan, times: float) -> None:
    costs = replace(plan.costs, flops=plan.costs.flops * times)
    found = doubts(plan.graph, costs, load_cluster("h100").device, OWN)
    by_hand = "those counted by hand (4.10 k active parameters, 32 rows)"
    assert found == (f"implausible: {costs.flops:.3g} FLOPs a step are {times:.3g} times {by_hand}",)
    assert not doubts(plan.graph, plan.costs, load_cluster("h100").device, OWN)


def test_a_step_faster_than_a_large_product_is_told(plan: autopar.Plan) -> None:
    device = load_cluster("h100").device
    (found,) = doubts(plan.graph, replace(plan.costs, mfu=0.99), device, OWN)
    assert found.startswith("implausible: 99% of the peak is more than a large product reaches, ")
