"""Plan models of published training runs, and print the predicted speed beside the published one.

    python -m benchmarks.trained                 # all runs: minutes of processor time each
    python -m benchmarks.trained 405b-8192

Nothing is settled: the mesh is open, and the search proposes stages, micro-batches, schedule, cuts, recomputation and
the layout of every op. The precision is `bf16`: the optimizer updates float32 masters, and gradients add up in
float32. The model is the Llama of transformers, which keeps more activations than the fused one of the published run.
FLOPs of the model are 6 for each parameter and token outside the input table, and those of causal attention. The
published numbers of Llama-3-405B are from table 4 of "The Llama 3 Herd of Models" (arXiv 2407.21783). The seconds are
the processor's; `export` is a bare export of the same model.
"""

from __future__ import annotations

import argparse
import time
import warnings
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

import autopar
from autopar.errors import AutoparWarning
from autopar.ir.precision import PRESETS
from autopar.plans.find import PlanRequest, plan_graph
from autopar.plans.open_mesh import meshes_of
from autopar.sharding.options import TrainingOptions
from examples.llama3_8b import llama3_8b

SEQ = 8192
B8 = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
B70 = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
B405 = {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128}


@dataclass(frozen=True)
class Run:
    """Training run: model, sequences of a step, devices."""

    layers: int
    shape: dict[str, Any]
    batch: int
    devices: int
    # TFLOP/s of a device; None where none is published.
    published: float | None = None


RUNS = {
    "8b-8": Run(32, B8, 64, 8),
    "70b-64": Run(80, B70, 512, 64),
    "405b-1024": Run(126, B405, 2048, 1024),
    "405b-8192": Run(126, B405, 2048, 8192, 430.0),
    "405b-16384": Run(126, B405, 2048, 16384, 400.0),
}


def export_seconds(run: Run) -> float:
    """Return the time of a bare export."""
    torch.set_default_dtype(torch.bfloat16)
    model, inputs = llama3_8b(run.layers, run.batch, SEQ, loss=True, **run.shape)
    torch.set_default_dtype(torch.float32)
    began = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.export.export(model, (), inputs, strict=False).run_decompositions({})
    return time.process_time() - began


def measure(name: str, run: Run, cluster: str, limit: float) -> None:
    export = export_seconds(run)
    model, inputs = llama3_8b(run.layers, run.batch, SEQ, loss=True, **run.shape)
    options = TrainingOptions("loss", precision=PRESETS["bf16"])
    graph = autopar.trace(model, inputs, precision=options.precision)
    traced = time.process_time()
    request = PlanRequest(cluster, options=options, time_limit=limit, cache=False, any_mesh=True)
    plan = plan_graph(graph, meshes_of("?", run.devices), None, request)
    found = time.process_time()
    embedding: Any = model.get_input_embeddings()
    weights = sum(prod(tensor.shape) for tensor in graph.parameters) - prod(embedding.weight.shape)
    flops = run.batch * SEQ * (6 * weights + 6 * run.layers * SEQ * run.shape["hidden_size"])
    speed = flops / plan.step_seconds / run.devices / 1e12
    said = "" if run.published is None else f", published {run.published:.0f}: {speed / run.published:.2f} of it"
    print(f"{name}: {speed:.0f} TFLOP/s predicted{said}")
    gap = 100 * (1.0 if plan.gap is None else plan.gap)
    print(f"  gap {gap:.1f} %, {plan.memory_bytes / 2**30:.1f} GiB, {plan.step_seconds:.2f} s a step")
    print(f"  search {found - traced:.0f} s, {(found - traced) / export:.2f} of the export")
    shown = (line for line in str(plan.layout).splitlines() if line.startswith(("mesh", "micro", "pipeline")))
    print("  " + "; ".join(shown), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", default=list(RUNS), metavar="RUN", help=", ".join(RUNS))
    parser.add_argument("--cluster", default="h100")
    parser.add_argument("--time-limit", type=float, default=200.0)
    given = parser.parse_args()
    if unknown := sorted(set(given.runs) - set(RUNS)):
        parser.error(f"unknown runs: {', '.join(unknown)}; known: {', '.join(RUNS)}")
    warnings.simplefilter("ignore", AutoparWarning)
    for name in given.runs:
        measure(name, RUNS[name], given.cluster, given.time_limit)


if __name__ == "__main__":
    main()
