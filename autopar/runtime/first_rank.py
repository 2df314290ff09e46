"""Whole tensors that the first rank alone has: scattered into shards, gathered from them, broadcast to all ranks.

A shard has replicas along the axes that do not split its tensor. The first rank sends each distinct piece to one of
them, the *leader*, and the leaders broadcast their pieces to their replicas. So no rank but the first one ever has a
whole tensor that is split, and the first one sends each element once. Pieces go as bytes: any dtype, any length.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.lowering.collectives.local_reshard import as_bytes
from autopar.lowering.collectives.process_groups import Groups
from autopar.mesh import SubMesh
from autopar.runtime.shards import LocalShard
from autopar.sharding.sharding import coordinates

__all__ = ["FirstRank"]


class FirstRank:
    """The first rank of a mesh, and what it sends to the others and receives from them."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.axes = SubMesh(dict(zip(groups.names, groups.mesh.shape, strict=True)))
        self.ranks: list[int] = groups.mesh.mesh.flatten().tolist()
        self.places = list(coordinates(self.axes))
        self.me = self.ranks.index(dist.get_rank())
        # All ranks of the mesh make these groups in one order.
        self.everyone = groups.process_group(groups.names)

    @property
    def is_here(self) -> bool:
        return self.me == 0

    def scatter(self, place: LocalShard, whole: Tensor | None, local: Tensor) -> None:
        """Fill the shard of each rank from a whole tensor; `whole` is that of the first rank."""
        split, leaders = self._split(place), dict(self._leaders(place))
        if self.is_here:
            assert whole is not None, place.name
            work = []
            for number, pieces in leaders.items():
                piece = place.cut_at(pieces, whole.detach())
                if number == 0:
                    local.copy_(piece)
                else:
                    sent = piece.to(local.device, local.dtype).contiguous()
                    work.append((_send(sent, self.ranks[number]), sent))  # its memory is read until then
            for one, _ in work:
                one.wait()
        elif self.me in leaders:
            _receive(local, self.ranks[0])
        copies = tuple(axis for axis in self.axes if axis not in split and self.axes[axis] > 1)
        if copies:
            # Also without elements: all ranks make a new group together.
            group = self.groups.process_group(copies)
            # The leader of this rank's piece: the same coordinates on the split axes, the first on all others.
            at = {axis: own if axis in split else 0 for axis, own in self.places[self.me].items()}
            if local.numel():
                _broadcast(local, self.ranks[self.places.index(at)], group)

    def gather(self, place: LocalShard, local: Tensor) -> Tensor | None:
        """Return the whole tensor on the first rank, in the memory of the host; None on the others."""
        leaders = dict(self._leaders(place))
        if not self.is_here:
            if self.me in leaders:
                _send(local.detach().contiguous(), self.ranks[0]).wait()
            return None
        whole = torch.empty(place.shape, dtype=local.dtype)
        for number, pieces in leaders.items():
            piece = local.detach()
            if number:
                piece = local.new_empty(place.atoms.fold(tuple(length for _, length in pieces)))
                _receive(piece, self.ranks[number])
            place.put_at(pieces, whole, piece.cpu())
        return whole

    def broadcast(self, tensor: Tensor) -> None:
        """Fill a tensor of every rank with that of the first rank."""
        _broadcast(tensor, self.ranks[0], self.everyone)

    def _split(self, place: LocalShard) -> frozenset[str]:
        stages = () if place.stage is None else (place.stages,)
        return frozenset((*(axis for axes in place.layout.splits for axis in axes), *stages))

    def _leaders(self, place: LocalShard) -> Iterator[tuple[int, tuple[tuple[int, int], ...]]]:
        """Yield the first rank with each piece that has elements, by its number in the mesh, and the piece."""
        split = self._split(place)
        for number, at in enumerate(self.places):
            pieces = place.pieces_at(self.axes, at)
            if all(not at[axis] for axis in at if axis not in split) and all(length for _, length in pieces):
                yield number, pieces


def _bytes(tensor: Tensor) -> Tensor:
    return as_bytes(tensor.detach().reshape(-1)) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)


def _send(tensor: Tensor, to: int) -> Any:
    return dist.isend(_bytes(tensor), to)


def _receive(tensor: Tensor, source: int) -> None:
    """Receive into a tensor of any strides."""
    coming = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    dist.recv(_bytes(coming), source)
    tensor.copy_(coming)


def _broadcast(tensor: Tensor, source: int, group: Any) -> None:
    sent = tensor.detach().contiguous()
    dist.broadcast(_bytes(sent), source, group=group)
    if sent.data_ptr() != tensor.data_ptr():
        tensor.copy_(sent)
