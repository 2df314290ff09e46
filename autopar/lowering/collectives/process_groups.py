"""Processes that run a plan: process groups, and the torch `DeviceMesh` of a mesh."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.utils._pytree import tree_leaves

from autopar.errors import MeshError
from autopar.lowering.collectives.level_groups import LevelGroups
from autopar.lowering.collectives.start_group import running_ranks
from autopar.mesh import Mesh
from autopar.sharding.reshard_insertion import LevelSumsOver
from autopar.sharding.sharding import MICRO

__all__ = [
    "Groups",
    "GroupsOfMicroBatch",
    "device_mesh",
    "device_type_of",
    "group_over",
    "join_local_group",
    "limit_seconds_of",
]


@dataclass(frozen=True)
class _Group:
    name: str
    members: tuple[dict[str, int], ...]
    ranks: tuple[int, ...] = ()


class Groups:
    """Process groups of a device mesh, one for each set of axes that a collective runs over.

    A group is created when a reshard first needs it. All ranks must bind the same reshards in the same order.
    `replicas` counts the copies of this mesh that drift apart.
    """

    # The all-reduces over some axes that run by level; whoever decides about a call sets it.
    level_sums: LevelSumsOver = staticmethod(lambda axes: ())

    def __init__(self, mesh: DeviceMesh, replicas: int = 1) -> None:
        if mesh.mesh_dim_names is None:
            raise MeshError("the dims of the DeviceMesh have no names; give it mesh_dim_names")
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise MeshError(f"rank {dist.get_rank()} is not in the mesh {mesh}; start one process per device of it")
        self.mesh, self.replicas = mesh, replicas
        self.names: tuple[str, ...] = tuple(mesh.mesh_dim_names)
        self.coordinate: Mapping[str, int] = dict(zip(self.names, coordinate, strict=True))
        self.device_type: str = mesh.device_type
        self._found: dict[tuple[str, ...], _Group] = {}
        self._stages: dict[str, tuple[ProcessGroup, ProcessGroup]] = {}

    def of(self, axes: tuple[str, ...]) -> _Group:
        """Return the group of ranks that differ from this one along these axes only."""
        ordered = tuple(axis for axis in self.names if axis in axes)
        if ordered not in self._found:
            self._found[ordered] = self._group(ordered)
        return self._found[ordered]

    @property
    def everybody(self) -> str | None:
        """The name of the group of all ranks; None where there are no processes."""
        return self.of(self.names).name

    def levels(self, axes: tuple[str, ...]) -> tuple[LevelGroups, ...]:
        """Return the groups of all-reduces over some axes that run by level."""
        return tuple(
            LevelGroups(
                tuple((found.name, len(found.members)) for found in map(self.of, one.groups)),
                one.least_bytes,
                one.most_bytes,
            )
            for one in self.level_sums(axes)
        )

    def stages(self, axis: str) -> tuple[tuple[ProcessGroup, ProcessGroup], tuple[int, ...]]:
        """Return the process groups of values and of gradients along the axis of a pipeline, and its ranks by stage."""
        lines = self.mesh.mesh.movedim(self.names.index(axis), -1).reshape(-1, self.mesh[axis].size()).tolist()
        if axis not in self._stages:
            # New ones: messages keep the time limit with which their group is made.
            self._stages[axis] = self._new_group(lines), self._new_group(lines)
        (ranks,) = (line for line in lines if dist.get_rank() in line)
        return self._stages[axis], tuple(ranks)

    def _new_group(self, lines: list[list[int]]) -> ProcessGroup:
        """Return a new group of the line that this rank is in."""
        limit = _time_limit(self.device_type)
        made: ProcessGroup
        if self.replicas > 1:  # the ranks of other replicas make groups of other lines
            (own,) = (line for line in lines if dist.get_rank() in line)
            made = dist.new_group(own, limit, use_local_synchronization=True)
        else:
            made = dist.new_subgroups_by_enumeration(lines, limit)[0]  # type: ignore[no-untyped-call]
        return made

    def matches_by_tag(self, group: ProcessGroup | None) -> bool:
        """Return whether messages of a group find each other by tags, whatever the order in which they are posted."""
        # NCCL runs the messages between two ranks in one order, MPI all of a process.
        return group is not None and bool(
            group._get_backend(torch.device(self.device_type)).name() == dist.Backend.GLOO
        )

    def process_group(self, axes: tuple[str, ...]) -> ProcessGroup:
        """Return the process group over some axes, in the order of the mesh; all ranks ask for it together."""
        return group_over(self.mesh[axes[0]] if len(axes) == 1 else self.mesh[axes])

    def ranks(self, name: str) -> tuple[int, ...]:
        """Return the members of a group found before, by its name."""
        (members,) = {group.ranks for group in self._found.values() if group.name == name}
        return members

    def _group(self, axes: tuple[str, ...]) -> _Group:
        group = self.process_group(axes)
        indices = product(*map(range, self.mesh.shape))
        places = {
            rank: dict(zip(self.names, place, strict=True))
            for place, rank in zip(indices, self.mesh.mesh.flatten().tolist(), strict=True)
        }
        ranks = tuple(dist.get_process_group_ranks(group))
        return _Group(group.group_name, tuple(places[rank] for rank in ranks), ranks)


class GroupsOfMicroBatch(Groups):
    """Groups of the ranks for ops of the first micro-batch: micro-batches are an axis of time, without processes.

    Without groups of ranks there is no axis but time.
    """

    def __init__(self, groups: Groups | None) -> None:
        self._groups = groups
        self.coordinate = {MICRO: 0, **({} if groups is None else groups.coordinate)}
        self.device_type = "cpu" if groups is None else groups.device_type
        self.replicas = 1 if groups is None else groups.replicas

    @property
    def groups(self) -> Groups:
        assert self._groups is not None, "a collective of one rank"
        return self._groups

    def of(self, axes: tuple[str, ...]) -> _Group:
        assert MICRO not in axes, f"a collective over {axes}"
        return self.groups.of(axes)

    @property
    def everybody(self) -> str | None:
        return None if self._groups is None else self._groups.everybody

    def levels(self, axes: tuple[str, ...]) -> tuple[LevelGroups, ...]:
        return () if self._groups is None else self._groups.levels(axes)

    def stages(self, axis: str) -> tuple[tuple[ProcessGroup, ProcessGroup], tuple[int, ...]]:
        return self.groups.stages(axis)

    def ranks(self, name: str) -> tuple[int, ...]:
        return self.groups.ranks(name)


def device_type_of(model: nn.Module, inputs: tuple[Any, ...] | Mapping[str, Any] | None) -> str:
    """Return the device type that a parallel module runs on.

    A process group of one backend, such as NCCL, decides. Else inputs and model decide; a device counts more than the
    host. If all are on meta, the first accelerator of this process is taken.
    """
    types = {device.type for device in dist.group.WORLD._device_types} if dist.group.WORLD is not None else set()
    if len(types) == 1:
        return str(types.pop())
    tensors = [*tree_leaves(inputs), *model.parameters(), *model.buffers()]
    found = {tensor.device.type for tensor in tensors if isinstance(tensor, Tensor)} - {"meta"}
    if not found:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return min(found - {"cpu"} or found)


def device_mesh(mesh: Mesh, device: str = "cpu") -> DeviceMesh:
    """Return the device mesh of the running processes; start the process group if it is not."""
    sizes = [size for size in mesh.axes.values() if size is not None]
    if len(sizes) < len(mesh.axes):
        raise MeshError(f"the mesh {mesh} has open sizes; give each axis a number to run on it")
    ranks = running_ranks(mesh, device)
    if ranks != mesh.size:
        raise MeshError(
            f"the mesh {mesh} has {mesh.size} ranks, but {ranks} processes are running\n"
            f"fix: torchrun --nproc-per-node {mesh.size}, or a mesh of {ranks}"
        )
    found = init_device_mesh(device, tuple(sizes), mesh_dim_names=mesh.names)
    for axis in mesh.names:
        _keep_time_limit(found.get_group(axis), device)
    return found


def group_over(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the process group of all ranks of a mesh."""
    if mesh.ndim == 1:
        return mesh.get_group()
    group = mesh._flatten().get_group()
    _keep_time_limit(group, mesh.device_type)
    return group


