"""The examples run, train, and are traced without a change to what they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from examples.custom_op import custom_op
from examples.gpt import gpt
from examples.llama3_8b import llama3_8b
from examples.mlp import mlp
from examples.moe import moe
from examples.resnet import resnet
from tests.equivalence import assert_equivalent


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        (mlp, {}),
        (mlp, {"loss": True, "dropout": 0.1}),
        (gpt, {}),
        (gpt, {"loss": False, "dropout": 0.1}),
        (resnet, {"depth": 10, "loss": True}),
        (resnet, {"depth": 10, "train": True}),
        (resnet, {"depth": 50, "train": True, "loss": True}),
        (moe, {}),
        (custom_op, {}),
    ],
    ids=lambda value: value.__name__ if callable(value) else ",".join(value) or "default",
)
def test_traced_example_equals_the_model(target: Callable[..., Any], arguments: dict[str, Any]) -> None:
    torch.manual_seed(0)
    assert_equivalent(*target(**arguments))


@pytest.mark.parametrize("target", [mlp, gpt, resnet, moe])
def test_example_on_meta_has_no_memory(target: Callable[..., Any]) -> None:
    model, inputs = target(device="meta")
    values = inputs.values() if isinstance(inputs, dict) else inputs
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers(), *values)} == {"meta"}


def test_llama3_8b_has_the_real_sizes() -> None:
    model, inputs = llama3_8b()
    assert sum(parameter.numel() for parameter in model.parameters()) == 8_030_261_248
    assert model.get_parameter("model.layers.0.self_attn.k_proj.weight").shape == (1024, 4096)
    assert inputs["input_ids"].shape == (16, 8192)


def test_moe_experts_take_no_more_than_their_capacity() -> None:
    torch.manual_seed(0)
    model, _ = moe(capacity_factor=1.0, seq=40, experts=4)
    x = torch.randn(2, 40, 48)
    weights, _ = model.blocks[0].experts.router(x)
    places = (weights > 0).sum(dim=1)
    assert weights.shape == (2, 40, 4, 10)
    assert places.max() == 1, "a place in a queue is given once"
    sent = (weights > 0).sum(dim=(2, 3))
    assert sent.max() == 2
    assert sent.min() < 2, "with so little room some tokens are dropped"
