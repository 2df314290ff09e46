"""A script as a user may write it, with every public name; test_public_names.py runs it, and mypy reads it."""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import autopar


@torch.library.custom_op("user_script::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = autopar.named(x, "batch features")
        y: torch.Tensor = self.down(autopar.constrain(functional.gelu(self.up(x)), "batch -> dp"))
        return y.square().mean()


def dims_of(graph: autopar.NamedGraph) -> dict[str, autopar.Dim]:
    return dict(graph.dims)


def tensor_of(graph: autopar.NamedGraph, node: autopar.NamedNode) -> autopar.NamedTensor | None:
    name = node.outputs[0]
    return None if name is None else graph.tensors[name]


def kind_of(error: autopar.AutoparError) -> str:
    match error:
        case autopar.LayoutError(code=code):
            return code
        case autopar.ClusterError() | autopar.MeshError() | autopar.TargetError():
            return "where"
        case autopar.DimsError() | autopar.RuleError() | autopar.TraceError():
            return "model"
        case autopar.VerifyError():
            return "answer"
    return "other"


autopar.register_rule("user_script::doubled", "a b -> a b")
assert autopar.prove_rule("user_script::doubled").holds

model, inputs = Model(), (torch.randn(4, 8),)
mesh = autopar.Mesh("dp=1,tp=1")
graph = autopar.trace(model, inputs, dims={"x": "batch features"})
print(graph.coverage()["table"], "ops in", len(graph.nodes), "nodes;", sorted(dims_of(graph)))
assert tensor_of(graph, graph.nodes[0]) is not None

plan = autopar.plan(model, mesh, inputs, cluster="local-cpu", time_limit=5, cache=False)
print(plan.summary(), plan.explain("up.weight"), plan.diff(plan), plan.layout, sep="\n")
print(plan.step_seconds, plan.memory_bytes, plan.gap, len(plan.collectives), len(plan.alternatives("up.weight")))
with tempfile.TemporaryDirectory() as folder:
    plan.save(Path(folder, "model.plan.lay"))
    again: autopar.Plan = autopar.Plan.load(Path(folder, "model.plan.lay"), model, inputs)
assert again.decided == plan.decided

cluster = autopar.load_cluster("h100")
assert autopar.evaluate(plan.graph, plan.decided, cluster).step_seconds > 0
assert autopar.timeline(plan.graph, plan.decided, cluster).seconds > 0

try:
    autopar.plan(model, mesh, inputs, layout="bacth -> dp")
except autopar.AutoparError as error:
    print("refused:", kind_of(error))

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)
with warnings.catch_warnings():
    warnings.simplefilter("error", autopar.AutoparWarning)
    parallel: autopar.ParallelModule = autopar.parallelize(model, mesh, inputs, layout=plan)
optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
parallel(*inputs).backward()
optimizer.step()
assert len(parallel.collectives()) == 0
with tempfile.TemporaryDirectory() as folder:
    checkpoints = autopar.Checkpoints(folder, keep=1)
    checkpoints.save({"model": parallel}, 1)
    checkpoints.finish()
    assert checkpoints.load({"model": parallel}) == 1
rows = torch.utils.data.TensorDataset(*(tensor.detach() for tensor in inputs))
loader: autopar.BatchLoader = autopar.BatchLoader(parallel, rows, len(rows))
assert len([parallel(**batch) for batch in loader]) == len(loader) == 1
padded = autopar.pad_to_lengths({"input_ids": torch.ones(2, 5, dtype=torch.long)}, [8])
assert padded["attention_mask"].sum() == 10
dist.destroy_process_group()
