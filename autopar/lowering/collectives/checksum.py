"""Digests and checksums that ranks compare."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped

__all__ = [
    "BLOCKS",
    "LARGE_BYTES",
    "checksum",
    "checksum_of_all",
    "digest",
    "kind_of",
    "quick_checksum",
]


def digest(text: str) -> int:
    """Return a number below 2**63 that is equal in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def checksum(tensor: Tensor) -> int:
    """Return a checksum of a tensor's bits; two tensors that differ share one with a chance of 2**-32."""
    if tensor.is_meta or tensor.numel() == 0:
        return 0
    if tensor.dtype in _OF_NUMPY and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg():
        # The same bytes without six ops on tensors: inputs are summed at every call.
        return zlib.crc32(tensor.detach().numpy().data)
    return zlib.crc32(_bytes_of(tensor).numpy().data)


def checksum_of_all(tensors: Iterable[Tensor]) -> int:
    """Return a checksum below 2**32 of the tensors that are data, in their order.

    Computed tensors are left out: their last bits may differ between ranks.
    """
    found = 0
    for tensor in tensors:
        if type(tensor) is Tensor and tensor.layout is torch.strided and tensor.is_leaf and not is_wrapped(tensor):
            found = zlib.crc32(quick_checksum(tensor).to_bytes(4, "big"), found)
    return found


_OF_NUMPY = frozenset((torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64))
# Tensors from this size on are summed in so many blocks first: about 0.02 ms per MiB instead of 1 ms.
LARGE_BYTES, BLOCKS = 2**17, 1024


def quick_checksum(tensor: Tensor) -> int:
    """Return a checksum that detects exchanged rows too, except short rows that change places within one block."""
    if tensor.is_meta or tensor.nbytes < LARGE_BYTES:
        return checksum(tensor)
    flat = _bytes_of(tensor)
    if flat.storage_offset() % 8:
        return checksum(tensor)
    whole = flat.numel() // (8 * BLOCKS) * (8 * BLOCKS)
    sums = flat[:whole].view(torch.int64).view(BLOCKS, -1).sum(1)
    return zlib.crc32(flat[whole:].numpy().data, checksum(sums))


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).cpu()


def kind_of(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
