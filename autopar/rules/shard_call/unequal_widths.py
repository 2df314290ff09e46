"""Attention whose values have another width than its keys, as in DeepSeek-V3, by the fused kernel of the CPU.

The kernel takes equal widths alone, so the narrower ones are padded while it runs. What is saved has its own width, as
in the kernels of GPUs, which take both. Without it torch computes all scores and keeps them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.rules.shard_call.attention import SDPA, check_first_derivative, fused_kernel, widened, with_all_heads
from autopar.rules.shard_call.attention_kernels import BACKWARD, FORWARD, KeyRange

__all__ = ["attention_of_unequal_widths"]


def attention_of_unequal_widths(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run `scaled_dot_product_attention` by the fused kernel, where it takes all but the widths."""
    fits = query.dim() == 4 and query.shape[0] == key.shape[0] == value.shape[0] and query.numel() and key.numel()
    plain_mask = attn_mask is None or not (attn_mask.requires_grad or is_causal)
    fused = query.is_floating_point() and fused_kernel("cpu", None, query.dtype, query.shape[-1]) == "cpu"
    if not (fits and plain_mask and fused) or dropout_p:
        return SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)  # type: ignore[no-any-return]
    given = with_all_heads({"query": query, "key": key, "value": value, "enable_gqa": enable_gqa})
    seen = KeyRange((), is_causal, bias=_added(attn_mask, query, key))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    found: Tensor = _Attention.apply(query, given["key"], given["value"], scale, seen)  # type: ignore[no-untyped-call]
    return found


def _added(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return what a mask adds to the scores."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(~mask, -torch.inf)
    return mask.expand(*query.shape[:-1], key.shape[-2])


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, seen: KeyRange) -> Tensor:
        width = value.shape[-1]
        whole, sums = FORWARD["cpu"](*_widened(query, key, value), seen, scale)
        found: Tensor = whole if whole.shape[-1] == width else whole[..., :width].contiguous()
        ctx.save_for_backward(query, key, value, found, sums)
        ctx.scale, ctx.seen = scale, seen
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        check_first_derivative("attention whose values have another width than its keys")
        query, key, value, found, sums = ctx.saved_tensors
        operands = _widened(query, key, value)
        given, whole = (widened(one, operands[0].shape[-1]) for one in (gradient, found))
        made = BACKWARD["cpu"](given, *operands, whole, sums, ctx.seen, ctx.scale)
        cut = (one[..., : of.shape[-1]] for one, of in zip(made, (query, key, value), strict=True))
        return *cut, None, None


def _widened(*tensors: Tensor) -> list[Tensor]:
    width = max(one.shape[-1] for one in tensors)
    return [widened(one, width) for one in tensors]
