"""Plan models of published training runs, and print the predicted speed beside the published one.

    python -m benchmarks.trained                 # all runs: minutes of processor time each
    python -m benchmarks.trained 405b-8192
    python -m benchmarks.trained mixtral-8x22b-128 405b-131072-tokens
    python -m benchmarks.trained --cluster h800 deepseek-v3-2048 --precision fp8

Nothing is settled: the mesh is open, and the search proposes stages, micro-batches, schedule, cuts, recomputation and
the layout of every op. The precision is `bf16` by default: the optimizer updates float32 masters, and gradients add up
in float32. Models are those of transformers, which keep more activations than the fused ones of the published runs.
FLOPs of a model are 6 for each parameter and token outside the input table, and those of causal attention; of experts
those that a token goes to count. The published numbers of Llama-3-405B are from table 4 of "The Llama 3 Herd of Models"
(arXiv 2407.21783), that of Mixtral-8x22B from "MoE Parallel Folding" (arXiv 2504.14960): 49.3 % of 989 TFLOP/s.
DeepSeek-V3 was trained in float8; its speed is that of 180,000 hours of an H800 for 10^12 tokens (arXiv 2412.19437), in
the FLOPs that are counted here. Where a mesh is published, stages are designed for it as well, with the shardings, cuts
and recomputation that are found. The seconds are the processor's; `export` is a bare export of the same model.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import autopar
from autopar.errors import AutoparWarning
from autopar.ir.graph import NamedGraph
from autopar.ir.precision import PRESETS, Precision
from autopar.plans.find import PlanRequest, plan_graph
from autopar.plans.folded import fold_that_pays
from autopar.plans.open_mesh import meshes_of
from autopar.plans.plan import Plan
from autopar.sharding.options import TrainingOptions
from autopar.solver.mesh_shape import Shape
from autopar.solver.shapes import PricedShape, ShapeSearch
from benchmarks.models import MIXTRAL_8X22B, SHAPES, ModelAndInputs, causal_lm

SEQ = 8192


@dataclass(frozen=True)
class Run:
    """Training run: model, sequences of a step, devices."""

    layers: int
    shape: dict[str, Any]
    batch: int
    devices: int
    # TFLOP/s of a device; None where none is published.
    published: float | None = None
    family: str = "Llama"
    seq: int = SEQ
    # Tokens of a device in a second, where no TFLOP/s are published.
    tokens_published: float | None = None
    # Mesh and micro-batches of the published run.
    shape_published: Shape | None = None

    def model(self) -> ModelAndInputs:
        """Return the model and its inputs, without data."""
        return causal_lm(self.family, self.layers, self.batch, self.seq, self.shape)

    def flops(self, model: nn.Module) -> float:
        """Return the FLOPs of a step."""
        config: Any = model.config
        counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
        counts.pop("model.embed_tokens.weight")
        every = int(getattr(config, "num_local_experts", 0) or getattr(config, "n_routed_experts", 1))
        share: float = getattr(config, "num_experts_per_tok", 1) / every
        active: float = sum(count * (share if ".experts." in name else 1) for name, count in counts.items())
        heads, usual = config.num_attention_heads, config.hidden_size // config.num_attention_heads
        widths = getattr(config, "qk_head_dim", usual), getattr(config, "v_head_dim", usual)
        attention: float = 3 * self.layers * self.seq * heads * sum(widths)
        return self.batch * self.seq * (6 * active + attention)

    def published_tflops(self, model: nn.Module) -> float | None:
        """Return the published TFLOP/s of a device, of the FLOPs that are counted here; None without a number."""
        if self.tokens_published is None:
            return self.published
        return self.flops(model) / (self.batch * self.seq) * self.tokens_published / 1e12


RUNS = {
    "8b-8": Run(*SHAPES["8b"], 64, 8),
    "70b-64": Run(*SHAPES["70b"], 512, 64),
    "405b-1024": Run(*SHAPES["405b"], 2048, 1024),
    "405b-8192": Run(*SHAPES["405b"], 2048, 8192, 430.0),
    "405b-16384": Run(*SHAPES["405b"], 2048, 16384, 400.0),
    "405b-131072-tokens": Run(
        *SHAPES["405b"], 128, 16384, 380.0, seq=131072, shape_published=Shape(16, 8, 8, 16, 1, context=16)
    ),
    "mixtral-8x22b-128": Run(56, MIXTRAL_8X22B, 256, 128, 487.6, "Mixtral", 4096),
    # The sizes of DeepSeek-V3 are the defaults of its config.
    "deepseek-v3-2048": Run(
        61,
        {},
        15360,
        2048,
        None,
        "DeepseekV3",
        4096,
        tokens_published=1543.0,
        shape_published=Shape(16, 2, 1, 120, 1, 64),
    ),
}


def export_seconds(run: Run) -> float:
    """Return the time of a bare export."""
    torch.set_default_dtype(torch.bfloat16)
    model, inputs = run.model()
    torch.set_default_dtype(torch.float32)
    began = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.export.export(model, (), inputs, strict=False).run_decompositions({})
    return time.process_time() - began


def on_published_mesh(shape: Shape, graph: NamedGraph, plan: Plan) -> PricedShape | None:
    """Return the best stages on a mesh, priced by their layers, where the cluster and the limit are those of a plan."""
    options = plan.decided.options
    ordered = fold_that_pays(graph, options.outputs) or graph
    search = ShapeSearch.of(ordered, plan.cluster, options, plan.mesh.whole.size, plan.limit_bytes, math.inf)
    assert search is not None, "published runs train repeated layers"
    search.price(shape)
    return min(search.found, key=lambda one: one.seconds, default=None)


def measure(name: str, run: Run, cluster: str, limit: float, precision: Precision) -> None:
    export = export_seconds(run)
    model, inputs = run.model()
    options = TrainingOptions("loss", precision=precision)
    graph = autopar.trace(model, inputs, precision=options.precision)
    traced = time.process_time()
    request = PlanRequest(cluster, options=options, time_limit=limit, cache=False, any_mesh=True)
    plan = plan_graph(graph, meshes_of("?", run.devices), None, request)
    found = time.process_time()
    flops = run.flops(model) / run.devices
    published = run.published_tflops(model)

    def of_published(seconds: float) -> str:
        speed = flops / seconds / 1e12
        said = "" if published is None else f", published {published:.0f}: {speed / published:.2f} of it"
        return f"{speed:.0f} TFLOP/s predicted{said}"

    print(f"{name}: {of_published(plan.step_seconds)}")
    gap = 100 * (1.0 if plan.gap is None else plan.gap)
    print(f"  gap {gap:.1f} %, {plan.memory_bytes / 2**30:.1f} GiB, {plan.step_seconds:.2f} s a step")
    print(f"  search {found - traced:.0f} s, {(found - traced) / export:.2f} of the export")
    shown = (line for line in str(plan.layout).splitlines() if line.startswith(("mesh", "micro", "pipeline")))
    print("  " + "; ".join(shown), flush=True)
    if run.shape_published is not None:
        priced = on_published_mesh(run.shape_published, graph, plan)
        said = "does not fit" if priced is None else of_published(priced.seconds)
        print(f"  on the mesh of the published run: {said}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", default=list(RUNS), metavar="RUN", help=", ".join(RUNS))
    parser.add_argument("--cluster", default="h100")
    parser.add_argument("--precision", choices=list(PRESETS), default="bf16")
    parser.add_argument("--time-limit", type=float, default=200.0)
    given = parser.parse_args()
    if unknown := sorted(set(given.runs) - set(RUNS)):
        parser.error(f"unknown runs: {', '.join(unknown)}; known: {', '.join(RUNS)}")
    warnings.simplefilter("ignore", AutoparWarning)
    for name in given.runs:
        measure(name, RUNS[name], given.cluster, given.time_limit, PRESETS[given.precision])


if __name__ == "__main__":
    main()
