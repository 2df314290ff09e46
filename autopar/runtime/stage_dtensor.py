"""DTensors of a pipeline: a parameter that one stage stores, with an empty shard on each other stage.

Along the axis of the stages such a DTensor has the placement `Shard`, so optimizers and norms of gradients are right:
an empty shard adds nothing. The shards are not those of `torch.chunk`, which torch assumes where it gathers or saves a
DTensor. A mesh with a name of its own for the axis tells these DTensors from others, and the patches here gather them
by a sum over the stages, and save and load them on their stage alone.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._state_dict_utils as state_dict_utils
import torch.distributed.checkpoint.state_dict as checkpoint_state_dict
import torch.distributed.tensor._dispatch as _dispatch
import torch.distributed.tensor._redistribute as _redistribute
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

__all__ = ["is_staged", "stage_mesh"]

# Behind the name of an axis in a mesh whose shards along it are on one stage.
STAGES = " of stages"

_MESHES: dict[tuple[int, str], tuple[DeviceMesh, DeviceMesh]] = {}


def stage_mesh(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    """Return a mesh of the same ranks whose axis of stages has a name that the patches know."""
    known = _MESHES.get((id(mesh), axis))
    if known is None:
        _patch()
        names = tuple(f"{name}{STAGES}" if name == axis else name for name in mesh.mesh_dim_names or ())
        # With the groups of the mesh: new ones are made by all ranks together, also by those of other meshes.
        groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
        ranks = mesh.mesh if mesh.ndim > 1 else None
        made = DeviceMesh.from_group(
            groups if mesh.ndim > 1 else groups[0], mesh.device_type, ranks, mesh_dim_names=names
        )
        known = _MESHES[id(mesh), axis] = mesh, made
    return known[1]


def _stage_dim(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> int | None:
    """Return the mesh dim along which one stage has all rows; None if there is none."""
    for dim, name in enumerate(mesh.mesh_dim_names or ()):
        if name.endswith(STAGES) and isinstance(placements[dim], Shard | _StridedShard):
            return dim
    return None


def _patch() -> None:
    if hasattr(DTensor, "_autopar_stages"):
        return
    kind: Any = DTensor
    gathered: Any = _redistribute.redistribute_local_tensor

    def redistribute(local: Tensor, current: DTensorSpec, target: DTensorSpec, *args: Any, **others: Any) -> Any:
        dim = _stage_dim(current.mesh, tuple(current.placements))
        if dim is None:
            return gathered(local, current, target, *args, **others)
        # Without the axis of the stages: torch takes its shards for those of `torch.chunk`.
        source = _spec(current, dim)
        if target.placements[dim] != current.placements[dim]:
            return gathered(_from_stage(local, source, dim), source, target, *args, **others)
        on_stage = _spec(target, dim)
        if local.numel():
            return gathered(local, source, on_stage, *args, **others)
        # No other rank of this stage has elements, so none of them sends.
        shape = list(_local_shape(on_stage))
        shape[current.placements[dim].dim] = 0  # type: ignore[attr-defined]
        return local.new_empty(shape)

    for module in (_redistribute, _dispatch):
        if hasattr(module, "redistribute_local_tensor"):
            module.redistribute_local_tensor = redistribute  # type: ignore[attr-defined]

    items, chunks, shard_of = kind.__create_write_items__, kind.__create_chunk_list__, kind.__get_tensor_shard__

    # By name on `own`: other patches, of strided shards, may stand in front of these.
    def create_write_items(self: DTensor, fqn: str, tensor: Any) -> Any:
        if not is_staged(self):
            return items(self, fqn, tensor)
        own: Any = _on_stage(self)
        return [] if own is None else own.__create_write_items__(fqn, own if tensor is self else tensor)

    def create_chunk_list(self: DTensor) -> Any:
        if not is_staged(self):
            return chunks(self)
        own: Any = _on_stage(self)
        return [] if own is None else own.__create_chunk_list__()

    def get_tensor_shard(self: DTensor, index: MetadataIndex) -> Any:
        own: Any = _on_stage(self) if is_staged(self) else None
        return shard_of(self, index) if own is None else own.__get_tensor_shard__(index)

    kind.__create_write_items__ = create_write_items
    kind.__create_chunk_list__ = create_chunk_list
    kind.__get_tensor_shard__ = get_tensor_shard
    _split_whole_tensors()
    kind._autopar_stages = True


def _split_whole_tensors() -> None:
    state_dicts: Any = checkpoint_state_dict
    utils: Any = state_dict_utils
    distribute, distribute_received = state_dicts._distribute_state_dict, utils._distribute_tensors

    def distribute_whole(whole: dict[str, Any], state: dict[str, Any], device: torch.device, *args: Any) -> None:
        """Replace each tensor of a stage in `state` by its shard of the whole tensor."""
        staged = {key for key, own in state.items() if isinstance(own, DTensor) and is_staged(own) and key in whole}
        for key in staged:
            state[key] = _filled(state[key], whole[key].detach().to(device))
        rest = {key: value for key, value in whole.items() if key not in staged}
        distribute(rest, state, device, *args)

    def distribute_tensors(state: dict[str, Any], keys: list[str], device: torch.device, pg: Any = None) -> None:
        """Replace each pair of a tensor of a stage and a whole tensor by the shard."""
        pairs = {key: state[key] for key in keys if isinstance(state.get(key), tuple)}
        staged = {key for key, (own, _) in pairs.items() if isinstance(own, DTensor) and is_staged(own)}
        for key in staged:
            state[key] = _filled(*pairs[key])
        distribute_received(state, [key for key in keys if key not in staged], device, pg)

    state_dicts._distribute_state_dict, utils._distribute_tensors = distribute_whole, distribute_tensors


def is_staged(tensor: DTensor) -> bool:
    return _stage_dim(tensor.device_mesh, tuple(tensor.placements)) is not None


def _without(placements: tuple[Placement, ...], dim: int) -> tuple[Placement, ...]:
    return (*placements[:dim], Replicate(), *placements[dim + 1 :])


def _spec(spec: DTensorSpec, dim: int) -> DTensorSpec:
    """Return the spec of one stage alone."""
    return DTensorSpec(spec.mesh, _without(tuple(spec.placements), dim), tensor_meta=spec.tensor_meta)


def _local_shape(spec: DTensorSpec) -> tuple[int, ...]:
    shape, _ = compute_local_shape_and_global_offset(spec.shape, spec.mesh, tuple(spec.placements))
    return tuple(shape)


def _from_stage(local: Tensor, spec: DTensorSpec, dim: int) -> Tensor:
    """Return the shard of the stage that has it, on all stages; `spec` is that of one stage alone."""
    shape = _local_shape(spec)
    # Bytes add up exactly: all but one of them are zero.
    found = torch.zeros(shape, dtype=local.dtype, device=local.device)
    if local.numel() == prod(shape):
        found.copy_(local)
    if found.numel():
        dist.all_reduce(found.view(-1).view(torch.uint8), group=spec.mesh.get_group(dim))
    return found


def _on_stage(tensor: DTensor) -> DTensor | None:
    """Return the DTensor of this rank's stage alone; None if another stage has its rows."""
    dim = _stage_dim(tensor.device_mesh, tuple(tensor.placements))
    if dim is None:
        return tensor
    local = tensor.to_local()
    if not local.numel():
        return None
    placements = _without(tuple(tensor.placements), dim)
    return DTensor.from_local(
        local, tensor.device_mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def _filled(tensor: DTensor, whole: Tensor) -> DTensor:
    """Copy this rank's shard of a whole tensor into a tensor of one stage, or into a new one for meta."""
    if tensor.is_meta:
        local = torch.empty(tensor.to_local().shape, dtype=whole.dtype, device=whole.device)
        shape, stride = tensor.shape, tensor.stride()
        tensor = DTensor.from_local(
            local, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride
        )
    own = _on_stage(tensor)
    if own is not None:
        # Without a source rank nothing is sent: the other stages take no part.
        part = distribute_tensor(whole, own.device_mesh, own.placements, src_data_rank=None)
        own.to_local().copy_(part.to_local())
    return tensor
