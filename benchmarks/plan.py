"""Measure the time from a model to the graph of one rank, by stage, beside a bare export of the same model.

    python -m benchmarks.plan                       # Llama-3-8B on dp=8,tp=8, cluster h100, 70 GiB a device
    python -m benchmarks.plan --layers 8 --dtype bfloat16 --mesh dp=64 --memory 80
    python -m benchmarks.plan --shape 405b --batch 2048 --dtype bfloat16 --mesh dp=2048,tp=8   # 126 layers

Stages: `trace`; `search`, which proves its bound; `strategies`, the published ones priced beside what was found;
`text`, the plan written (as `save` and the cache do) and read again, as the other ranks do; `rewrite`, the graph that
one rank runs. The first three are `autopar.plan`. Seconds are the processor's, which other programs do not count into,
in one process, after a small model has been through all of it. No process group of that size is needed: one that sends
nothing stands in for it.
"""

from __future__ import annotations

import argparse
import gc
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import autopar
from autopar.errors import AutoparWarning
from autopar.ir.graph import NamedGraph
from autopar.lowering.collectives.process_groups import Groups
from autopar.lowering.emit import emit
from autopar.lowering.modules.bucket import GradientSync, ParameterHandling
from autopar.lowering.passes.bucket_parameters import BucketedParameters
from autopar.mesh import Mesh
from autopar.plans.find import PlanRequest, plan_graph
from autopar.plans.planners import PlanFilePlanner
from autopar.sharding.assignment import Assignment
from autopar.sharding.layout.parameter_storage import GatherPolicy
from autopar.solver import Progress
from benchmarks.models import LLAMAS, SHAPES, ModelAndInputs

STAGES = ("export", "trace", "search", "strategies", "text", "rewrite")
# The stages of `autopar.plan`.
PLAN = STAGES[1:4]


class Clock:
    """The processor's seconds, stage by stage."""

    def __init__(self) -> None:
        gc.collect()
        self.last = time.process_time()
        self.seconds: dict[str, float] = {}

    def done(self, stage: str) -> None:
        now = time.process_time()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self.last
        self.last = now

    def record_stage(self, progress: Progress) -> None:
        """Record the end of a stage that the planner reports."""
        self.done(progress.stage)


@dataclass(frozen=True)
class Llama:
    """Size of a model of Llama 3; `layers` of None stands for all."""

    shape: str = "8b"
    layers: int | None = None
    batch: int = 16


def llama(size: Llama, dtype: torch.dtype) -> ModelAndInputs:
    return LLAMAS[size.shape].made(size.layers, size.batch, dtype)


@contextmanager
def silent_groups(mesh: Mesh) -> Iterator[Groups]:
    """Yield the process groups of as many processes, of which this is the first; nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=mesh.size)
    try:
        yield Groups(init_device_mesh("cpu", tuple(mesh.sizes), mesh_dim_names=mesh.names))
    finally:
        dist.destroy_process_group()


def measured(size: Llama, dtype: torch.dtype, mesh: Mesh, asked: PlanRequest) -> tuple[dict[str, float], autopar.Plan]:
    """Return the seconds of every stage, and the plan."""
    model, inputs = llama(size, dtype)
    clock = Clock()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.export.export(model, (), inputs, strict=False).run_decompositions({})
    clock.done("export")
    model, inputs = llama(size, dtype)
    gc.collect()
    clock.last = time.process_time()
    graph = autopar.trace(model, inputs)
    clock.done("trace")
    plan = plan_graph(graph, (mesh,), None, asked, clock.record_stage)
    _ = plan.costs
    clock.done("search")
    text = plan.text
    clock.done("text")
    graph, assignment = PlanFilePlanner(text, "<plan>", mesh, None).read(graph, text)
    clock.done("text")
    with silent_groups(mesh) as groups:
        clock.last = time.process_time()
        emit(
            graph,
            assignment,
            groups,
            asked.options.outputs,
            asked.options.local_inputs,
            parameters_of(graph, assignment),
        )
        clock.done("rewrite")
    return clock.seconds, plan


def parameters_of(graph: NamedGraph, assignment: Assignment) -> BucketedParameters:
    """As a parallel module handles them that computes in the dtypes in which it stores."""
    none = GatherPolicy(False, False, False)
    held = {
        tensor.name: (tensor.dtype, assignment.gather_policies.get(tensor.name, none)) for tensor in graph.parameters
    }
    found = {
        name: ParameterHandling(
            dtype, dtype, dtype, gather_policy.defer_reduction, gather_policy.regather, gather_policy.keep_gathered
        )
        for name, (dtype, gather_policy) in held.items()
    }
    return BucketedParameters(found, GradientSync())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="8b")
    parser.add_argument("--layers", type=int, help="all of the shape without")
    parser.add_argument("--batch", type=int, default=16, help="sequences of 8192 tokens")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--mesh", default="dp=8,tp=8")
    parser.add_argument("--cluster", default="h100")
    parser.add_argument("--memory", type=float, default=70.0, help="GiB on each device")
    parser.add_argument("--time-limit", type=float, default=120.0)
    given = parser.parse_args()
    warnings.simplefilter("ignore", AutoparWarning)
    asked = PlanRequest(given.cluster, given.memory * 2**30, time_limit=given.time_limit, cache=False)
    mesh = Mesh(given.mesh)
    measured(Llama(layers=1), torch.float32, mesh, asked)
    heads = f"{'total':>8} {'/ export':>8} {'plan / export':>13}  plan"
    print(f"{'dtype':>9}", *(f"{stage:>10}" for stage in STAGES), heads, flush=True)
    for dtype in given.dtype:
        seconds, plan = measured(Llama(given.shape, given.layers, given.batch), getattr(torch, dtype), mesh, asked)
        ours = sum(seconds[stage] for stage in STAGES[1:])
        planned = sum(seconds[stage] for stage in PLAN)
        found = (
            f"{1e3 * plan.step_seconds:.1f} ms, {plan.memory_bytes / 2**30:.1f} GiB, gap {100 * (plan.gap or 0):.3f} %"
        )
        print(
            f"{dtype:>9}",
            *(f"{seconds[stage]:10.2f}" for stage in STAGES),
            f"{ours:8.2f} {ours / seconds['export']:8.2f} {planned / seconds['export']:13.2f}",
            f" {found}, from {plan.origin}",
            flush=True,
        )


if __name__ == "__main__":
    main()
