"""Attention by a fused kernel where torch itself would compute all scores by plain products, and keep them.

The kernels take tensors of four dims with equal leading ones, so others are expanded. The kernel of the CPU takes equal
widths of keys and values alone, where those of GPUs take both: the narrower ones are padded while it runs, as for
DeepSeek-V3, and saved in their own width. It has no gradient of a mask, which the backward then computes for some rows
at a time, as for the biases of T5.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.rules.shard_call.attention import (
    BLOCK_ROWS,
    SDPA,
    check_first_derivative,
    fused_kernel,
    in_sum_dtype,
    lead_of,
    widened,
    with_heads,
)
from autopar.rules.shard_call.attention_kernels import BACKWARD, FORWARD, KeyRange

__all__ = ["fused_attention"]


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run `scaled_dot_product_attention` by the fused kernel of the device."""
    device = "cuda" if query.device.type == "cuda" else "cpu"  # a trace has no device yet
    takes = query.is_floating_point() and fused_kernel("cpu", None, query.dtype, query.shape[-1]) == "cpu"
    is_plain = dropout_p or not (query.numel() and key.numel()) or (attn_mask is not None and is_causal)
    if is_plain or (device == "cpu" and not takes):
        return SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)  # type: ignore[no-any-return]
    lead = lead_of(query, key, value, enable_gqa)
    q, k, v = with_heads(query, key, value, enable_gqa, shares=False)
    scores = *q.shape[:-1], k.shape[-2]
    mask = None if attn_mask is None else attn_mask.expand(*lead, *scores[-2:]).reshape(scores)
    if device == "cuda":
        found: Tensor = SDPA(q, k, v, mask, 0.0, is_causal, scale=scale)
    else:
        if mask is not None and mask.dtype is torch.bool:
            mask = torch.zeros(mask.shape, dtype=q.dtype, device=mask.device).masked_fill(~mask, -torch.inf)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        found = _Attention.apply(q, k, v, mask, scale, is_causal)  # type: ignore[no-untyped-call]
    return found.reshape(*lead, *found.shape[-2:])


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, is_causal: bool
    ) -> Tensor:
        width = value.shape[-1]
        whole, sums = FORWARD["cpu"](*_widened(query, key, value), KeyRange((), is_causal, bias=mask), scale)
        found: Tensor = whole if whole.shape[-1] == width else whole[..., :width].contiguous()
        ctx.save_for_backward(query, key, value, mask, found, sums)
        ctx.scale, ctx.is_causal = scale, is_causal
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        check_first_derivative("attention that autopar fuses")
        query, key, value, mask, found, sums = ctx.saved_tensors
        if ctx.needs_input_grad[3]:
            return *_with_mask(gradient, query, key, value, mask, found, sums, ctx.scale), None, None
        seen = KeyRange((), ctx.is_causal, bias=mask)
        operands = _widened(query, key, value)
        given, whole = (widened(one, operands[0].shape[-1]) for one in (gradient, found))
        made = BACKWARD["cpu"](given, *operands, whole, sums, seen, ctx.scale)
        cut = (one[..., : of.shape[-1]] for one, of in zip(made, (query, key, value), strict=True))
        return *cut, None, None, None


def _with_mask(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, found: Tensor, sums: Tensor, scale: float
) -> tuple[Tensor, ...]:
    """Return the gradients of queries, keys, values and what the mask adds to the scores, for some rows at a time."""
    keys, values = in_sum_dtype(key), in_sum_dtype(value)
    of_query, of_mask = torch.empty_like(query), torch.empty(mask.shape, dtype=mask.dtype, device=mask.device)
    of_key, of_value = torch.zeros_like(keys), torch.zeros_like(values)
    for first in range(0, query.shape[-2], BLOCK_ROWS):
        rows = slice(first, first + BLOCK_ROWS)
        own, given, made = (in_sum_dtype(one[..., rows, :]) for one in (query, gradient, found))
        scores = (own * scale) @ keys.transpose(-1, -2) + mask[..., rows, :]
        weights = (scores - sums[..., rows, None]).exp()
        moved = given @ values.transpose(-1, -2) - (given * made).sum(-1, keepdim=True)
        of_scores = weights * moved
        of_mask[..., rows, :] = of_scores
        of_query[..., rows, :] = (of_scores @ keys) * scale
        of_key += of_scores.transpose(-1, -2) @ (own * scale)
        of_value += weights.transpose(-1, -2) @ given
    return of_query, of_key.to(key.dtype), of_value.to(value.dtype), of_mask


def _widened(*tensors: Tensor) -> list[Tensor]:
    width = max(one.shape[-1] for one in tensors)
    return [widened(one, width) for one in tensors]
