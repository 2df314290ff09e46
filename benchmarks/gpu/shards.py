"""Sections that compare predictions with measurements, and look for waits of the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.cost.costs import Costs
from autopar.cost.evaluate import evaluate
from autopar.cost.hardware.cluster import Cluster, load_cluster
from autopar.plans.cluster_here import cluster_here
from autopar.runtime.call_cache import FIRST_CALLS
from autopar.sharding.layout.language import choose_layout
from autopar.sharding.options import TrainingOptions
from autopar.sharding.time_slice import propagate_plan
from autopar.submesh import SubMesh
from benchmarks.gpu.setting import Setting, bert, llama, one_process, one_rank_of, resnet_50, stepper
from examples.gpt import gpt
from examples.moe import moe

__all__ = ["beside", "measured", "predict", "shards", "sync"]

REGATHER = "batch -> fsdp; * -> none; param, grad, opt { * -> fsdp | none }; regather @*"
# Mesh and layout.
CASES: dict[str, tuple[dict[str, int], str]] = {
    "ddp": ({"dp": 8}, "ddp"),
    "fsdp": ({"fsdp": 8}, "fsdp"),
    "megatron": ({"dp": 2, "tp": 4}, "megatron"),
    "megatron_sp": ({"dp": 2, "tp": 4}, "megatron_sp"),
    "fsdp_tp": ({"fsdp": 2, "tp": 4}, "fsdp_tp"),
}
WAITS = {**CASES, "zero1": ({"dp": 8}, "zero1"), "fsdp_regather": ({"fsdp": 8}, REGATHER)}


def sync(setting: Setting) -> None:
    """Waits of the host for the device in a steady step: an error where there is one."""

    def steady(module: nn.Module, inputs: Any) -> Mapping[str, Any]:
        step = stepper(module, inputs, torch.optim.AdamW(module.parameters(), fused=setting.has_gpu))
        for _ in range(FIRST_CALLS + 1):  # ranks compare their first calls, which waits
            step()
        setting.wait()
        if not setting.has_gpu:
            return {"skipped": "no GPU to wait for"}
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return {"waits": 0}

    def one() -> Mapping[str, Any]:
        one_process()
        try:
            model, inputs = llama(setting, layers=2)
            return steady(autopar.parallelize(model, "dp=1", inputs, layout="ddp"), inputs)
        finally:
            dist.destroy_process_group()

    setting.part("one_rank", one)
    for name, (axes, layout) in WAITS.items():

        def rank(axes: Mapping[str, int] = axes, layout: str = layout) -> Mapping[str, Any]:
            with one_rank_of(axes, setting.device) as mesh:
                model, inputs = llama(setting, layers=2, batch=8)
                return steady(autopar.parallelize(model, mesh, inputs, layout=layout), inputs)

        setting.part(f"rank_of_8_{name}", rank)


def shards(setting: Setting) -> None:
    """One rank of eight or 64: predicted compute and peak beside measured ones; nothing is sent."""
    cluster = cluster_here()
    wide = {"hidden_size": 4096, "intermediate_size": 14336, "num_key_value_heads": 8}
    for name, (axes, layout) in {**CASES, "fsdp_tp_64": ({"fsdp": 8, "tp": 8}, "fsdp_tp")}.items():

        def rank(axes: Mapping[str, int] = axes, layout: str = layout) -> Mapping[str, Any]:
            with one_rank_of(axes, setting.device) as mesh:
                model, inputs = llama(setting, layers=4, batch=2 * next(iter(axes.values())), **wide)
                costs = _costs(model, inputs, layout, SubMesh(axes), {"shipped": cluster})["shipped"]
                module = autopar.parallelize(model, mesh, inputs, layout=layout)
                del model
                found = measured(setting, module, inputs)
                predicted = 1e3 * (costs.compute.seconds + costs.waiting_seconds)
                peak = costs.memory.peak_bytes / 2**30
                return {**found, **beside(found, predicted, peak)}

        setting.part(name, rank)


def predict(setting: Setting) -> None:
    """Six models on one rank: predicted and measured step and peak, by each description of the hardware."""
    one_process()
    clusters = {"shipped": cluster_here()}
    for name in ("here", "tables"):  # by the section calib
        calibrated = setting.folder / f"{name}.toml"
        if calibrated.exists():
            clusters[name] = load_cluster(str(calibrated))
    for name, make in _models(setting).items():
        setting.part(name, partial(_predicted, setting, make, clusters))


def _predicted(setting: Setting, make: Callable[[], Any], clusters: Mapping[str, Cluster]) -> Mapping[str, Any]:
    model, inputs = make()
    costs = _costs(model, inputs, "ddp", SubMesh({"dp": 1}), clusters)
    compiled = _costs(model, inputs, "ddp", SubMesh({"dp": 1}), clusters, TrainingOptions(compiled=True))
    module = autopar.parallelize(model, "dp=1", inputs, layout="ddp")
    del model
    found = measured(setting, module, inputs)
    for name in clusters:
        predicted = beside(found, 1e3 * costs[name].step_seconds, costs[name].memory.peak_bytes / 2**30)
        found[name] = {**predicted, "compiled_ms": round(1e3 * compiled[name].step_seconds, 3)}
    return found


def _costs(
    model: nn.Module,
    inputs: Any,
    layout: str,
    axes: SubMesh,
    clusters: Mapping[str, Cluster],
    options: TrainingOptions | None = None,
) -> dict[str, Costs]:
    """Price a layout by each description of the hardware; the graph, which holds the model, is gone afterwards."""
    graph = autopar.trace(model, inputs)
    plan = propagate_plan(graph, choose_layout(layout, axes), axes)
    plan = plan if options is None else plan.with_options(options)
    return {name: evaluate(graph, plan, cluster) for name, cluster in clusters.items()}


def measured(setting: Setting, module: nn.Module, inputs: Any) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-9, fused=setting.has_gpu)
    step = stepper(module, inputs, optimizer)
    found: dict[str, Any] = setting.medians({"measured": step}, 5)["measured"]
    return {**found, "peak_gib": setting.peak_gib(step)}


def beside(found: Mapping[str, Any], milliseconds: float, peak_gib: float) -> dict[str, Any]:
    compared = {"predicted_ms": round(milliseconds, 3), "predicted_peak_gib": round(peak_gib, 3)}
    compared["time_ratio"] = round(milliseconds / found["ms"], 3)
    if found["peak_gib"]:
        compared["memory_ratio"] = round(peak_gib / found["peak_gib"], 3)
    return compared


def _models(setting: Setting) -> dict[str, Callable[[], Any]]:
    """Dense, of long sequences, small, of convolutions, of experts, an encoder."""
    device = str(setting.device)
    small: dict[str, Any] = {"vocab": 1024, "seq": 128, "batch": 8, "layers": 4, "d_model": 256, "heads": 4}
    experts = {"layers": 4, "d_model": 1024, "heads": 16, "d_ff": 4096, "vocab": 32000, "seq": 512, "batch": 8}
    if setting.tiny:
        small, experts = {}, {}
    return {
        "llama": lambda: llama(setting),
        "llama_long": lambda: llama(setting, batch=1, seq=16384),
        "gpt": lambda: gpt(device=device, **small),
        "resnet": lambda: resnet_50(setting),
        "moe": lambda: moe(device=device, **experts),
        "bert": lambda: bert(setting),
    }
