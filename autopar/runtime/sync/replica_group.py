"""The ranks that hold the same shards of all replicas, and the device mesh of one replica."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autopar.ir.graph import NamedGraph
from autopar.lowering.collectives.process_groups import group_over
from autopar.runtime.sync.replica_batch import ReplicaBatch, ReplicaShares
from autopar.sharding.layout.source import unknown_name
from autopar.sharding.replicas import Drift

__all__ = ["ReplicaGroup", "ReplicaSetting", "replica_devices"]


@dataclass(frozen=True)
class ReplicaGroup:
    """This rank's place among the ranks that hold the same shards of other replicas."""

    index: int
    # Global ranks by replica.
    ranks: tuple[int, ...]
    group: Any
    # Ranks of one replica.
    replica_size: int

    @property
    def count(self) -> int:
        return len(self.ranks)

    def gathered(self, own: Tensor) -> list[list[Any]]:
        """Return the numbers of all replicas; each waits for the others."""
        rows = [own.new_empty(own.shape) for _ in self.ranks]
        dist.all_gather(rows, own, group=self.group)
        return [row.tolist() for row in rows]


@dataclass(frozen=True)
class ReplicaSetting:
    """Replicas that a parallel module is one of, and the dim that they share."""

    drift: Drift
    group: ReplicaGroup
    # The device mesh of all replicas.
    devices: DeviceMesh
    # Name of the dim that the replicas share.
    dim: str
    # Numbers for `by speed`; None where the layout has numbers.
    shares: ReplicaShares | None = None

    def batch(self) -> ReplicaBatch:
        """Return the cut of global inputs into those of this replica."""
        return ReplicaBatch(self.drift, self.group.index, self.dim, self.shares)

    def rows(self, graph: NamedGraph) -> int:
        """Return the rows of the batch in a call of one replica."""
        if self.dim not in graph.dims:
            raise unknown_name("dim", self.dim, graph.dims, self.drift.statement.span)
        return graph.dims[self.dim].size


def replica_devices(devices: DeviceMesh, drift: Drift) -> tuple[DeviceMesh, ReplicaGroup]:
    """Return the device mesh of this rank's replica, and its place among the replicas."""
    names = tuple(devices.mesh_dim_names or ())
    if set(names) == set(drift.axes):  # a replica of one rank, which torch has no mesh of
        names = (*names, drift.single_axis)
        devices = DeviceMesh(devices.device_type, devices.mesh.unsqueeze(-1), mesh_dim_names=names)
    across = devices[drift.axes]
    replica = devices[tuple(name for name in names if name not in drift.axes)]
    ranks = tuple(across.mesh.flatten().tolist())
    return replica, ReplicaGroup(ranks.index(dist.get_rank()), ranks, group_over(across), replica.size())
