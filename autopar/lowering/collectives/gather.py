"""All-gathers of which several may be pending, on every library of collectives."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["begin_gather"]


def begin_gather(x: Tensor, ranks: int, group: str) -> Tensor:
    """Begin an all-gather along the first dim; the result is pending.

    Gloo runs the collectives of a group on two threads, and both write the name of their last kind to one string,
    without a lock. Two of `all_gather_into_tensor` that end together free its old text twice, and the process dies soon
    after. Gloo calls them ALLGATHER_COALESCED. A name of at most 15 letters, like those of all other collectives that
    run here, has no memory of its own.
    """
    ops = torch.ops._c10d_functional
    whole: Tensor
    if not x.is_cpu or torch.compiler.is_compiling():  # compiled code waits for each at once
        whole = ops.all_gather_into_tensor(x, ranks, group)
        return whole
    parts = torch.view_as_real(x) if x.is_complex() else x
    whole = parts.new_empty((ranks * parts.shape[0], *parts.shape[1:]))
    ops.all_gather_into_tensor_out(parts, ranks, group, out=whole)
    return torch.view_as_complex(whole) if x.is_complex() else whole
