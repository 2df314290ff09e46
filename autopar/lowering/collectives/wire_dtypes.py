"""The dtypes in which tensors are sent: libraries of collectives know a few, all others go as bytes or are widened.

| sent | as they are | otherwise |
|---|---|---|
| all-to-all | floats of 16 to 64 bits, integers of 8, 32, 64 bits, truths | as bytes |
| all-gather | the same, and complex numbers | as bytes |
| sums | the same without truths | widened to `SUMMED` and cast back; of truths: any |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

__all__ = ["SUMMED", "as_bytes", "is_known", "restored", "summed_in", "summed_together"]

_KNOWN = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
)
_COMPLEX = (torch.complex128, torch.complex64)

# Dtypes that no library sums, and the dtypes that they are summed in.
SUMMED: Mapping[torch.dtype, torch.dtype] = {
    torch.bool: torch.int32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,  # wraps around as it does
    torch.complex32: torch.complex64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
}


def is_known(dtype: torch.dtype, gathered: bool) -> bool:
    """Return whether a dtype is sent unchanged; complex numbers only where they are gathered."""
    return dtype in _KNOWN or (gathered and dtype in _COMPLEX)


def as_bytes(buffer: Tensor) -> Tensor:
    return buffer.view(torch.uint8)


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums of a dtype are sent."""
    return SUMMED.get(dtype, dtype)


def summed_together(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return one dtype for several sums: their own, or one that holds the values of all."""
    found = {summed_in(dtype) for dtype in dtypes}
    if len(found) == 1:
        return found.pop()
    # Counts are exact in float64 below 2**53.
    return torch.complex128 if any(dtype.is_complex for dtype in found) else torch.float64


def restored(total: Tensor, dtype: torch.dtype, copy: bool = False) -> Tensor:
    """Cast a sum back to the dtype of its terms."""
    value = total.real if total.is_complex() and not dtype.is_complex else total
    return value.to(dtype, copy=copy)
