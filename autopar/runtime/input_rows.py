"""Inputs of which a rank has its rows alone: which rows of the batch, and the whole inputs that they stand for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.names import did_you_mean
from autopar.runtime.compiled_call import CompiledCall
from autopar.runtime.shards import LocalShard, strides_of

__all__ = ["batch_shard", "from_rows"]

LOCAL_SHARDS = "give each rank its shard, parallelize(..., local_inputs=True)"


def batch_shard(call: CompiledCall, batch: str) -> tuple[int, int]:
    """Return which part of the batch this rank works on, and of how many."""
    found = {
        name: _part(call.held[name], dims.index(batch))
        for name in call.inputs
        if batch in (dims := call.input_dims[name])
    }
    if not found:
        raise AutoparError(
            f"no input of the module has the dim {batch}: its inputs are {', '.join(map(_text(call), call.inputs))}\n"
            "fix: give the name of the dim of samples, or name it: dims={'x': 'batch ...'}"
        )
    if len(set(found.values())) > 1:
        parts = ", ".join(f"{count} of {name}" for name, (_, count) in found.items())
        raise AutoparError(f"the inputs have different numbers of parts along {batch}: {parts}\nfix: {LOCAL_SHARDS}")
    return next(iter(found.values()))


def from_rows(call: CompiledCall, batch: str, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the whole inputs as DTensors, given this rank's rows of them."""
    for name in rows:
        if name not in call.inputs:
            known = ", ".join(call.inputs)
            raise AutoparError(
                f"the module has no input {name}{did_you_mean(name, call.inputs)}\nfix: its inputs are {known}"
            )
    return {name: _whole(call.held[name], call.input_dims[name], batch, x) for name, x in rows.items()}


def _whole(place: LocalShard, dims: tuple[str, ...], batch: str, rows: Tensor) -> DTensor:
    if rows.ndim != len(dims):
        raise AutoparError(
            f"wrong rows of {place.name}: expected the dims {' '.join(dims)}, got the shape {list(rows.shape)}\n"
            "fix: give this rank's rows of the batch, and the other dims whole"
        )
    shape, local = list(rows.shape), rows
    for dim, name in enumerate(dims):
        index, count = _part(place, dim)
        if name == batch:
            shape[dim] *= count
        elif count > 1:
            # All ranks with the same rows have them whole, so each takes its part without a message.
            if shape[dim] % count:
                raise AutoparError(
                    f"the dim {name} of {place.name} has {shape[dim]} elements, and the layout splits it into {count} "
                    f"equal parts\nfix: pad it to a multiple of {count}"
                )
            length = shape[dim] // count
            local = local.narrow(dim, index * length, length)
    assert place.placements is not None, "equal parts have placements"
    return DTensor.from_local(
        local.contiguous(),
        place.mesh,
        place.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=strides_of(tuple(shape)),
    )


def _part(place: LocalShard, dim: int) -> tuple[int, int]:
    """Return which part of a dim this rank has, and of how many."""
    atoms = place.atoms.members[dim]
    index, count = 0, 1
    for axis in (axis for atom in atoms for axis in place.layout.splits[atom]):
        index, count = (
            index * place.mesh[axis].size() + place.mesh.get_local_rank(axis),
            count * place.mesh[axis].size(),
        )
    if count > 1 and (len(atoms) > 1 or place.placements is None or place.atoms.sizes[atoms[0]] % count):
        raise AutoparError(f"the input {place.name} is not split into equal parts: {place.layout}\nfix: {LOCAL_SHARDS}")
    return index, count


def _text(call: CompiledCall) -> Callable[[str], str]:
    return lambda name: str(call.graph.tensors[name])