def _keep_time_limit(group: dist.ProcessGroup, device: str) -> None:
    """Give a group the limit of `init_process_group`; torch gives new groups a default limit."""
    limit = _time_limit(device)
    if group is not dist.group.WORLD and limit is not None:
        _set_pg_timeout(limit, group)


def _time_limit(device: str) -> timedelta | None:
    """Return the limit of `init_process_group`, if the backend has one."""
    world: Any = dist.group.WORLD
    if dist.get_backend() not in (dist.Backend.GLOO, dist.Backend.NCCL):
        return None
    limit: timedelta = world._get_backend(torch.device(device)).options._timeout
    return limit


def limit_seconds_of(group: dist.ProcessGroup) -> float:
    """Return the seconds that a rank of the group waits for the others."""
    if dist.get_backend(group) != dist.Backend.GLOO:
        return default_pg_timeout.total_seconds()
    options: Any = group._get_backend(torch.device("cpu")).options
    seconds: float = options._timeout.total_seconds()
    return seconds


def join_local_group(
    meeting: Path, rank: int, ranks: int, backend: str = "gloo", limit: timedelta = default_pg_timeout
) -> None:
    """Start the process group of processes that one process of this machine started.

    They meet in a file that does not exist yet. A port would have to be chosen before the first rank listens, and
    another process could take it.
    """
    # Gloo looks up the host name, which fails on some machines.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(meeting), ranks)  # type: ignore[attr-defined]  # torch lists it in its docs alone
    store.set_timeout(limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
