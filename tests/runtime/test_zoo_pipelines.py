"""Whole architectures in pipelines, on real processes: every schedule on every mesh, spread over the architectures.

`python -m benchmarks.zoo_pipelines` runs each architecture under each schedule on each mesh.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

import autopar
from autopar.errors import LayoutError
from autopar.mesh import Mesh
from benchmarks.architectures import STANDARD
from benchmarks.zoo import BATCH
from benchmarks.zoo_pipelines import IMAGES, MESHES, REFUSED, SCHEDULES, WITHOUT_LOSS, PipelineCase, labelled, outcomes
from examples.hf import hf
from tests.runtime.launcher import launch

pytest.importorskip("transformers")


def cases(mesh: str) -> list[PipelineCase]:
    """Half of the architectures: each runs on two meshes, by another schedule on each."""
    begin, layouts = [*MESHES].index(mesh), MESHES[mesh]
    found = []
    for i, name in enumerate(name for name in STANDARD if name not in REFUSED):
        for turn in range(2):
            if (i + turn) % len(MESHES) == begin:
                schedule = SCHEDULES[(i // len(MESHES) + i + 2 * turn) % len(SCHEDULES)]
                found.append(PipelineCase(name, schedule, layouts[(i // len(MESHES)) % len(layouts)]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_loss_and_gradients_are_those_of_one_process(mesh: str) -> None:
    for found in launch(outcomes, mesh, cases(mesh), ranks=Mesh(mesh).size, seconds=600):
        for case, one in zip(cases(mesh), found, strict=True):
            assert one.is_right(case.architecture), (case, one)
            assert one.is_scheduled == (case.architecture not in WITHOUT_LOSS), case
            # Micro-batches of these count as many targets: images have one each.
            if case.architecture not in (*IMAGES, *WITHOUT_LOSS):
                assert one.mean_of_means > 1e-5, "a mean of means would pass"


def test_cases_are_spread() -> None:
    every = [(mesh, case) for mesh in MESHES for case in cases(mesh)]
    for mesh in MESHES:
        assert {case.schedule for one, case in every if one == mesh} == {*SCHEDULES}
        assert {case.rest for one, case in every if one == mesh} == {*MESHES[mesh]}
    for name in STANDARD:
        if name not in REFUSED:
            mine = [(mesh, case.schedule) for mesh, case in every if case.architecture == name]
            assert len({mesh for mesh, _ in mine}) == len({schedule for _, schedule in mine}) == 2


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
