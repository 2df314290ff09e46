"""Sections about whole steps on one rank: versions, plain beside parallel, CUDA graphs, the optimizer."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.plans.cluster_here import cluster_here
from benchmarks.gpu.setting import Setting, llama, one_process, resnet_50, stepper

__all__ = ["env", "graphs", "optim", "steps"]


def env(setting: Setting) -> None:
    """Versions, and the rate of one large product."""
    names = ("ortools", "numba", "transformers", "numpy", "triton")
    known = {one.metadata["Name"] for one in importlib.metadata.distributions()}

    def versions() -> Mapping[str, Any]:
        found = {name: importlib.metadata.version(name) for name in names if name in known}
        found |= {"torch": torch.__version__, "python": platform.python_version(), "cuda": str(torch.version.cuda)}
        if setting.has_gpu:
            found["gpu"] = torch.cuda.get_device_name()
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
            found["cluster"] = cluster_here().name
        return found

    def product() -> Mapping[str, Any]:
        size = 128 if setting.tiny else 8192
        x, y = (torch.randn(size, size, device=setting.device, dtype=torch.bfloat16) for _ in range(2))
        found = setting.medians({"product": lambda: x @ y}, 10)
        return {**found, "tflops": round(2 * size**3 / found["product"]["ms"] / 1e9, 3)}

    setting.part("versions", versions)
    setting.part("product", product)


def steps(setting: Setting) -> None:
    """A step of the plain model beside one of the parallel module on one rank."""
    one_process()
    model, inputs = llama(setting)
    ours = autopar.parallelize(model, "dp=1", inputs, layout="ddp")
    plain, parallel = stepper(model, inputs), stepper(ours, inputs)

    def same() -> Mapping[str, Any]:
        plain()
        parallel()
        pairs = zip(model.parameters(), ours.parameters(), strict=True)
        return {"worst_relative_gradient": max(_difference(a.grad, b.grad) for a, b in pairs)}

    def eager() -> Mapping[str, Any]:
        peaks = {"plain_peak_gib": setting.peak_gib(plain), "autopar_peak_gib": setting.peak_gib(parallel)}
        return {**setting.medians({"plain": plain, "autopar": parallel}, 8), **peaks}

    def host_bound() -> Mapping[str, Any]:
        small, given = llama(setting, layers=4, batch=1, seq=64)
        module = autopar.parallelize(small, "dp=1", given, layout="ddp")
        return setting.medians({"plain": stepper(small, given), "autopar": stepper(module, given)}, 32)

    def images() -> Mapping[str, Any]:
        small, given = resnet_50(setting)
        module = autopar.parallelize(small, "dp=1", given, layout="ddp")
        one, other = stepper(small, given), stepper(module, given)
        peaks = {"plain_peak_gib": setting.peak_gib(one), "autopar_peak_gib": setting.peak_gib(other)}
        return {**setting.medians({"plain": one, "autopar": other}, 8), **peaks}

    def compiled() -> Mapping[str, Any]:
        short, given = llama(setting, layers=4)
        modules = {"plain": short, "autopar": autopar.parallelize(short, "dp=1", given, layout="ddp")}
        return setting.medians(_compiled(setting, modules, given, None), 8)

    for part in (same, eager, host_bound, images, compiled):
        setting.part(part.__name__, part)


def _compiled(setting: Setting, modules: Mapping[str, nn.Module], inputs: Any, mode: str | None) -> dict[str, Any]:
    # Inductor's compilation takes minutes on a busy CPU and is tested elsewhere.
    how: dict[str, Any] = {"backend": "aot_eager"} if setting.tiny else {"mode": mode}
    return {name: stepper(torch.compile(module, **how), inputs) for name, module in modules.items()}


def _difference(expected: Tensor | None, found: Any) -> float:
    assert expected is not None, "every parameter is trained"
    local = found.to_local() if hasattr(found, "to_local") else found
    scale = float(expected.float().abs().max()) or 1.0
    return float((local.float() - expected.float()).abs().max()) / scale


def graphs(setting: Setting) -> None:
    """CUDA graphs: a whole captured step, and `torch.compile(mode="reduce-overhead")`."""
    one_process()
    model, inputs = llama(setting, layers=4, batch=1, seq=512)
    modules = {"plain": model, "autopar": autopar.parallelize(model, "dp=1", inputs, layout="ddp")}
    for name, module in modules.items():
        setting.part(f"capture_{name}", partial(_captured, setting, module, inputs))

    def reduce_overhead() -> Mapping[str, Any]:
        return setting.medians(_compiled(setting, modules, inputs, "reduce-overhead"), 8, warm=4)

    setting.part("reduce_overhead", reduce_overhead)


def _captured(setting: Setting, module: nn.Module, inputs: Any) -> Mapping[str, Any]:
    on = setting.has_gpu
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=on, capturable=on)
    step = stepper(module, inputs, optimizer)
    if not on:
        step()
        return {"skipped": "no GPU"}
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    first: Any = next(module.parameters())
    local = first.to_local() if hasattr(first, "to_local") else first
    before = local.detach().clone()
    found = setting.medians({"eager": step, "graph": graph.replay}, 10)
    return {**found, "parameters_change": bool((local.detach() != before).any())}


def optim(setting: Setting) -> None:
    """AdamW and the clipping of gradients on parameters that are DTensors, beside plain ones."""
    one_process()
    model, inputs = llama(setting, layers=8, batch=1, seq=256)
    modules = {"plain": model, "autopar": autopar.parallelize(model, "dp=1", inputs, layout="ddp")}
    for module in modules.values():
        stepper(module, inputs)()
    kinds: dict[str, dict[str, Any]] = {"default": {}, "fused": {"fused": True}}
    kinds |= {"foreach": {"foreach": True}, "loop": {"foreach": False}}
    for kind, options in kinds.items():

        def adamw(options: dict[str, Any] = options) -> Mapping[str, Any]:
            made = {name: torch.optim.AdamW(one.parameters(), lr=1e-5, **options) for name, one in modules.items()}
            return setting.medians({name: one.step for name, one in made.items()}, 8, warm=2)

        setting.part(kind, adamw)

    def clip() -> Mapping[str, Any]:
        norm = torch.nn.utils.clip_grad_norm_
        calls = {name: (lambda one=one: norm(one.parameters(), 1.0)) for name, one in modules.items()}
        return setting.medians(calls, 5)

    setting.part("clip_grad_norm", clip)
