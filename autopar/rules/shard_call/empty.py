"""Zeros with a gradient, for ranks whose shard is empty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from autopar.rules.notation import Operand

__all__ = ["amounts", "kept", "nothing", "zeros_of"]


def nothing(shape: Sequence[int], dtype: torch.dtype, tensors: Sequence[Tensor]) -> Tensor:
    """Return zeros of some shape as a function of the tensors, which get zeros for gradients."""
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


def amounts(operand: Operand, local_sizes: Mapping[str, int]) -> list[int]:
    """Return the padding that gives each empty factor of an operand's shard one position, for `constant_pad_nd`."""
    found: list[int] = []
    for term in reversed(operand.terms):
        length = prod(local_sizes[factor] for factor in term)
        found += [0, prod(max(local_sizes[factor], 1) for factor in term) - length]
    return found if any(found) else []


def zeros_of(shape: Sequence[int], dtype: torch.dtype, tensors: Sequence[Tensor]) -> Tensor:
    """Return zeros that depend on some tensors, also for the compiler."""
    if not torch.compiler.is_compiling():
        return tensors[0].new_zeros(tuple(shape), dtype=dtype)
    first, *others = (kept(x, tuple(shape), False).to(dtype) for x in tensors)
    for other in others:
        first = first + other
    return first


def kept(x: Tensor, shape: Sequence[int], keep: bool) -> Tensor:
    """Return a copy of a tensor, or zeros of some shape.

    The compiler would see that zeros depend on nothing: a rank that holds only zeros would then drop the collectives
    before them or move those after them from the backward to the forward, while the other ranks do not, and all of them
    would hang.
    """
    found: Tensor = torch.ops.autopar.kept.default(x, list(shape), keep)
    return found


_LIBRARY: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("kept(Tensor x, SymInt[] shape, bool keep) -> Tensor")
_LIBRARY.impl("kept", lambda x, shape, keep: x.clone() if keep else x.new_zeros(shape), "CompositeExplicitAutograd")
torch.library.register_fake(
    "autopar::kept", lambda x, shape, keep: torch.empty_like(x) if keep else x.new_empty(shape), lib=_LIBRARY
)
