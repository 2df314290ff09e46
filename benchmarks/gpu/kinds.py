"""Section `kinds`: device time of a step by kind of kernel, beside the prediction of the same kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import autopar
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.lowered_step import lower_step
from autopar.cost.profile import profile as tasks_of
from autopar.cost.tasks import Task
from autopar.ir.analysis.contractions import contractions
from autopar.ir.graph import NamedGraph
from autopar.plans.cluster_here import cluster_here
from autopar.sharding.layout.language import choose_layout
from autopar.sharding.time_slice import propagate_plan
from autopar.submesh import SubMesh
from benchmarks.gpu.setting import Setting, bert, llama, one_process, resnet_50, stepper

__all__ = ["kinds"]

STEPS = 3
# Words in the names of kernels: the first line with a match is the kind.
KERNELS = (
    ("attention", ("fmha", "flash", "sdpa", "attention")),
    ("optimizer", ("adam", "multi_tensor")),
    ("products", ("gemm", "nvjet", "cutlass", "xmma", "conv", "wgrad", "dgrad", "splitk", "implicit")),
    ("copies", ("memcpy", "memset")),
    ("norm", ("norm", "bn_", "batchnorm")),
    ("softmax", ("softmax", "cross_entropy", "nll")),
    ("reduce", ("reduce_kernel",)),
    ("cat", ("catarray",)),
)


def kinds(setting: Setting) -> None:
    """Time of the kernels of a step by their kind, and of the tasks that predict them."""
    one_process()
    models: dict[str, Callable[[], Any]] = {
        "llama": lambda: llama(setting, layers=4),
        "llama_wide": lambda: llama(
            setting, layers=4, batch=2, hidden_size=4096, intermediate_size=14336, num_key_value_heads=8
        ),
        "llama_long": lambda: llama(setting, layers=2, batch=1, seq=16384),
        "bert": lambda: bert(setting),
        "resnet": lambda: resnet_50(setting),
    }
    for name, make in models.items():
        setting.part(name, partial(_kinds, setting, make, cluster_here()))


def _kinds(setting: Setting, make: Callable[[], Any], cluster: Cluster) -> Mapping[str, Any]:
    model, inputs = make()
    predicted = _predicted(model, inputs, cluster)
    module = autopar.parallelize(model, "dp=1", inputs, layout="ddp")
    del model
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-9, fused=setting.has_gpu)
    step = stepper(module, inputs, optimizer)
    for _ in range(3):
        step()
    setting.wait()
    activities = [ProfilerActivity.CUDA] if setting.has_gpu else [ProfilerActivity.CPU]
    with profile(activities=activities) as run:
        for _ in range(STEPS):
            step()
        setting.wait()
    spent, names = defaultdict[str, float](float), defaultdict[str, float](float)
    for event in run.key_averages():
        total = event.self_device_time_total if setting.has_gpu else event.self_cpu_time_total
        milliseconds = total / 1e3 / STEPS
        spent[_kind(event.key)] += milliseconds
        names[event.key[:90]] += milliseconds
    longest = {name: round(value, 3) for name, value in sorted(names.items(), key=lambda one: -one[1])[:24]}
    measured = {kind: round(value, 3) for kind, value in spent.items()}
    whole = {"device_ms": round(sum(spent.values()), 3), "predicted_ms": round(sum(predicted.values()), 3)}
    return {**whole, "measured": measured, "predicted": predicted, "kernels": longest}


def _kind(kernel: str) -> str:
    lower = kernel.lower()
    return next((kind for kind, words in KERNELS if any(word in lower for word in words)), "others")


def _predicted(model: Any, inputs: Any, cluster: Cluster) -> dict[str, float]:
    graph = autopar.trace(model, inputs)
    axes = SubMesh({"dp": 1})
    step = lower_step(graph, propagate_plan(graph, choose_layout("ddp", axes), axes))
    found, known = defaultdict[str, float](float), _kinds_of_ops(graph)
    for task in tasks_of(step, cluster):
        found[_kind_of(task, known)] += 1e3 * task.seconds
    return {kind: round(value, 3) for kind, value in found.items()}


def _kinds_of_ops(graph: NamedGraph) -> dict[str, str]:
    found = {}
    for node in graph.nodes:
        if "attention" in node.op:
            found[node.name] = "attention"
        else:
            found[node.name] = "products" if contractions(node) else node.op
    return found


def _kind_of(task: Task, known: Mapping[str, str]) -> str:
    if task.direction == "optimizer":
        return "optimizer"
    return known.get(task.name, "sums and copies")
