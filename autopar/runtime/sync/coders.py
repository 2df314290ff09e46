"""Codes in which replicas send vectors: fewer bytes, and what is lost is added to the next vector.

Error feedback: `lost + decoded == vector + lost of the last time`, exactly. F. Seide et al., "1-Bit Stochastic Gradient
Descent", 2014; S. Stich et al., "Sparsified SGD with Memory", 2018.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from autopar.sharding.layout.drift import Coder

__all__ = ["BlockCode", "TopCode", "VectorCode", "WholeCode", "code_of", "with_feedback"]

# Values that share a scale in int8: one large value costs its neighbours precision.
BLOCK = 256


class VectorCode(Protocol):
    """A code of vectors of floating point numbers as bytes."""

    def size(self, length: int) -> int:
        """Return the number of bytes of a vector of float32 numbers."""

    def encode(self, vector: Tensor) -> Tensor:
        """Return the bytes of a vector."""

    def decode(self, sent: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """Return the vector of some bytes."""


class WholeCode:
    """Values in a narrower dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def size(self, length: int) -> int:
        return self.dtype.itemsize * length

    def encode(self, vector: Tensor) -> Tensor:
        return vector.to(self.dtype).view(torch.uint8)

    def decode(self, sent: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        return sent.view(self.dtype).to(dtype)


class BlockCode:
    """Values as multiples of a scale, in 8 bits; one scale for each block of values."""

    def size(self, length: int) -> int:
        return length + 4 * -(-length // BLOCK)

    def encode(self, vector: Tensor) -> Tensor:
        blocks = torch.nn.functional.pad(vector, (0, -len(vector) % BLOCK)).view(-1, BLOCK)
        # The scale is sent in float32, so it is rounded before it is used.
        scales = (blocks.abs().amax(1, keepdim=True) / 127).to(torch.float32)
        safe = torch.where(scales > 0, scales, 1.0).to(vector.dtype)
        values = (blocks / safe).round().clamp(-127, 127).to(torch.int8)
        return torch.cat([scales.view(-1).view(torch.uint8), values.view(-1)[: len(vector)].view(torch.uint8)])

    def decode(self, sent: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        count = -(-length // BLOCK)
        scales = sent[: 4 * count].clone().view(torch.float32).to(dtype)
        values = sent[4 * count :].view(torch.int8).to(dtype)
        return values * scales.repeat_interleave(BLOCK)[:length]


class TopCode:
    """The largest values alone, each with its place."""

    def __init__(self, percent: float) -> None:
        self.share = percent / 100

    def kept(self, length: int) -> int:
        """Return the number of values that are sent of a vector."""
        return min(length, max(1, round(self.share * length)))

    def size(self, length: int) -> int:
        return self.kept(length) * (_place_dtype(length).itemsize + 4) if length else 0

    def encode(self, vector: Tensor) -> Tensor:
        places = vector.abs().topk(self.kept(len(vector)), sorted=False).indices
        return torch.cat([places.to(_place_dtype(len(vector))).view(torch.uint8), vector[places].view(torch.uint8)])

    def decode(self, sent: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        kind = _place_dtype(length)
        split = kind.itemsize * self.kept(length)
        places = sent[:split].clone().view(kind).long()
        # A clone, as the bytes of a wider dtype need not be aligned behind the places.
        return torch.zeros(length, dtype=dtype, device=sent.device).scatter_(
            0, places, sent[split:].clone().view(dtype)
        )


def _place_dtype(length: int) -> torch.dtype:
    return torch.int32 if length < 2**31 else torch.int64


def code_of(coder: Coder) -> VectorCode:
    """Return the code that a statement names."""
    if coder.kind == "topk":
        return TopCode(coder.percent)
    return BlockCode() if coder.kind == "int8" else WholeCode(torch.bfloat16)


def with_feedback(code: VectorCode, vector: Tensor, lost: Tensor) -> Tensor:
    """Encode a vector plus what was lost before, and store in `lost` what is lost now."""
    lost.add_(vector)
    if not len(lost):
        return lost.new_empty(0, dtype=torch.uint8)
    sent = code.encode(lost)
    lost.sub_(code.decode(sent, len(lost), lost.dtype))
    return sent
