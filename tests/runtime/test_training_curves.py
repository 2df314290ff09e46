"""Twenty steps of AdamW under every strategy: the losses are those of one process.

The transformers train in float32. A ResNet with BatchNorm under AdamW is chaotic there: on one process its losses in
float32 and in float64 are two percent apart after twenty steps. So it trains in float64.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from examples.gpt import gpt
from examples.moe import moe
from examples.resnet import resnet
from tests.gaps import number
from tests.runtime.launcher import launch
from tests.runtime.training import Inputs, adamw, batches, losses

STEPS = 20

GPT = (
    ("ddp", "dp=4"),
    ("ddp(dp=a*b)", "a=2,b=2"),
    ("zero1", "dp=4"),
    ("zero1(dp=a*b)", "a=2,b=2"),
    ("fsdp", "fsdp=4"),
    ("fsdp(fsdp=a*b)", "a=2,b=2"),
    ("megatron", "dp=1,tp=4"),
    ("megatron", "dp=2,tp=2"),
    ("megatron_sp", "tp=4"),
    ("megatron_sp", "dp=2,tp=2"),
    ("fsdp_tp", "fsdp=1,tp=4"),
    ("fsdp_tp", "fsdp=2,tp=2"),
)
MOE = (("gshard_moe", "ep=4"), ("gshard_moe", "dp=2,ep=2"), ("fsdp", "fsdp=4"))
RESNET = (("spatial", "sy=2,sx=2"), ("spatial", "dp=2,sy=2"), ("ddp", "dp=4"))


def curves(model: nn.Module, inputs: Inputs, cases: tuple[tuple[str, str], ...]) -> dict[str, float]:
    """The largest relative difference of a loss from that of one process, under each layout."""
    data = batches(inputs, STEPS)
    alone = copy.deepcopy(model)
    expected = torch.tensor(losses(alone, data, adamw(alone)), dtype=torch.float64)
    found = {}
    for layout, mesh in cases:
        parallel = autopar.parallelize(model, mesh, inputs, layout=layout)
        other = torch.tensor(losses(parallel, data, adamw(parallel)), dtype=torch.float64)
        found[f"{layout} on {mesh}"] = number(((other - expected) / expected).abs().max())
    return found


def double(model: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
    return model.double(), {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}


def train_all() -> dict[str, float]:
    torch.manual_seed(0)
    found: dict[str, float] = {}
    models: tuple[tuple[Any, tuple[tuple[str, str], ...]], ...] = (
        (gpt(batch=4, seq=12, vocab=104), GPT),
        (moe(batch=4, seq=12), MOE),
        (double(*resnet(depth=10, width=4, image=256, batch=4, loss=True, train=True)), RESNET),
    )
    for (model, inputs), cases in models:
        for case, worst in curves(model, inputs, cases).items():
            found[f"{type(model).__name__}: {case}"] = worst
    return found


@pytest.mark.slow
def test_losses_are_those_of_one_process() -> None:
    for found in launch(train_all, ranks=4):
        assert len(found) == len(GPT) + len(MOE) + len(RESNET)
        far = {case: worst for case, worst in found.items() if not worst < 1e-5}
        assert not far
