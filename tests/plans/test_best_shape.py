"""Plans on any mesh of models whose time is that of launches and messages, and of models that take no stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import autopar

DEVICES = 16


def planned(model: nn.Module, inputs: dict[str, Any], mesh: str) -> autopar.Plan:
    devices = DEVICES if mesh == "?" else None
    return autopar.plan(
        model, mesh, inputs, cluster="h100", devices=devices, precision="bf16", time_limit=60, cache=False
    )


def vit(batch: int = 64) -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.ViTConfig(num_hidden_layers=4, num_labels=10)
    with torch.device("meta"):
        model = transformers.ViTForImageClassification(config)
        labels = torch.zeros(batch, dtype=torch.long)
        return model, {"pixel_values": torch.zeros(batch, 3, 224, 224), "labels": labels}


def clip(batch: int = 32) -> tuple[nn.Module, dict[str, Any]]:
    small = {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    config = transformers.CLIPConfig(text_config=small, vision_config=small)
    with torch.device("meta"):
        model = transformers.CLIPModel(config)
        ids = torch.zeros(batch, 16, dtype=torch.long)
        return model, {"input_ids": ids, "pixel_values": torch.zeros(batch, 3, 224, 224), "return_loss": True}


@pytest.mark.slow
def test_where_launches_take_the_time_no_mesh_of_two_axes_is_faster() -> None:
    model, inputs = vit()
    found = planned(model, inputs, "?")
    others = [planned(model, inputs, f"dp={DEVICES // ranks},tp={ranks}") for ranks in (1, 2, 4, 8, 16)]
    assert found.step_seconds <= 1.001 * min(one.step_seconds for one in others)


@pytest.mark.slow
def test_a_loss_over_pairs_of_samples_takes_no_stages() -> None:
    """Its parameters are read outside of the micro-batches, so that no stage can have them."""
    model, inputs = clip()
    found = planned(model, inputs, "?")
    assert found.decided.assignment.pipelining is None
    assert found.fits
