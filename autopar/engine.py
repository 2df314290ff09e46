"""The processes that run a plan: the process group, and the torch `DeviceMesh` of a mesh."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from autopar.errors import MeshError
from autopar.mesh import Mesh

__all__ = ["device_mesh", "group_over", "join_local_group", "limit_seconds_of"]


def device_mesh(mesh: Mesh) -> DeviceMesh:
    """The device mesh of the running processes; the process group is started if it is not."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = [size for size in mesh.axes.values() if size is not None]
    if len(sizes) < len(mesh.axes):
        raise MeshError(f"the mesh {mesh} has open sizes; give each axis a number to run on it")
    if not dist.is_initialized():
        _start(mesh, device)
    if dist.get_world_size() != mesh.size:
        raise MeshError(
            f"the mesh {mesh} has {mesh.size} ranks, but {dist.get_world_size()} processes are running\n"
            f"fix: torchrun --nproc-per-node {mesh.size}, or a mesh of {dist.get_world_size()}"
        )
    found = init_device_mesh(device, tuple(sizes), mesh_dim_names=mesh.names)
    for axis in mesh.names:
        _keep_time_limit(found.get_group(axis), device)
    return found


def group_over(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The process group of all ranks of a mesh, over one axis or several together."""
    if mesh.ndim == 1:
        return mesh.get_group()
    group = mesh._flatten().get_group()
    _keep_time_limit(group, mesh.device_type)
    return group


def _keep_time_limit(group: dist.ProcessGroup, device: str) -> None:
    """Give a group the limit that `init_process_group` was given; torch gives each group that it makes its own."""
    world: Any = dist.group.WORLD
    if group is not world and dist.get_backend(group) in (dist.Backend.GLOO, dist.Backend.NCCL):
        _set_pg_timeout(world._get_backend(torch.device(device)).options._timeout, group)


def limit_seconds_of(group: dist.ProcessGroup) -> float:
    """How long a rank of the group waits for the others."""
    if dist.get_backend(group) != dist.Backend.GLOO:
        return default_pg_timeout.total_seconds()
    options: Any = group._get_backend(torch.device("cpu")).options
    seconds: float = options._timeout.total_seconds()
    return seconds


def _start(mesh: Mesh, device: str) -> None:
    if "RANK" not in os.environ:
        raise MeshError(
            f"no processes are running for the mesh {mesh}\nfix: torchrun --nproc-per-node {mesh.size} YOUR_SCRIPT"
        )
    if device == "cpu" and not _resolves(socket.gethostname()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # Gloo would look the host's name up, and abort
    dist.init_process_group("nccl" if device == "cuda" else "gloo")


def join_local_group(
    meeting: Path, rank: int, ranks: int, backend: str = "gloo", limit: timedelta = default_pg_timeout
) -> None:
    """Start the process group of processes that one process of this machine has started.

    They meet in a file that is not there yet. A port would have to be chosen before the first rank listens on it, and
    until then anyone may take it.
    """
    # Gloo would look the host's name up, which not every machine can.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(meeting), ranks)  # type: ignore[attr-defined]  # torch lists it in its docs alone
    store.set_timeout(limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)


def _resolves(host: str) -> bool:
    try:
        socket.gethostbyname(host)
    except OSError:
        return False
    return True
