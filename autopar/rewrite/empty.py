"""Ops on a rank that has nothing of a split factor: pieces are of the ceiling size, so the last ones may be empty.

What such a rank adds to a sum is zero, and what it has of a split result has no elements. Its op gives just that,
without being run: many ops refuse tensors without elements. It still depends on what it takes, so that the collectives
of the backward run on all ranks alike.

Where something is added to the sum (a bias), the op does run, on a slice of zeros in place of the empty one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from autopar.rewrite.moves import zeros_of
from autopar.rules.notation import Operand

__all__ = ["Empty", "amounts", "nothing"]


def nothing(shape: Sequence[int], dtype: torch.dtype, tensors: Sequence[Tensor]) -> Tensor:
    """Zeros of some shape that are a function of the tensors, with zeros for their gradients."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        made: Tensor = _Nothing.apply(tuple(shape), dtype, *tensors)  # type: ignore[no-untyped-call]
        return made
    return zeros_of(shape, dtype, tensors)


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], dtype: torch.dtype, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return zeros_of(shape, dtype, tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # Of the gradient and of what the op took, as the gradients of any op are: so are gradients of gradients.
        tensors: tuple[Tensor, ...] = ctx.saved_tensors
        found = zip(tensors, ctx.needs_input_grad[2:], strict=True)
        made = [nothing(x.shape, x.dtype, (gradient, *tensors)) if wanted else None for x, wanted in found]
        return None, None, *made


class Empty(nn.Module):
    """An op on a rank that has nothing to do for it; `results` are the shapes and dtypes that it gives."""

    def __init__(self, op: str, results: tuple[tuple[tuple[int, ...], torch.dtype] | None, ...], single: bool) -> None:
        super().__init__()
        self.op = op
        self.results = results
        self.single = single

    def forward(self, *tensors: Tensor) -> Any:
        made = [None if result is None else nothing(*result, tensors) for result in self.results]
        return made[0] if self.single else made

    def extra_repr(self) -> str:
        return f"{self.op}: this rank has nothing of it"


def amounts(operand: Operand, local_sizes: Mapping[str, int]) -> list[int]:
    """What `constant_pad_nd` adds to an operand's shard so that each of its empty factors has one position."""
    found: list[int] = []
    for term in reversed(operand.terms):
        length = prod(local_sizes[factor] for factor in term)
        found += [0, prod(max(local_sizes[factor], 1) for factor in term) - length]
    return found if any(found) else []
