"""Plan models of published training runs, and print the predicted speed beside the published one.

    python -m benchmarks.trained                 # all runs: minutes of processor time each
    python -m benchmarks.trained 405b-8192
    python -m benchmarks.trained mixtral-8x22b-128 deepseek-v3-2048

Nothing is settled: the mesh is open, and the search proposes stages, micro-batches, schedule, cuts, recomputation and
the layout of every op. The precision is `bf16`: the optimizer updates float32 masters, and gradients add up in
float32. Models are those of transformers, which keep more activations than the fused ones of the published runs. FLOPs
of a model are 6 for each parameter and token outside the input table, and those of causal attention; of experts those
that a token goes to count. The published numbers of Llama-3-405B are from table 4 of "The Llama 3 Herd of Models"
(arXiv 2407.21783), that of Mixtral-8x22B from "MoE Parallel Folding" (arXiv 2504.14960): 49.3 % of 989 TFLOP/s.
DeepSeek-V3 was trained in float8, which is not compared. The seconds are the processor's; `export` is a bare export of
the same model.
"""

from __future__ import annotations

import argparse
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import autopar
from autopar.errors import AutoparWarning
from autopar.ir.precision import PRESETS
from autopar.plans.find import PlanRequest, plan_graph
from autopar.plans.open_mesh import meshes_of
from autopar.sharding.options import TrainingOptions
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


RUNS = {
    "8b-8": Run(*SHAPES["8b"], 64, 8),
    "70b-64": Run(*SHAPES["70b"], 512, 64),
    "405b-1024": Run(*SHAPES["405b"], 2048, 1024),
    "405b-8192": Run(*SHAPES["405b"], 2048, 8192, 430.0),
    "405b-16384": Run(*SHAPES["405b"], 2048, 16384, 400.0),
    "mixtral-8x22b-128": Run(56, MIXTRAL_8X22B, 256, 128, 487.6, "Mixtral", 4096),
    # The sizes of DeepSeek-V3 are the defaults of its config.
    "deepseek-v3-2048": Run(61, {}, 15360, 2048, None, "DeepseekV3", 4096),
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


def measure(name: str, run: Run, cluster: str, limit: float) -> None:
    export = export_seconds(run)
    model, inputs = run.model()
    options = TrainingOptions("loss", precision=PRESETS["bf16"])
    graph = autopar.trace(model, inputs, precision=options.precision)
    traced = time.process_time()
    request = PlanRequest(cluster, options=options, time_limit=limit, cache=False, any_mesh=True)
    plan = plan_graph(graph, meshes_of("?", run.devices), None, request)
    found = time.process_time()
    speed = run.flops(model) / plan.step_seconds / run.devices / 1e12
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
