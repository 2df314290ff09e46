"""Measure the time of the search beside a bare export of the same model, and the gap that it proves.

    python -m benchmarks.search                                  # Llama-3-8B on dp=8,tp=8
    python -m benchmarks.search --mesh dp=8,tp=8 --mesh dp=64 --mesh pod=2,dp=8,tp=8
    python -m benchmarks.search --shape 8b --layers 8 16 32
    python -m benchmarks.search --shape 70b --shape 405b         # 80 layers, 126 layers
    python -m benchmarks.search --memory 25 --dtype bfloat16     # GiB on each device; parameters

Seconds are the processor's, which other programs do not count into; the export is that of the same model, in the same
process. The limit on memory is the same for all shapes, so the larger ones need larger meshes, or fewer bytes.
"""

from __future__ import annotations

import argparse
import gc
import time
import warnings

import torch

import autopar
from autopar.cost.hardware.cluster import load_cluster
from autopar.errors import AutoparError
from autopar.mesh import Mesh
from autopar.sharding.options import TrainingOptions
from autopar.solver.solve import solve_plan
from benchmarks.models import LLAMAS, SHAPES, ModelAndInputs

HEAD = (
    f"{'shape':>6} {'layers':>6} {'mesh':>16} {'nodes':>6} {'variables':>9} {'search s':>9} {'/ export':>8} "
    f"{'gap %':>7} {'step ms':>9} {'GiB':>6}"
)


def exported_seconds(shape: str, layers: int, dtype: torch.dtype) -> float:
    """Return the processor seconds of a bare export, which every tool on top of it needs."""
    model, inputs = _model(shape, layers, dtype)
    gc.collect()
    begin = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.export.export(model, (), inputs, strict=False).run_decompositions({})
    return time.process_time() - begin


def _model(shape: str, layers: int, dtype: torch.dtype) -> ModelAndInputs:
    return LLAMAS[shape].made(layers, 16, dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=SHAPES, help="default: 8b")
    parser.add_argument("--layers", type=int, nargs="+", help="default: as many as the shape has")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--mesh", action="append", help="default: dp=8,tp=8")
    parser.add_argument("--cluster", default="h100")
    parser.add_argument("--memory", type=float, default=70.0, help="GiB on each device")
    parser.add_argument(
        "--experts", action="store_true", help="price the strategies of experts too, and begin from them"
    )
    parser.add_argument("--time-limit", type=float, default=120.0)
    given = parser.parse_args()
    cluster = load_cluster(given.cluster)
    print(HEAD, flush=True)
    dtype = getattr(torch, given.dtype)
    every = [(shape, n) for shape in given.shape or ["8b"] for n in given.layers or [SHAPES[shape][0]]]
    for shape, layers in every:
        bare = exported_seconds(shape, layers, dtype)
        graph = autopar.trace(*_model(shape, layers, dtype))
        _ = graph.footprints
        for text in given.mesh or ["dp=8,tp=8"]:
            mesh = Mesh(text)
            axes = mesh.whole
            begin = time.process_time()
            try:
                found = solve_plan(
                    graph,
                    axes,
                    cluster,
                    memory_bytes=given.memory * 2**30,
                    options=TrainingOptions(),
                    strategies=given.experts,
                    time_limit=given.time_limit,
                )
            except AutoparError as error:
                print(f"{shape:>6} {layers:6} {text:>16} {str(error).splitlines()[0]}", flush=True)
                continue
            spent = time.process_time() - begin
            print(
                f"{shape:>6} {layers:6} {text:>16} {len(graph.nodes):6} {found.variables:9} {spent:9.2f} "
                f"{spent / bare:8.2f} {100 * found.gap:7.3f} {1e3 * found.costs.step_seconds:9.2f} "
                f"{found.costs.memory.peak_bytes / 2**30:6.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
