"""DTensors of which several axes cut one dim, or whose shards lie strided, as a fused q, k, v weight's do by heads.

Torch 2.13 puts some of them together wrongly, without a word. It takes strided shards for shards by the axes of the
mesh in another order, which they are not where two axes cut one dim in blocks. And it gathers along two axes in one
step over a flattened mesh, as if the shards had the sizes that one cut would give: uneven ones have not, since each
axis cuts what the one before has left. It can do better, axis by axis as they were cut, and is told to.

For checkpoints: a strided shard is several blocks of the whole tensor. `torch.distributed.checkpoint` asks a DTensor
which blocks it has, and torch answers with one, as if the rows after the first followed it: it refuses to save, or
reads other rows. Whole state dicts given to `set_model_state_dict` and `set_optimizer_state_dict` are cut in the same
way. DTensor is made to answer with all blocks; a shard that is one block is answered for as before.

What is changed is DTensor itself, since what an optimizer keeps for a parameter is a DTensor that only torch has made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed._state_dict_utils as state_dict_utils
import torch.distributed.tensor._redistribute as _redistribute
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard

__all__ = ["support"]


@dataclass(frozen=True)
class _StridedBlock:
    """Where a part of a shard begins in the whole tensor and in the shard, and its shape."""

    whole: tuple[int, ...]
    local: tuple[int, ...]
    shape: tuple[int, ...]

    def of(self, local: Tensor) -> Tensor:
        """The part, a view of the shard."""
        for dim, (start, length) in enumerate(zip(self.local, self.shape, strict=True)):
            local = local.narrow(dim, start, length)
        return local


def support(placements: Sequence[Placement]) -> None:
    """Let DTensor gather such tensors, and checkpoints see every block of them, from the first one on."""
    dims = [placement.dim for placement in placements if isinstance(placement, Shard | _StridedShard)]
    strided = _are_strided(placements)
    if (strided or len(set(dims)) < len(dims)) and not hasattr(DTensor, "_autopar_gathers"):
        _gather_as_cut()
    if strided and not hasattr(DTensor, "_autopar_blocks"):
        _save_all_blocks()


def _gather_as_cut() -> None:
    kind: Any = DTensor
    spec: Any = DTensorSpec
    torch_redistribute: Any = _redistribute
    completed, joined = spec.__post_init__, torch_redistribute._optimize_transform_infos

    def complete(self: Any) -> None:
        if self.use_strided_shard_as_shard_order is None and _are_strided(self.placements):
            order = self._maybe_convert_StridedShard_to_shard_order(tuple(self.placements), self.mesh)
            self.use_strided_shard_as_shard_order = order is not None
        completed(self)

    def join(steps: Any, mesh: Any, *more: Any, **others: Any) -> Any:
        """Steps of the same kind, joined over a flattened mesh where that is right."""
        if any(_are_strided(step.src_dst_placements) or _is_uneven(step, mesh) for step in steps):
            return list(steps)
        return joined(steps, mesh, *more, **others)

    spec.__post_init__, torch_redistribute._optimize_transform_infos = complete, join
    kind._autopar_gathers = True


def _is_uneven(step: Any, mesh: DeviceMesh) -> bool:
    """Return whether a step gathers shards of different sizes: on one rank, then on all, at this axis or one before."""
    source = step.src_dst_placements[0]
    return isinstance(source, Shard) and step.logical_shape[source.dim] % mesh.size(step.mesh_dim) != 0


def _are_strided(placements: Iterable[Placement]) -> bool:
    return any(isinstance(placement, _StridedShard) for placement in placements)


def _save_all_blocks() -> None:
    kind: Any = DTensor
    torch_state_dicts: Any = state_dict_utils
    write_items, chunk_list, shard_of = (
        kind.__create_write_items__,
        kind.__create_chunk_list__,
        kind.__get_tensor_shard__,
    )
    distribute = torch_state_dicts._distribute_tensors

    def create_write_items(self: DTensor, fqn: str, tensor: Any) -> Any:
        return [_write_item(fqn, self, block) for block in _blocks(self)] or write_items(self, fqn, tensor)

    def create_chunk_list(self: DTensor) -> Any:
        return [_chunk(block) for block in _blocks(self)] or chunk_list(self)

    def get_tensor_shard(self: DTensor, index: MetadataIndex) -> Any:
        wanted = None if index.offset is None else tuple(index.offset)
        here = (block for block in _blocks(self) if block.whole == wanted)
        block = next(here, None)
        return shard_of(self, index) if block is None else block.of(self.to_local())

    def distribute_tensors(state: dict[str, Any], keys: list[str], device: torch.device, pg: Any = None) -> None:
        rest = []
        for key in keys:
            pair = state.get(key)
            if isinstance(pair, tuple) and isinstance(pair[0], DTensor) and any(_blocks(pair[0])):
                state[key] = _filled(pair[0], pair[1])
            else:
                rest.append(key)
        distribute(state, rest, device, pg)

    kind.__create_write_items__ = create_write_items
    kind.__create_chunk_list__ = create_chunk_list
    kind.__get_tensor_shard__ = get_tensor_shard
    torch_state_dicts._distribute_tensors = distribute_tensors
    kind._autopar_blocks = True


def _blocks(tensor: DTensor) -> Iterator[_StridedBlock]:
    """The blocks of a strided shard; none where the shard is one block, which torch sees by itself."""
    if not _are_strided(tensor.placements):
        return
    runs = [list(_runs(_rows(tensor, dim))) for dim in range(tensor.ndim)]
    if all(len(found) <= 1 for found in runs):
        return
    for block in product(*runs):
        whole, local, shape = zip(*block, strict=True)
        yield _StridedBlock(whole, local, shape)


def _rows(tensor: DTensor, dim: int) -> list[int]:
    """Which rows of the whole tensor the shard has along a dim, in its own order."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    rows = torch.arange(tensor.shape[dim])
    for place, count, placement in zip(coordinate, tensor.device_mesh.shape, tensor.placements, strict=True):
        if isinstance(placement, Shard | _StridedShard) and placement.dim == dim:
            along: Any = Shard(0)
            if isinstance(placement, _StridedShard):
                along = _StridedShard(0, split_factor=placement.split_factor)
            rows = along._split_tensor(rows, count, with_padding=False, contiguous=False)[0][place]
    found: list[int] = rows.tolist()
    return found


