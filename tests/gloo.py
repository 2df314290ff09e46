"""Which dtypes Gloo sends, and how it adds: for transports that are simulated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["added", "refuse"]

SENT = frozenset(
    (
        torch.float64, torch.float32, torch.float16, torch.bfloat16,
        torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
    )
)  # fmt: skip
"""The dtypes that Gloo sends, in every collective. `tests/runtime/test_simulated_ranks.py` asks Gloo."""
COMPLEX = frozenset(("all_reduce", "all_reduce_", "all_gather_into_tensor", "reduce_scatter_tensor"))
"""The collectives in which it sends complex numbers too, and with `_coalesced` this one."""
COALESCED_COMPLEX = "reduce_scatter_tensor_coalesced"


def refuse(name: str, dtype: torch.dtype, reduction: str | None) -> None:
    """Raise what Gloo raises where it cannot send a dtype."""
    if dtype in SENT:
        return
    if dtype.is_complex and (name in COMPLEX or name == COALESCED_COMPLEX):
        if reduction in (None, "sum"):
            return
        raise RuntimeError(f"{name.rstrip('_')}: reduce_op {reduction} does not support complex tensors")
    raise RuntimeError("Invalid scalar type")


def added(buffers: Sequence[Tensor]) -> Tensor:
    """The sum in the dtype of the buffers, as Gloo makes it: one after the other, booleans as bytes."""
    total = buffers[0].clone()
    for buffer in buffers[1:]:
        if buffer.dtype is torch.bool:
            total.view(torch.uint8).add_(buffer.view(torch.uint8))
        else:
            total += buffer
    return total
