"""The processes that run a plan: the process group, and the torch `DeviceMesh` of a mesh."""

from __future__ import annotations

import os
import socket

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.errors import MeshError
from autopar.mesh import Mesh

__all__ = ["device_mesh"]


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
    return init_device_mesh(device, tuple(sizes), mesh_dim_names=mesh.names)


def _start(mesh: Mesh, device: str) -> None:
    if "RANK" not in os.environ:
        raise MeshError(
            f"no processes are running for the mesh {mesh}\nfix: torchrun --nproc-per-node {mesh.size} YOUR_SCRIPT"
        )
    if device == "cpu" and not _resolves(socket.gethostname()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # Gloo would look the host's name up, and abort
    dist.init_process_group("nccl" if device == "cuda" else "gloo")


def _resolves(host: str) -> bool:
    try:
        socket.gethostbyname(host)
    except OSError:
        return False
    return True
