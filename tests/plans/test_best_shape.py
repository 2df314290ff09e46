"""Plans on any mesh of models whose time is that of launches and messages, and of models that take no stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import autopar
from autopar.plans import find
from examples.mlp import mlp

DEVICES = 16


def planned(model: nn.Module, inputs: dict[str, Any], mesh: str) -> autopar.Plan:
    devices = DEVICES if mesh == "?" else None
    return autopar.plan(
        model, mesh, inputs, cluster="h100", devices=devices, precision="bf16", time_limit=600, cache=False
    )


def vit(batch: int = 64) -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.ViTConfig(num_hidden_layers=4, num_labels=10)  # type: ignore[call-arg]
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


def test_meshes_that_fill_a_node_come_first_and_have_half_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, float]] = []
    search = find._in_micro_batches

    def noted(
        graph: Any, mesh: autopar.Mesh, layout: Any, request: Any, progress: Any, seconds: float, beat: float
    ) -> Any:
        seen.append((mesh.axes["tp"] or 0, seconds))
        return search(graph, mesh, layout, request, progress, seconds, beat)

    monkeypatch.setattr(find, "_in_micro_batches", noted)
    model, inputs = mlp(batch=64)
    autopar.plan(model, "dp=?,tp=?", inputs, cluster="h100", devices=32, time_limit=64, cache=False)
    order, shares = [ranks for ranks, _ in seen], [seconds for _, seconds in seen]
    assert order[0] == 8
    assert sorted(order) == [1, 2, 4, 8, 16, 32]
    assert order[-1] in (1, 32)
    assert shares[0] == pytest.approx(32, abs=1)
    # What the first leaves goes to the others.
    assert shares[1] > 20
