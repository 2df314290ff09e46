"""Measure the time of the search beside a bare export of the same model, and the gap that it proves.

    python -m benchmarks.search --out rows.json                  # all models, meshes and limits on memory: hours
    python -m benchmarks.search --model vit-h14 resnet-152 --devices 64 --axes 1 2 --memory free 1.5x
    python -m benchmarks.search --model llama-3-8b --mesh dp=4,cp=4,tp=4 --memory 40
    python -m benchmarks.search --shape 8b --mesh dp=8,tp=8 --mesh dp=64 --mesh pod=2,dp=8,tp=8
    python -m benchmarks.search --shape 70b --shape 405b --memory 140 --dtype bfloat16

Memory on each device is `free`, a number of GiB, or as in `1.1x` a factor of the least memory that the search finds. A
device trains on the same number of samples on all meshes. The precision is `bf16` with float32 masters. A model of
`--shape` has 16 sequences and its own dtype instead, on `dp=8,tp=8` within 70 GiB if nothing else is given.

Seconds are the processor's, which other programs do not count into; the export is that of the same model, in the same
process, after a small model has been through all of it. The limit on time is that of the clock, so a busy machine
proves less. A cell holds if gap and search / export are at most the targets beside them. With `--out`, cells that the
file has are not run again.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import torch

from autopar.cost.hardware.cluster import load_cluster
from autopar.errors import AutoparWarning
from autopar.ir.precision import OWN, PRESETS
from autopar.mesh import Mesh
from benchmarks.models import LLAMAS, MODELS, PublishedModel
from benchmarks.search_cells import (
    FREE,
    HEAD,
    Cell,
    Results,
    Row,
    SearchSetting,
    TracedModel,
    error_text,
    exported_seconds,
    run_cell,
    summary_of,
)

# Meshes of one to four axes. The minor axis fills a node; `cp` is `ep` where a model has experts.
MESHES = {
    64: ("dp=64", "dp=8,tp=8", "pod=2,dp=4,tp=8", "pod=2,dp=2,cp=2,tp=8"),
    2048: ("dp=2048", "dp=256,tp=8", "pod=4,dp=64,tp=8", "pod=4,dp=16,cp=4,tp=8"),
    16384: ("dp=16384", "dp=2048,tp=8", "pod=16,dp=128,tp=8", "pod=16,dp=32,cp=4,tp=8"),
}
MEMORY = (FREE, "1.5x", "1.1x")
# Setting of models by shape.
SHAPE_BATCH, SHAPE_MESHES, SHAPE_MEMORY = 16, ("dp=8,tp=8",), ("70",)


def cells_of(given: argparse.Namespace) -> Iterator[tuple[PublishedModel, Cell]]:
    """Yield the cells of a command, those of the same model and batch one after another."""
    for shape in given.shape:
        for layers in given.layers or [LLAMAS[shape].layers]:
            for mesh in given.mesh or SHAPE_MESHES:
                for memory in given.memory or SHAPE_MEMORY:
                    cell = Cell(shape, layers, SHAPE_BATCH, given.dtype, mesh, memory, given.cluster)
                    yield LLAMAS[shape], cell
    for name in given.model:
        model = MODELS[name]
        for layers in given.layers or [model.layers]:
            for mesh in given.mesh or _meshes(model, given.devices, given.axes):
                for memory in given.memory or MEMORY:
                    batch = model.samples * Mesh(mesh).size
                    yield model, Cell(name, layers, batch, "bf16", mesh, memory, given.cluster)


def _meshes(model: PublishedModel, devices: Sequence[int], axes: Sequence[int]) -> list[str]:
    every = [MESHES[size][count - 1] for size in devices for count in axes]
    return [mesh.replace("cp=", "ep=") if model.has_experts else mesh for mesh in every]


def run_cells(every: Sequence[tuple[PublishedModel, Cell]], results: Results, setting: SearchSetting) -> list[Row]:
    """Run the cells that the results lack; print all rows, and return them."""
    rows = []
    exports = Exports()
    for _, group in groupby(every, lambda pair: pair[1].problem):
        traced: TracedModel | Exception | None = None
        for model, cell in group:
            row = results.rows.get(cell)
            if row is None:
                traced = traced or exports.traced(model, cell)
                if isinstance(traced, TracedModel):
                    row = run_cell(cell, traced, results, setting)
                else:
                    row = Row(cell, error_text(traced))
                results.add(row)
            print(row, flush=True)
            rows.append(row)
    return rows


class Exports:
    """Seconds of the exports that were made: a model of another batch takes as long."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, int, str], float] = {}

    def traced(self, model: PublishedModel, cell: Cell) -> TracedModel | Exception:
        """Return the traced model of a cell, or the error."""
        preset = PRESETS.get(cell.precision, OWN)
        dtype = preset.compute_dtype or getattr(torch, cell.precision)
        exported = cell.model, cell.layers, cell.precision
        try:
            if exported not in self.seconds:
                self.seconds[exported] = exported_seconds(*model.made(cell.layers, cell.batch, dtype))
            stored = dtype if preset == OWN else torch.float32
            made = model.made(cell.layers, cell.batch, stored)
            return TracedModel.of(*made, preset, self.seconds[exported])
        except Exception as error:  # noqa: BLE001  # the rows of the model show it, and other models follow
            return error


def warm_up(setting: SearchSetting) -> None:
    """Import and compile what the first export and search need: one layer goes through all of it."""
    cell = Cell("8b", 1, SHAPE_BATCH, "bf16", *SHAPE_MESHES, FREE, "")
    traced = Exports().traced(LLAMAS["8b"], cell)
    if isinstance(traced, TracedModel):
        run_cell(cell, traced, Results(), setting)


def memory_text(text: str) -> str:
    """Return the text of a limit on memory if it is one."""
    if text != FREE and not 0 < float(text.removesuffix("x")) < math.inf:
        raise ValueError(text)
    return text


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, help="default: all, or none with --shape")
    parser.add_argument("--shape", action="append", choices=LLAMAS, default=[], help="Llama 3 on 16 sequences")
    parser.add_argument("--layers", type=int, nargs="+", help="default: as many as the model has")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of models by shape")
    parser.add_argument("--devices", type=int, nargs="+", choices=MESHES, default=list(MESHES))
    parser.add_argument("--axes", type=int, nargs="+", choices=range(1, 5), default=range(1, 5))
    parser.add_argument("--mesh", action="append", help="in place of --devices and --axes")
    parser.add_argument("--cluster", default="h100")
    parser.add_argument("--memory", nargs="+", type=memory_text, help=f"free, 1.5x or GiB; default: {' '.join(MEMORY)}")
    parser.add_argument(
        "--experts", action="store_true", help="price the strategies of experts too, and begin from them"
    )
    parser.add_argument("--time-limit", type=float, default=120.0)
    parser.add_argument("--out", type=Path, help="file of rows, read before and written after each cell")
    given = parser.parse_args(arguments)
    given.model = given.model or ([] if given.shape else list(MODELS))
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    given = parsed(arguments)
    warnings.simplefilter("ignore", AutoparWarning)
    setting = SearchSetting(load_cluster(given.cluster), given.time_limit, given.experts)
    results, every = Results.read(given.out), list(cells_of(given))
    if any(cell not in results.rows for _, cell in every):
        warm_up(setting)
    print(HEAD, flush=True)
    print(summary_of(run_cells(every, results, setting)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
