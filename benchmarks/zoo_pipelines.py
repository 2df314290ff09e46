"""Whole models in pipelines, on real processes: `python -m benchmarks.zoo_pipelines [ARCHITECTURE ...]`.

Prints a table of architecture x schedule for each mesh: the largest relative difference of loss and gradients from one
process, in float64, or the reason why there is none. Labels that no loss counts differ from micro-batch to micro-batch,
so that a mean of the micro-batches' losses is another loss: its difference is the last column. Models that cast to
float32 may differ by 1e-6, others by 1e-12. The whole takes half an hour on two cores.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError, AutoparWarning
from autopar.lowering.modules.pipeline_loop import PipelineLoop
from autopar.mesh import Mesh
from benchmarks.architectures import STANDARD
from benchmarks.zoo import BATCH, FLOAT32, zoo_model
from tests.runtime.launcher import launch
from tests.runtime.training import gradients, worst

SCHEDULES = ("1f1b", "gpipe", "interleaved(2)", "zero_bubble")
# Layouts of the other axes, which take turns on each mesh.
MESHES = {
    "pp=2": ("* -> none",),
    "pp=2,dp=2": ("fsdp", "zero1", "batch -> dp; * -> none"),
    "pp=2,tp=2": ("megatron", "megatron_sp"),
    "pp=4": ("* -> none",),
}
MICRO_BATCHES = 4
IMAGES = ("vit", "swin", "resnet", "convnext")
# Two batches, of texts and of images: no micro-batch of one has a micro-batch of the other.
REFUSED = ("clip",)
# No loss is asked of these: a loss for CTC chooses by the values of its labels.
WITHOUT_LOSS = ("wav2vec2",)
ALLOWED, ALLOWED_FLOAT32 = 1e-12, 1e-6
# Losses of causal models cast logits to float32.
CASTS = FLOAT32 | {"gpt2"}


@dataclass(frozen=True)
class PipelineCase:
    architecture: str
    schedule: str
    # Of the axes beside the stages.
    rest: str

    @property
    def layout(self) -> str:
        return f"micro {MICRO_BATCHES}; pipeline pp {self.schedule}; {self.rest}"


@dataclass(frozen=True)
class PipelineOutcome:
    """Errors of loss and gradients; or the reason why there are none."""

    loss: float = 0.0
    gradients: float = 0.0
    reason: str = ""
    # True if each backward ran as soon as the schedule has it.
    is_scheduled: bool = False
    # Difference of the mean of the losses of micro-batches from the loss.
    mean_of_means: float = 0.0

    def is_right(self, architecture: str) -> bool:
        allowed = ALLOWED_FLOAT32 if architecture in CASTS else ALLOWED
        return not self.reason and max(self.loss, self.gradients) < allowed


def labelled(architecture: str, parts: int = 1, train: bool = False) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the model in float64 and inputs with labels, some of which no loss counts."""
    model: Any
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


def outcome(case: PipelineCase, mesh: str) -> PipelineOutcome:
    """Return the outcome of a case on this rank."""
    model, inputs = labelled(case.architecture, parts=2 if "tp" in mesh else 1)
    try:
        parallel = autopar.parallelize(model, mesh, inputs, layout=case.layout, outputs="full")
    except AutoparError as error:
        return PipelineOutcome(reason=str(error))
    expected, own = loss_of(model(**inputs)), loss_of(parallel(**inputs))
    for loss in (expected, own):
        loss.backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        rows = [{name: x.chunk(MICRO_BATCHES)[i] for name, x in inputs.items()} for i in range(MICRO_BATCHES)]
        means = torch.stack([loss_of(model(**each)) for each in rows]).mean()
    (loop,) = (one for one in parallel.emitted.graph_module.modules() if isinstance(one, PipelineLoop))
    return PipelineOutcome(
        abs(float((own - expected).detach() / expected.detach())),
        worst(gradients(parallel), gradients(model)),
        "",
        loop.is_scheduled,
        abs(float((means - expected).detach() / expected.detach())),
    )


def outcomes(mesh: str, cases: Sequence[PipelineCase]) -> list[PipelineOutcome]:
    """Return the outcomes of some cases on this rank."""
    warnings.simplefilter("ignore", AutoparWarning)
    found = []
    for case in cases:
        print(case.architecture, case.layout, flush=True)
        found.append(outcome(case, mesh))
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo_pipelines", description=__doc__)
    names = [name for name in STANDARD if name not in REFUSED]
    parser.add_argument("architectures", nargs="*", default=names)
    parser.add_argument("--meshes", nargs="+", choices=list(MESHES), default=list(MESHES))
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    parser.add_argument("--seconds", type=float, default=600, help="limit for one architecture on one mesh")
    given = parser.parse_args(arguments)
    console, reasons = Console(width=140), []
    for mesh in given.meshes:
        columns = *given.schedules, "mean of means", "seconds"
        table = Table("architecture", *columns, title=f"largest relative error on {mesh}")
        for place, name in enumerate(given.architectures):
            layouts, started = MESHES[mesh], time.perf_counter()
            cases = [
                PipelineCase(name, schedule, layouts[(place + turn) % len(layouts)])
                for turn, schedule in enumerate(given.schedules)
            ]
            found = launch(outcomes, mesh, cases, ranks=Mesh(mesh).size, seconds=given.seconds)
            worst_of = [max(ranks, key=lambda one: max(one.loss, one.gradients)) for ranks in zip(*found, strict=True)]
            cells = []
            for case, one in zip(cases, worst_of, strict=True):
                error = "refused" if one.reason else f"{max(one.loss, one.gradients):.0e}"
                cells.append(error if one.is_right(name) or one.reason else f"{error} WRONG")
                if not one.is_right(name):
                    reasons.append(f"{name} on {mesh} under {case.layout}: {one.reason or error}")
            table.add_row(name, *cells, f"{worst_of[0].mean_of_means:.0e}", f"{time.perf_counter() - started:.0f}")
            print(mesh, name, *cells, sep="  ", file=sys.stderr, flush=True)
        console.print(table)
    for reason in reasons:
        console.print(reason, markup=False, highlight=False)
    return 1 if reasons else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
