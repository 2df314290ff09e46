"""Batch normalisation of a shard by the statistics of all shards.

An op that is derived by autograd passes over the image some ten times in the forward and more in the backward. Here
they are two and two to three: the backward is written out, and calls the sum over the shards as the forward does. On a
GPU the kernels are those that torch has for synchronised statistics. Elsewhere, and in compiled graphs, they are ops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopar.rules.shard_call.attention import check_first_derivative, in_sum_dtype

__all__ = ["normalised_shard"]

Sum = Callable[[Tensor], Tensor]
# The kernels count elements in this dtype.
MOST_ELEMENTS = torch.iinfo(torch.int32).max


def normalised_shard(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, whole: int, sums: tuple[Sum, Sum]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a shard normalised along dim 1, with the mean and the variance of all `whole` elements of a channel.

    `sums` add up a tensor over all shards; neither needs a derivative.
    """
    found: tuple[Tensor, Tensor, Tensor] = _Normalised.apply(x, weight, bias, eps, whole, sums)  # type: ignore[no-untyped-call]
    return found


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, whole: int, sums: tuple[Sum, Sum]
    ) -> tuple[Tensor, Tensor, Tensor]:
        own, spread = _moments(x)
        count = x.numel() // max(x.shape[1], 1)
        mean = sums[0](own * count) / whole
        # Variances of shards add up with the squares of the distances of their means.
        variance = sums[1]((spread + (own - mean).square()) * count) / whole
        scale = torch.ones_like(mean) if weight is None else in_sum_dtype(weight)
        shift = torch.zeros_like(mean) if bias is None else in_sum_dtype(bias)
        normed = torch.native_batch_norm(x, scale, shift, mean, variance, False, 0.0, eps)[0]
        ctx.save_for_backward(x, scale, mean, variance)
        ctx.call = eps, whole, sums
        ctx.dtypes = [None if one is None else one.dtype for one in (weight, bias)]
        ctx.mark_non_differentiable(mean, variance)
        return normed, mean, variance

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative("batch normalisation over a split batch")
        x, scale, mean, variance = ctx.saved_tensors
        eps, whole, sums = ctx.call
        inverse = torch.rsqrt(variance + eps)
        of_bias, centred = _gradient_sums(gradient, x, mean, variance, inverse, eps)
        of_weight = centred * inverse
        given = None
        if ctx.needs_input_grad[0]:
            total, total_centred = sums[0](of_bias), sums[1](centred)
            given = _of_image(gradient, x, scale, mean, inverse, total, total_centred, whole)
        pairs = zip((of_weight, of_bias), ctx.dtypes, strict=True)
        own = [None if dtype is None else one.to(dtype) for one, dtype in pairs]
        return given, *own, None, None, None


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda and x.numel() > 0 and not torch.compiler.is_compiling()


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the variance of each channel of a shard; zeros for an empty one."""
    if _has_kernels(x):
        mean, inverse = torch.batch_norm_stats(x, 0.0)
        # The kernel returns 0 for a channel without variance.
        return mean, torch.where(inverse > 0, inverse.pow(-2), 0)
    wide, dims = in_sum_dtype(x), _others(x)
    if not x.numel():
        return wide.new_zeros(x.shape[1]), wide.new_zeros(x.shape[1])
    # On a CPU `torch.var_mean` takes eight times as long.
    mean = wide.mean(dims)
    return mean, (wide - mean.view(_along(x))).square_().mean(dims)


def _gradient_sums(
    gradient: Tensor, x: Tensor, mean: Tensor, variance: Tensor, inverse: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the sums of a shard's gradients, and of their products with the distances from the mean."""
    if not x.numel():
        return torch.zeros_like(mean), torch.zeros_like(mean)
    if _has_kernels(x):
        total, centred, _, _ = torch.batch_norm_backward_reduce(gradient, x, mean, inverse, None, True, False, False)
        return total, centred
    ones, wanted = torch.ones_like(mean), [False, True, True]
    backward = torch.ops.aten.native_batch_norm_backward.default
    _, normed, total = backward(gradient, x, ones, mean, variance, None, None, False, eps, wanted)
    return total, normed / inverse


def _of_image(
    gradient: Tensor,
    x: Tensor,
    scale: Tensor,
    mean: Tensor,
    inverse: Tensor,
    total: Tensor,
    centred: Tensor,
    whole: int,
) -> Tensor:
    """Return the gradient of a shard, from sums over all shards."""
    if _has_kernels(x) and whole <= MOST_ELEMENTS:
        count = torch.full((1,), whole, dtype=torch.int32, device=x.device)
        return torch.batch_norm_backward_elemt(gradient, x, mean, inverse, scale, total, centred, count)
    along = _along(x)
    by_gradient = scale * inverse
    by_image = -by_gradient * inverse.square() * centred / whole
    constant = -by_gradient * total / whole - by_image * mean
    result = torch.addcmul(constant.view(along), gradient, by_gradient.view(along))
    return result.addcmul_(in_sum_dtype(x), by_image.view(along)).to(x.dtype)


def _along(x: Tensor) -> list[int]:
    return [1, -1, *[1] * (x.dim() - 2)]


def _others(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]
