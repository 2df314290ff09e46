"""Patches of DTensor for several axes on one dim, and for strided shards such as a fused q, k, v weight split by heads.

Gathering: torch 2.13 gathers some of these tensors wrongly, without an error. It treats strided shards as shards by
the axes in another order, which is wrong if two axes split one dim in blocks. It also gathers over two axes in one
step, on a flattened mesh. That assumes the sizes of a single split, but each axis splits the shard of the axis before,
so uneven shards have other sizes. The patch makes torch gather these tensors one axis at a time.

Checkpoints: a strided shard is several blocks of the whole tensor. `torch.distributed.checkpoint` asks a DTensor for
its blocks and torch returns one, as if all rows were contiguous: saving raises, or loading reads other rows.
`set_model_state_dict` and `set_optimizer_state_dict` split whole tensors in the same way. The patch returns all blocks;
a shard of one block is left to torch.

The patches change the class DTensor: torch itself creates the DTensors of optimizer states.
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

from autopar.runtime.stage_dtensor import is_staged

__all__ = ["support"]


@dataclass(frozen=True)
class _StridedBlock:
    """Contiguous block of a shard: its begin in the whole tensor, its begin in the shard, and its shape."""

    whole: tuple[int, ...]
    local: tuple[int, ...]
    shape: tuple[int, ...]

    def of(self, local: Tensor) -> Tensor:
        """Return a view of the block in the shard."""
        for dim, (start, length) in enumerate(zip(self.local, self.shape, strict=True)):
            local = local.narrow(dim, start, length)
        return local


def support(placements: Sequence[Placement]) -> None:
    """Patch DTensor once, at the first placements that need it."""
    # Not at import: programs without such placements run torch unchanged.
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
    # Both are looked up by name at each use, so replacing the attributes is enough.
    completed, joined = spec.__post_init__, torch_redistribute._optimize_transform_infos

    def complete(self: Any) -> None:
        if self.use_strided_shard_as_shard_order is None and _are_strided(self.placements):
            order = self._maybe_convert_StridedShard_to_shard_order(tuple(self.placements), self.mesh)
            self.use_strided_shard_as_shard_order = order is not None
        completed(self)

    def join(steps: Any, mesh: Any, *more: Any, **others: Any) -> Any:
        """Join steps over a flattened mesh, unless a shard is strided or uneven."""
        if any(_are_strided(step.src_dst_placements) or _is_uneven(step, mesh) for step in steps):
            return list(steps)
        return joined(steps, mesh, *more, **others)

    spec.__post_init__, torch_redistribute._optimize_transform_infos = complete, join
    kind._autopar_gathers = True


def _is_uneven(step: Any, mesh: DeviceMesh) -> bool:
    """Return whether a step gathers shards of different sizes."""
    # If this holds on one rank it holds on all, at this axis or one before: all ranks must take the same steps.
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
    """Yield the blocks of a strided shard; none if torch sees it right, as one block."""
    # A tensor of one stage comes here again as one of that stage alone.
    if not _are_strided(tensor.placements) or is_staged(tensor):
        return
    runs = [list(_runs(_rows(tensor, dim))) for dim in range(tensor.ndim)]
    if all(len(found) <= 1 for found in runs):
        return
    for block in product(*runs):
        whole, local, shape = zip(*block, strict=True)
        yield _StridedBlock(whole, local, shape)


def _rows(tensor: DTensor, dim: int) -> list[int]:
    """Return the index in the whole tensor of each row of the shard along a dim."""
    # Row numbers are split by torch's own placements, so that they match its shards.
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
    """Yield runs of rows: first row in the whole tensor, first in the shard, count."""
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
    """Copy this rank's shard of a whole tensor into the target, or a new one for meta."""
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
