"""Whole architectures in pipelines, on real processes: every schedule on every mesh, spread over the architectures."""

from __future__ import annotations

import warnings
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparWarning, LayoutError
from benchmarks.architectures import STANDARD
from benchmarks.zoo import BATCH, FLOAT32, zoo_model
from examples.hf import hf
from tests.runtime.launcher import launch
from tests.runtime.test_pipelines import loop_of
from tests.runtime.training import gradients, worst

pytest.importorskip("transformers")

SCHEDULES = ("1f1b", "gpipe", "interleaved(2)", "zero_bubble")
# Layouts of the other axes, which take turns on each mesh.
MESHES = {
    "pp=2": ("* -> none",),
    "pp=2,dp=2": ("fsdp", "zero1", "batch -> dp; * -> none"),
    "pp=2,tp=2": ("megatron", "megatron_sp"),
}
# Two batches, of texts and of images: no micro-batch of one has a micro-batch of the other.
REFUSED = ("clip",)
IMAGES = ("vit", "swin", "resnet", "convnext")
# No loss is asked of these: a loss for CTC chooses by the values of its labels.
WITHOUT_LOSS = ("wav2vec2",)
ALLOWED, ALLOWED_FLOAT32 = 1e-12, 1e-6
# Losses of causal models cast logits to float32.
CASTS = FLOAT32 | {"gpt2"}


def cases(mesh: str) -> list[tuple[str, str]]:
    """The layout of each architecture but every third one: each runs on two meshes, by another schedule on each."""
    begin, layouts = [*MESHES].index(mesh), MESHES[mesh]
    names = [name for name in STANDARD if name not in REFUSED]
    return [
        (name, f"micro 4; pipeline pp {SCHEDULES[(begin + i) % 4]}; {layouts[(begin + i // 4) % len(layouts)]}")
        for i, name in enumerate(names)
        if i % 3 != begin
    ]


def labelled(architecture: str, parts: int = 1, train: bool = False) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model in float64 and inputs with labels, some of which no loss counts."""
    model, inputs = zoo_model(architecture, train, parts=parts)
    if architecture in IMAGES:
        inputs["labels"] = torch.arange(BATCH) % model.config.num_labels
    elif architecture not in (*WITHOUT_LOSS, *REFUSED):
        labels = inputs.get("decoder_input_ids", inputs.get("input_ids"))
        assert labels is not None
        inputs["labels"] = labels.clone()
        inputs["labels"][::3, 2:7] = -100
    return model, inputs


def loss_of(found: Any) -> Tensor:
    if "loss" in found:
        loss: Tensor = found["loss"]
        return loss
    total: Tensor = sum(value.square().mean() for value in found.values())
    return total


def errors(mesh: str) -> dict[tuple[str, str], tuple[float, float, bool]]:
    """Errors of loss and gradients of each case; and whether each backward ran as soon as the schedule has it."""
    warnings.simplefilter("ignore", AutoparWarning)
    found = {}
    for architecture, layout in cases(mesh):
        print(architecture, layout, flush=True)
        model, inputs = labelled(architecture, parts=2 if "tp" in mesh else 1)
        parallel = autopar.parallelize(model, mesh, inputs, layout=layout, outputs="full")
        expected, own = loss_of(model(**inputs)), loss_of(parallel(**inputs))
        expected.backward()
        own.backward()
        error = abs(float((own - expected).detach() / expected.detach()))
        off = worst(gradients(parallel), gradients(model))
        found[architecture, layout] = error, off, loop_of(parallel).is_scheduled
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_loss_and_gradients_are_those_of_one_process(mesh: str) -> None:
    ranks = prod(int(axis.split("=")[1]) for axis in mesh.split(","))
    for found in launch(errors, mesh, ranks=ranks, seconds=600):
        assert [*found] == cases(mesh)
        for (architecture, layout), (error, off, is_scheduled) in found.items():
            allowed = ALLOWED_FLOAT32 if architecture in CASTS else ALLOWED
            assert max(error, off) < allowed, (architecture, layout)
            assert is_scheduled == (architecture not in WITHOUT_LOSS), architecture


def test_cases_are_spread() -> None:
    every = [(mesh, name, layout) for mesh in MESHES for name, layout in cases(mesh)]
    for schedule in SCHEDULES:
        for mesh in MESHES:
            assert sum(f"pp {schedule};" in layout and mesh == one for one, _, layout in every) >= 2
    for name in {name for _, name, _ in every}:
        assert len({layout.split(";")[1] for _, other, layout in every if other == name}) == 2


def mixture() -> tuple[nn.Module, dict[str, Tensor]]:
    model, inputs = hf("mixtral", batch=BATCH, seq=16, output_router_logits=True)
    return model, {**inputs, "labels": inputs["input_ids"]}


def contrasted() -> tuple[nn.Module, dict[str, Any]]:
    model, inputs = labelled("clip")
    return model, {**inputs, "return_loss": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "schedule", "place", "fix"),
    [
        (mixture, "1f1b", r"1f1b runs .* needs /sum\.1 \(modeling_mixtral\.py:\d+\) of all", "the schedule gpipe"),
        (mixture, "zero_bubble", r"zero_bubble runs .* needs /sum\.1 \(", "the schedule gpipe"),
        (lambda: labelled("resnet", train=True), "1f1b", r"resnet\.embedder.*batch_norm", "GroupNorm for BatchNorm"),
        (lambda: labelled("clip"), "gpipe", r"by vision_model\.embeddings/expand", "two batches takes no pipeline"),
        (contrasted, "gpipe", r"/cross_entropy_loss.* needs its operands of all", "no loss that compares rows"),
    ],
)
def test_what_cannot_run_is_refused(made: Any, schedule: str, place: str, fix: str) -> None:
    model, inputs = made()
    layout = f"micro 4; pipeline pp {schedule}; * -> none"
    with pytest.raises(LayoutError, match=rf"(?s)^E5: .*{place}.*\nfix: .*{fix}"):
        autopar.plan(model, "pp=2", inputs, layout=layout, cluster="h100", cache=False)
