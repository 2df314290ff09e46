"""Checksums that ranks compare."""

from __future__ import annotations

import zlib

import pytest
import torch
from torch import Tensor

from autopar.lowering.collectives.checksum import checksum

DTYPES = (
    *(torch.bool, torch.uint8, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
)


def summed(tensor: Tensor) -> int:
    """Checksum of the values in their order, whatever the strides."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return zlib.crc32(bytes(copy.reshape(-1).view(torch.uint8).tolist()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_checksum_is_of_the_values_in_their_order(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    whole = torch.randint(0, 2 if dtype == torch.bool else 100, (3, 4, 5)).to(dtype)
    for given in (whole, whole.transpose(0, 2), whole[:, 1:3], whole[:, 2], whole[1, 2, 3], whole[:, :0]):
        assert checksum(given) == summed(given)
    assert checksum(whole) != checksum(whole.flip(0))
    if dtype.is_floating_point:
        assert checksum(whole.clone().requires_grad_()) == summed(whole)


def test_views_that_negate_count_as_their_values() -> None:
    numbers = torch.randn(6, dtype=torch.complex64)
    negated = numbers.conj().imag
    assert negated.is_neg()
    assert checksum(negated) == summed(negated)
    assert checksum(numbers.conj()) == summed(numbers.conj())
