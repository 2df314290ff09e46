"""The pipeline, as functions that read like it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.cost.hardware.cluster import Cluster
from autopar.ir.precision import OWN, Precision, parse_precision
from autopar.lowering.collectives.process_groups import device_mesh, device_type_of
from autopar.mesh import Mesh
from autopar.plans.find import PlanRequest, check_outputs, plan_graph
from autopar.plans.header import read_header
from autopar.plans.open_mesh import close_mesh, meshes_of, named_mesh, search_mesh
from autopar.plans.plan import Plan
from autopar.plans.planners import LayoutPlanner, PlanFilePlanner, SearchPlanner, has_holes
from autopar.plans.unequal import with_replica_speeds
from autopar.runtime.agreement import Agreement
from autopar.runtime.kept_calls import SizeOptions
from autopar.runtime.module import ParallelModule, Planner
from autopar.runtime.sync.replica_batch import ReplicaShares
from autopar.runtime.sync.replica_group import ReplicaSetting, replica_devices
from autopar.runtime.sync.torchft_mean import has_lighthouse, is_in_use, replica_group_of
from autopar.sharding.layout.language import Layout, choose_layout, parse_layout
from autopar.sharding.layout.source import read_text
from autopar.sharding.options import Outputs, TrainingOptions
from autopar.sharding.replicas import Drift, batch_dim_of, split_replicas
from autopar.solver.integer.choice import parse_solver
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
    offload_states: bool = False,
    precision: str | Precision | None = None,
    outputs: Outputs = "sharded",
    local_inputs: bool = False,
    time_limit: float = 30,
    devices: int | None = None,
    cache: bool = True,
    solver: str = "search",
) -> Plan:
    """Search the best plan for a model on a mesh, within `time_limit` seconds.

    Needs no process group and no device.

    Parameters:
        model: any module; it may be on the meta device.
        mesh: axes and sizes, `"dp=2,tp=4"`. Open sizes, `"dp=?,tp=?"` or `"?"`, are searched and need `devices`.
        inputs: example arguments, a tuple of positional ones or a dict of keyword ones.
        layout: settles a part of the plan or all of it: text, a `.lay` file, the name of a strategy, or a plan.
        cluster: a name of `autopar clusters` or a TOML file; by default this machine.
        memory: the limit per device, `"70GiB"`, `"90%"` or bytes; by default 90 % of the device's memory.
        dims: names for dims of inputs, parameters and buffers, by name or pattern.
        optimizer: the optimizer whose states count as memory.
        offload_states: these states live in memory of the host, and come to the device for the step.
        precision: dtypes of compute, weights, optimizer states and gradient sums: `"fp32"`, `"bf16"` (with float32
            weights, states and sums), `"bf16-pure"`, `"fp16"`, `"fp64"`, or one of them with fields that differ,
            `"bf16, reduce=bf16"`; by default the dtypes of the model.
        outputs: form of the results, as in `parallelize`.
        local_inputs: the inputs of a step are the shards of each rank.
        time_limit: seconds of search.
        devices: number of devices of a mesh with open sizes.
        cache: reuse and keep plans in the user's cache.
        solver: who finds the plan and proves its bound. `"search"`; `"lp"`, the search with the bound of the linear
            relaxation; or `"ilp"`, the integer program by OR-Tools (`"ilp:highs"`, `"ilp:scip"`, `"ilp:cp-sat"`).

    Returns:
        The best plan found, with its predicted costs and a bound on the best possible step time.

    `Plan.save` writes it to a file, `Plan.load` reads it back, `parallelize(..., layout=plan)` runs it.

    >>> import autopar, torch
    >>> model, inputs = torch.nn.Linear(16, 64, device="meta"), (torch.empty(32, 16, device="meta"),)
    >>> plan = autopar.plan(model, "dp=2", inputs, layout="ddp", cluster="h100", cache=False)
    >>> print(plan.layout, end="")
    mesh dp=2
    batch -> dp
    * -> none
    >>> plan.fits, plan.memory_bytes < 2**20
    (True, True)
    """
    check_outputs(outputs)
    options = TrainingOptions(outputs, local_inputs, optimizer, offload_states, precision=parse_precision(precision))
    chosen_solver = parse_solver(solver)
    request = PlanRequest(cluster, memory, options, time_limit, cache, any_mesh=mesh == "?", solver=chosen_solver)
    meshes = meshes_of(mesh, devices)
    chosen = layout.layout if isinstance(layout, Plan) else layout
    return plan_graph(trace(model, inputs, dims=dims, precision=options.precision), meshes, chosen, request)


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
    offload_states: bool | None = None,
    precision: str | Precision | None = None,
    outputs: Outputs = "sharded",
    local_inputs: bool = False,
    time_limit: float = 30,
    dynamic: bool | None = None,
    most_calls: int = 64,
) -> ParallelModule:
    """Return the model as a module that runs on all devices of a mesh.

    Every process of the mesh calls this with the same arguments. Without a layout, or with a `?` in it, the first rank
    searches a plan as `autopar.plan` does, and all ranks run it. The module runs on the device of the model and inputs,
    unless the process group's only backend or a `DeviceMesh` says otherwise. Inputs are not moved.

    Parameters:
        model: any module that is not parallel yet.
        mesh: axes and sizes, `"dp=2,tp=4"`, or a torch `DeviceMesh` with names. An open size, `"dp=?,tp=4"`, follows
            from the number of processes; several, or `"?"` for `"dp=?,tp=?"`, are searched.
        inputs: example arguments; without them the model is traced at its first call.
        layout: text, a `.lay` file, the name of a strategy, or a plan.
        cluster: the cluster that a search prices plans on, as in `autopar.plan`; `by speed` takes its speeds.
        memory: the limit per device.
        dims: names for dims of inputs, parameters and buffers, by name or pattern.
        optimizer: the optimizer whose states count as memory.
        offload_states: these states live in memory of the host; by default as the plan says, else on the device.
        precision: dtypes of compute, weights, optimizer states and gradient sums, as in `autopar.plan`; by default
            those of the plan, else of the model. Parameters are stored in the dtype of the weights.
        outputs: `"sharded"` returns DTensors, which are gathered where they meet plain tensors. `"full"` gathers all,
            `"local"` returns the shards of this rank and averages gradients over the shards as DDP does, `"local_sum"`
            adds gradients up. Scalars are whole. `"loss"` returns scalars alone and None for all else, so that no
            logits of all micro-batches are kept.
        local_inputs: the inputs are the shards of this rank already.
        time_limit: seconds of search.
        dynamic: as in `torch.compile`: None traces with symbolic sizes at the second size of the inputs, True at the
            first, False never.
        most_calls: number of compiled calls to keep: one for each shape of the inputs, mode and grad mode.

    Returns:
        A module that is called as the model is; its parameters are DTensors under the model's names.

    `load_full_state_dict` takes the whole weights of a model; a DTensor's `full_tensor()` gives them back.

    One process stands for a mesh here; `torchrun` starts several.

    >>> import autopar, torch
    >>> store = torch.distributed.HashStore()
    >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> module = autopar.parallelize(torch.nn.Linear(4, 2), "dp=1", (torch.ones(8, 4),), layout="ddp")
    >>> module(torch.ones(8, 4)).shape
    torch.Size([8, 2])
    >>> torch.distributed.destroy_process_group()
    """
    check_plain(model)
    check_outputs(outputs)
    sizes = SizeOptions(dynamic, most_calls)
    said = None if precision is None else parse_precision(precision)
    options = TrainingOptions(outputs, local_inputs, optimizer, bool(offload_states), precision=said or OWN)
    request = PlanRequest(cluster, memory, options, time_limit)
    # A DeviceMesh becomes a Mesh of the same names and sizes.
    named_axes, searched = named_mesh(mesh), None
    device = device_type_of(model, inputs)
    if named_axes.is_open:
        found = close_mesh(named_axes, device)
        named_axes = found[0]
        if len(found) > 1:
            named_axes, searched = search_mesh(model, found, inputs, layout, dims, request, device)
    planner, devices, replica = _places(
        mesh,
        named_axes,
        device,
        lambda place: _planner(layout, named_axes, dims, request, place, searched),
        None if cluster is None else partial(with_replica_speeds, request.cluster_value()),
    )
    if isinstance(planner, PlanFilePlanner):
        options = replace(options, precision=planner.precision if said is None else said)
        options = replace(options, offload_states=planner.offload_states if offload_states is None else offload_states)
    return ParallelModule(model, devices, planner, options, inputs, replica, sizes)


def _places(
    mesh: str | Mesh | DeviceMesh,
    axes: Mesh,
    device: str,
    decide: Callable[[str], tuple[Planner, Drift | None, str]],
    shares: ReplicaShares | None,
) -> tuple[Planner, DeviceMesh, ReplicaSetting | None]:
    """Return who decides, the device mesh of this rank's replica, and the replicas."""
    if has_lighthouse():
        planner, drift, dim = decide(device)
        if drift is not None and is_in_use(drift):  # the other replicas are launches of their own
            own = device_mesh(drift.replica_mesh, device)
            return planner, own, ReplicaSetting(drift, replica_group_of(own, drift), own, dim, shares)
    devices = device_mesh(axes, device) if isinstance(mesh, str | Mesh) else mesh
    # A layout file that one rank alone cannot read stops all of them.
    planner, drift, dim = Agreement(devices).together(lambda: decide(devices.device_type))
    if drift is None:
        return planner, devices, None
    own, group = replica_devices(devices, drift)
    return planner, own, ReplicaSetting(drift, group, devices, dim, shares)


