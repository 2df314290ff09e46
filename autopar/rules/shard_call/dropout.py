"""Dropout by a mask of booleans: of a tensor, and of the weights of attention, which is written out for it."""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
from torch import Tensor

from autopar.rules.shard_call.attention import in_sum_dtype, lead_of

__all__ = ["attend_dropped", "attention_with_dropout", "dropped", "scale_of"]

aten = torch.ops.aten


def scale_of(rate: float) -> float:
    """Return the factor of the elements that stay."""
    return 0.0 if rate == 1 else 1 / (1 - rate)


def dropped(x: Tensor, kept: Tensor, scale: float) -> Tensor:
    found: Tensor = _Dropped.apply(x, kept, scale)  # type: ignore[no-untyped-call]
    return found


class _Dropped(torch.autograd.Function):
    """Product with a mask, of which only the booleans are saved.

    They are cast first: a product of numbers and booleans takes many times as long.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(kept)
        ctx.scale = scale
        return x * kept.to(x.dtype) * scale  # in this order: the scale itself would be rounded

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        return gradient * kept.to(gradient.dtype) * ctx.scale, None, None


def attend_dropped(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    kept: Tensor,
    scale: float,
    is_causal: bool,
    factor: float | None,
    grouped: bool,
    first_row: int = 0,
) -> Tensor:
    """Return attention whose weights are dropped but for `kept` and multiplied by `scale`; `factor` is of the scores.

    The first of the queries is row `first_row` of a causal mask.
    """
    dtype = queries.dtype
    queries, keys, values = map(in_sum_dtype, (queries, keys, values))
    if grouped:
        keys = keys.repeat_interleave(queries.shape[-3] // keys.shape[-3], -3)
        values = values.repeat_interleave(queries.shape[-3] // values.shape[-3], -3)
    factor = 1 / sqrt(queries.shape[-1]) if factor is None else factor
    scores = (queries * factor) @ keys.transpose(-1, -2)
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(first_row)
        scores = scores.masked_fill(~seen, -torch.inf)
    if mask is None:
        weights = scores.softmax(-1)
    else:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
        weights = aten._safe_softmax.default(scores, -1)  # a row that sees nothing is zero
    return (dropped(weights, kept, scale) @ values).to(dtype)


def attention_with_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run `scaled_dot_product_attention` as several ranks do, with a mask that is drawn at once."""
    lead = lead_of(query, key, key, enable_gqa)
    kept = torch.rand(*lead, query.shape[-2], key.shape[-2], device=query.device) >= dropout_p
    return attend_dropped(query, key, value, attn_mask, kept, scale_of(dropout_p), is_causal, scale, enable_gqa)
