"""Checks of the inputs of a call, before it is emitted: devices, shards, equal values on ranks that share a piece."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.ir.graph import NamedGraph
from autopar.lowering.collectives.checksum import checksum, kind_of
from autopar.runtime import agreement as fixes
from autopar.runtime.agreement import Agreement
from autopar.runtime.compiled_call import CallSignature
from autopar.runtime.shards import LocalShard, ShardOwner, held_by
from autopar.runtime.target_counts import COUNT
from autopar.sharding.assignment import Assignment

__all__ = ["PlacementsError", "check_devices", "check_values", "held_shards", "is_sharded"]


class PlacementsError(AutoparError):
    """A DTensor is not sharded as its call needs it."""


def is_sharded(given: CallSignature) -> bool:
    """Return whether inputs of a call are DTensors."""
    return any(isinstance(tensor, DTensor) for tensor in given.tensors)


def check_devices(given: CallSignature, device: torch.device, owner: str, *others: str) -> None:
    """Raise if an input, except a scalar on the host, is on another device than this rank's."""
    for path, tensor in zip(given.flat.paths, given.tensors, strict=True):
        at = tensor.device
        if at != device and at.type not in others and (tensor.ndim > 0 or at.type != "cpu"):
            raise AutoparError(
                f"the input {path} is on {at}, and this rank of {owner} runs on {device}\n"
                f'fix: give it as {path}.to("{device}"), or give parallelize the model and inputs on {at}'
            )


def held_shards(
    graph: NamedGraph,
    assignment: Assignment,
    given: CallSignature,
    rank: ShardOwner,
    stored: Mapping[str, LocalShard],
    local_inputs: bool,
) -> dict[str, LocalShard]:
    """Return the shards of all parameters and inputs; raise if the call does not provide them."""
    held = held_by(graph, assignment, rank)
    # Parameters are split once, by the plan of the first call. A part of the model has some of them.
    for name, place in stored.items():
        if name in held and not held[name].has_pieces_of(place):
            raise AutoparError(
                f"this call needs another sharding of the parameter {name}: expected {place.place_text}, that of "
                f"the first call, got {held[name].place_text}\nfix: name its dims with dims=, so that all calls "
                "agree on them; in a pipeline name the cuts, as in 'cut pp before @blocks.2'"
            )
    check_inputs(given, held, rank, local_inputs)
    return held


def check_inputs(given: CallSignature, held: Mapping[str, LocalShard], rank: ShardOwner, local_inputs: bool) -> None:
    """Raise if the inputs are not the shards that the call takes."""
    for path, tensor in zip(given.flat.paths, given.tensors, strict=True):
        place = held[path]
        if isinstance(tensor, DTensor):
            if tensor.device_mesh != rank.mesh or tensor.placements != place.placements:
                raise PlacementsError(
                    f"wrong placements of the DTensor {path}: expected {place.placements} on {rank.mesh}, "
                    f"got {tensor.placements} on {tensor.device_mesh}\n"
                    "fix: redistribute it, or give the whole tensor"
                )
        elif local_inputs and tuple(tensor.shape) != place.local_shape:
            raise AutoparError(
                f"wrong shard of {path} under local_inputs=True: expected {list(place.local_shape)}, "
                f"got {kind_of(tensor)}\n"
                "fix: give every rank a shard of the same shape, as the layout splits the input; without "
                "local_inputs=True every rank gives the whole input"
            )


def check_values(
    given: CallSignature, held: Mapping[str, LocalShard], agreement: Agreement, rank: ShardOwner, local_inputs: bool
) -> None:
    """Raise unless ranks that share a piece of an input have the same values of it."""
    if agreement.size == 1:
        return
    sums: dict[str, tuple[tuple[int, ...], int]] = {}
    for path, tensor in zip(given.flat.paths, given.tensors, strict=True):
        if path == COUNT and local_inputs:
            continue
        whole = not local_inputs and not isinstance(tensor, DTensor)
        axes = () if whole else tuple(axis for split in held[path].layout.splits for axis in split)
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        sums[path] = tuple(rank.at[axis] for axis in axes), checksum(local)

    def fix(path: str) -> str:
        if not local_inputs and not is_sharded(given):
            return fixes.LOCAL
        split = [axis for axes in held[path].layout.splits for axis in axes]
        replicated = [axis for axis in rank.axes if axis not in split]
        return (
            f"ranks along the axes {', '.join(replicated)} work on the same data: give them the same tensor; "
            "index, count = module.batch_shard() are the replica and the number of replicas of a sampler"
        )

    agreement.same_values(sums, fix)
