"""Memory that tensors of one call share.

A traced graph takes every input as a tensor of its own. Inputs that share memory, with each other or with the model's
tensors, are the same to it as long as nothing is written to that memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from autopar.errors import AutoparError

__all__ = ["apart", "check_overlaps", "overlap"]


def apart(tensor: Tensor) -> Tensor:
    """Make a leaf of the same shape, strides, dtype and device in memory of its own; its values are not set."""
    with torch.no_grad():
        if tensor.layout is torch.strided:
            made = tensor.new_empty_strided(tensor.shape, tensor.stride())
        else:
            made = tensor.clone()
    return made.requires_grad_(tensor.requires_grad)


def check_overlaps(
    owner: str,
    changed: Iterable[str],
    inputs: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    error: type[AutoparError] = AutoparError,
) -> None:
    """Raise if a tensor that the forward changes in place shares memory with another input.

    `changed` are names of `inputs` or of `state`, the model's parameters and buffers.
    """
    given = set(map(_storage, inputs.values()))
    for name in changed:
        own = inputs[name] if name in inputs else state[name]
        if name not in inputs and _storage(own) not in given:
            continue
        others = {**(state if name in inputs else {}), **inputs}
        for other, tensor in others.items():
            if other != name and overlap(own, tensor):
                what = "the input" if name in inputs else "its buffer"
                raise error(
                    f"{owner} changes {what} {name} in place, and {other} shares memory with it: the traced graph "
                    f"cannot follow a change of one in the other\nfix: call it with a clone, {other}.clone()"
                )


def overlap(one: Tensor, other: Tensor) -> bool:
    """Return True if the two tensors have an element in common."""
    if _storage(one) != _storage(other) or not one.numel() or not other.numel():
        return False
    if one.layout is not torch.strided:
        return True
    if one.dtype != other.dtype:
        return True  # views of other dtypes of one storage: not worth working out
    begin, end = max(_first(one), _first(other)), min(_last(one), _last(other))
    if begin > end:
        return False
    # Columns of one table lie between each other: mark the elements of the one, and look for them in the other.
    marks = torch.zeros(max(_last(one), _last(other)) + 1, dtype=torch.bool)
    marks.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _storage(tensor: Tensor) -> int:
    found: int = id(tensor) if tensor.layout is not torch.strided else tensor.untyped_storage()._cdata
    return found


def _first(tensor: Tensor) -> int:
    return int(tensor.storage_offset())


def _last(tensor: Tensor) -> int:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return _first(tensor) + sum((size - 1) * step for size, step in steps)
