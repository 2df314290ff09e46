"""The pipeline, as functions that read like it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.cost.hardware.cluster import Cluster
from autopar.errors import AutoparError
from autopar.lowering.collectives.process_groups import device_mesh, device_type_of
from autopar.mesh import Mesh, SubMesh
from autopar.plans.find import PlanRequest, check_outputs, meshes_of, plan_graph
from autopar.plans.header import read_header
from autopar.plans.plan import Plan
from autopar.plans.planners import LayoutPlanner, PlanFilePlanner, SearchPlanner, has_holes
from autopar.runtime.module import CallSettings, ParallelModule, Planner
from autopar.runtime.ranks.agreement import Agreement
from autopar.sharding.layout.language import Layout, choose_layout
from autopar.sharding.layout.source import read_text
from autopar.sharding.options import Outputs, TrainingOptions
from autopar.tracing.trace import check_plain, trace

__all__ = ["parallelize", "plan"]


def plan(
    model: nn.Module,
    mesh: str | Mesh | DeviceMesh,
    inputs: tuple[Any, ...] | Mapping[str, Any],
    *,
    layout: str | Path | Layout | Plan | None = None,
    cluster: str | Path | Cluster | None = None,
    memory: str | float | None = None,
    dims: Mapping[str, str] | None = None,
    optimizer: str = "adamw",
    outputs: Outputs = "sharded",
    local_inputs: bool = False,
    time_limit: float = 30,
    devices: int | None = None,
    cache: bool = True,
) -> Plan:
    """The best plan that is found for a model on a mesh, within `time_limit` seconds of search.

    Needs no process group and no device; the model may be on the meta device. `layout` settles a part of the plan, or
    all of it. `cluster` is the name of one (`autopar clusters`) or a TOML file, by default this machine's; `memory` is
    what a device may hold, `"70GiB"` or bytes, by default what it has. `mesh="?"`, or a mesh with open sizes, is
    searched for the given number of `devices`. A plan that was found before is found again in the user's cache, unless
    `cache=False`.
    """
    check_outputs(outputs)
    asked = PlanRequest(cluster, memory, TrainingOptions(outputs, local_inputs, optimizer), time_limit, cache)
    meshes = meshes_of(mesh, devices)
    chosen = layout.layout if isinstance(layout, Plan) else layout
    return plan_graph(trace(model, inputs, dims=dims), meshes, chosen, asked)


def parallelize(
    model: nn.Module,
    mesh: str | Mesh | DeviceMesh,
    inputs: tuple[Any, ...] | Mapping[str, Any] | None = None,
    *,
    layout: str | Path | Layout | Plan | None = None,
    cluster: str | Path | Cluster | None = None,
    memory: str | float | None = None,
    dims: Mapping[str, str] | None = None,
    optimizer: str = "adamw",
    outputs: Outputs = "sharded",
    local_inputs: bool = False,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    time_limit: float = 30,
) -> ParallelModule:
    """The model on all devices of the mesh, under a layout: text, a `.lay` file, the name of a strategy, or a plan.

    Without a layout, or where a layout has a `?`, the first rank searches for the best plan, as `autopar.plan` does
    with the same `cluster`, `memory`, `optimizer` and `time_limit`, and all ranks run it.

    Every process of the mesh calls this with the same model and inputs. It runs where these are, on the host or on the
    process's GPU, unless the process group's only backend or a DeviceMesh says otherwise; inputs are not moved. The
    result is called as the model is; its parameters are DTensors under the model's names. Without `inputs` it is
    traced at its first call. `outputs`: tensors that are no scalars come back as DTensors (`sharded`), gathered
    (`full`) or as this rank's plain shards: gradients are then averaged over the shards, as DDP does for a loss that
    is a mean (`local`), or summed (`local_sum`).
    `local_inputs`: the inputs are this rank's shards already. `compute_dtype`: parameters and inputs are cast to it for
    the forward and backward, while the parameters that the optimizer sees stay as they are; `reduce_dtype`: gradients
    are added up in it, by default in the dtype of their parameter.
    """
    check_plain(model)
    check_outputs(outputs)
    for argument, dtype in (("compute_dtype", compute_dtype), ("reduce_dtype", reduce_dtype)):
        if dtype is not None and not getattr(dtype, "is_floating_point", False):
            raise AutoparError(f"{argument}={dtype!r} is no floating point dtype\nfix: {argument}=torch.bfloat16, say")
    named_axes = mesh if isinstance(mesh, Mesh) else Mesh(mesh)
    devices = device_mesh(named_axes, device_type_of(model, inputs)) if isinstance(mesh, str | Mesh) else mesh
    axes = named_axes.whole
    stored = next((parameter.dtype for parameter in model.parameters()), None) if compute_dtype is not None else None
    options = TrainingOptions(outputs, local_inputs, optimizer, master_dtype=stored, gradient_dtype=reduce_dtype)
    asked = PlanRequest(cluster, memory, options, time_limit)
    # A layout file that one rank alone cannot read stops all of them.
    planner = Agreement(devices).together(lambda: _planner(layout, named_axes, axes, dims, asked, devices.device_type))
    return ParallelModule(model, devices, planner, CallSettings(options, compute_dtype), inputs)


def _planner(
    layout: str | Path | Layout | Plan | None,
    mesh: Mesh,
    axes: SubMesh,
    dims: Mapping[str, str] | None,
    asked: PlanRequest,
    device_type: str,
) -> Planner:
    """Who decides: a plan, a search where something is left to it, or the layout by itself."""
    text, name = (layout.text, "<plan>") if isinstance(layout, Plan) else (None, str(layout))
    if isinstance(layout, Path) or (isinstance(layout, str) and layout.endswith(".lay")):
        text = read_text(layout)
    header = None if text is None else read_header(text, name)
    if text is not None and header is not None:
        return PlanFilePlanner(text, name, axes, dims)
    assert not isinstance(layout, Plan)
    chosen = None if layout is None else choose_layout(layout, axes)
    if chosen is None or has_holes(chosen):
        return SearchPlanner(chosen, mesh, dims, asked)
    return LayoutPlanner(chosen, axes, dims, asked, device_type)