def _runs(rows: list[int]) -> Iterator[tuple[int, int, int]]:
    """Rows that follow each other: the first in the whole tensor, the first in the shard, how many."""
    start = 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or rows[i] != rows[i - 1] + 1:
            yield rows[start], start, i - start
            start = i


def _chunk(block: _StridedBlock) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(block.whole), torch.Size(block.shape))


def _write_item(fqn: str, tensor: DTensor, block: _StridedBlock) -> WriteItem:
    properties = TensorProperties.create_from_tensor(tensor.to_local())
    data = TensorWriteData(_chunk(block), properties, tensor.size())
    return WriteItem(MetadataIndex(fqn, torch.Size(block.whole)), WriteItemType.SHARD, tensor_data=data)


def _filled(target: DTensor, whole: Tensor) -> DTensor:
    """This rank's part of a whole tensor: in the place of the target, or new where that has no memory."""
    local = target.to_local()
    if target.is_meta:
        local = torch.empty(local.shape, dtype=whole.dtype, device=whole.device)
    for block in _blocks(target):
        part = whole
        for dim, (start, length) in enumerate(zip(block.whole, block.shape, strict=True)):
            part = part.narrow(dim, start, length)
        block.of(local).copy_(part)
    if not target.is_meta:
        return target
    return DTensor.from_local(
        local, target.device_mesh, target.placements, shape=target.shape, stride=target.stride(), run_check=False
    )