def _planner(
    layout: str | Path | Layout | Plan | None,
    mesh: Mesh,
    dims: Mapping[str, str] | None,
    request: PlanRequest,
    device_type: str,
    searched: str | None,
) -> tuple[Planner, Drift | None, str]:
    """Return who decides: a plan, a search where something is left to it, or the layout by itself.

    With it come the replicas that the layout states, for whose inner mesh it decides, and the dim that they share.
    `searched` is the text of the plan that was found together with the mesh.
    """
    text, name = (layout.text, "<plan>") if isinstance(layout, Plan) else (None, str(layout))
    if isinstance(layout, Path) or (isinstance(layout, str) and layout.endswith(".lay")):
        text = read_text(layout)
    header = None if text is None else read_header(text, name)
    if text is not None and header is not None:
        written = parse_layout(text, name)
        planner_of_file = PlanFilePlanner(text, name, mesh, dims, request.options.outputs)
        return planner_of_file, split_replicas(written, mesh)[1], batch_dim_of(written)
    assert not isinstance(layout, Plan)
    if layout is None:
        return SearchPlanner(None, mesh, dims, request, searched), None, "batch"
    chosen, drift = split_replicas(choose_layout(layout, mesh.whole), mesh)
    inner = mesh if drift is None else drift.replica_mesh
    planner: Planner = (
        SearchPlanner(chosen, inner, dims, request, searched if drift is None else None)
        if has_holes(chosen)
        else LayoutPlanner(chosen, inner.whole, dims, request, device_type, inner.links)
    )
    return planner, drift, batch_dim_of(chosen)
