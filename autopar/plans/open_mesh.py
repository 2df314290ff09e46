"""Open sizes of a mesh: they follow from the number of devices or processes, or are searched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import MeshError
from autopar.lowering.collectives.process_groups import device_mesh
from autopar.lowering.collectives.start_group import running_ranks
from autopar.mesh import Mesh, MeshAxis
from autopar.plans.find import PlanRequest, plan_graph
from autopar.plans.plan import Plan
from autopar.runtime.agreement import Agreement
from autopar.runtime.random_keys import kept_generators
from autopar.sharding.layout.language import Layout, choose_layout
from autopar.tracing.trace import trace

__all__ = ["close_mesh", "meshes_of", "named_mesh", "search_mesh"]


def named_mesh(mesh: str | Mesh | DeviceMesh) -> Mesh:
    """Return names and sizes of a mesh; `?` stands for `dp=?,tp=?`."""
    return Mesh("dp=?,tp=?") if mesh == "?" else mesh if isinstance(mesh, Mesh) else Mesh(mesh)


def meshes_of(mesh: str | Mesh | DeviceMesh, devices: int | None) -> tuple[Mesh, ...]:
    """Return the mesh, or all meshes that its open sizes allow."""
    given = named_mesh(mesh)
    if not given.is_open:
        if devices is not None and given.size != devices:
            raise MeshError(
                f"wrong devices={devices}: expected {given.size}, as in the mesh {given}\nfix: give the mesh alone"
            )
        return (given,)
    if devices is None:
        raise MeshError(
            f"the mesh {given} has open sizes and needs a number of devices\nfix: as in devices=64, --devices 64"
        )
    if devices < 1:
        raise MeshError(f"{devices} devices: expected a whole number from 1 up\nfix: as in devices=64, --devices 64")
    known = prod(size for size in given.axes.values() if size is not None)
    if devices % known:
        raise MeshError(
            f"wrong devices={devices} for the mesh {given}: expected a multiple of {known}\n"
            "fix: change the sizes of the mesh or the number of devices"
        )
    return tuple(_closed(given.declared, devices // known))


def _closed(axes: Sequence[MeshAxis], left: int) -> Iterator[Mesh]:
    if not axes:
        return
    first, *rest = axes
    is_last = all(axis.size is not None for axis in rest)
    for size in [left] if is_last else [n for n in range(1, left + 1) if left % n == 0]:
        if first.size is not None:
            size = first.size
        axis = replace(first, size=size)
        remaining = left if first.size is not None else left // size
        if not rest:
            yield Mesh((axis,))
        for other in _closed(rest, remaining):
            yield Mesh((axis, *other.declared))
        if first.size is not None:
            return


def close_mesh(mesh: Mesh, device: str) -> tuple[Mesh, ...]:
    """Return the meshes that an open one can be on the running processes; one if a single size is open."""
    ranks = running_ranks(mesh, device)
    given = {axis: size for axis, size in mesh.axes.items() if size is not None}
    known = prod(given.values())
    if ranks % known:
        groups = ",".join(f"{axis}={size}" for axis, size in given.items())
        raise MeshError(
            f"the mesh {mesh} needs a multiple of {known} ranks, but {ranks} processes are running\n"
            f"fix: torchrun --nproc-per-node {known}, so that each node has whole groups of {groups}; or leave one of "
            "these sizes open, too"
        )
    return meshes_of(mesh, ranks)


def search_mesh(
    model: nn.Module,
    meshes: tuple[Mesh, ...],
    inputs: tuple[Any, ...] | Mapping[str, Any] | None,
    layout: str | Path | Layout | Plan | None,
    dims: Mapping[str, str] | None,
    request: PlanRequest,
    device: str,
) -> tuple[Mesh, str]:
    """Return the best mesh of several, and the text of its plan; the first rank searches."""
    ranks = meshes[0].size
    _check_searchable(meshes, inputs, request)
    everyone = Agreement(device_mesh(Mesh((MeshAxis("rank", ranks),)), device))
    said = layout.layout if isinstance(layout, Plan) else layout

    def search() -> tuple[str, str]:
        assert inputs is not None, "checked"
        # Other ranks draw nothing here, so this one must not either.
        with kept_generators(_current(device)):
            graph = trace(model, inputs, dims=dims, precision=request.options.precision)
            plan = plan_graph(graph, _that_fit(meshes, said), said, request)
        return str(plan.mesh), plan.text

    mesh, text = everyone.decided_by_first(search)
    return Mesh(mesh), text


def _current(device: str) -> torch.device:
    return torch.device(device) if device == "cpu" else torch.device(device, torch.accelerator.current_device_index())


def _check_searchable(
    meshes: tuple[Mesh, ...], inputs: tuple[Any, ...] | Mapping[str, Any] | None, request: PlanRequest
) -> None:
    sizes = f"{meshes[0].size} processes can be {', '.join(map(str, meshes[:3]))}{', ...' if meshes[3:] else ''}"
    if inputs is None:
        raise MeshError(
            f"a mesh with several open sizes is searched, which needs example inputs; {sizes}\n"
            "fix: give parallelize inputs, or leave only one size open"
        )
    if request.options.local_inputs:
        raise MeshError(
            f"a mesh with several open sizes is searched, which needs whole inputs, not local_inputs=True; {sizes}\n"
            f"fix: plan = autopar.plan(model, mesh, whole_inputs, devices={meshes[0].size}, local_inputs=True), then "
            "parallelize(model, plan.mesh, ..., layout=plan); or leave only one size open"
        )


def _that_fit(meshes: tuple[Mesh, ...], layout: str | Path | Layout | None) -> tuple[Mesh, ...]:
    """Return the meshes that the mesh statement of a layout allows; all of them without one."""
    if layout is None:
        return meshes
    said = choose_layout(layout, meshes[0].whole).mesh
    if said is None:
        return meshes
    found = tuple(mesh for mesh in meshes if _fits(mesh, said))
    if not found:
        raise MeshError(
            f"the layout is for the mesh {said}, but {meshes[0].size} processes are running\n"
            "fix: leave its mesh statement out, or start as many processes as that mesh has ranks"
        )
    return found


def _fits(mesh: Mesh, said: Mesh) -> bool:
    return mesh.names == said.names and all(size in (None, mesh.axes[axis]) for axis, size in said.axes.items())
