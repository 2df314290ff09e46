"""Causal attention of some of the queries: the last ones of as many positions as there are keys.

The last query sees all keys, each one before it sees one key less. Some fused kernels of GPUs know this form. Those of
CPUs and cuDNN's do not: they work on the keys before the first query and on the square of the rest, as for one piece of
a folded sequence. Where there is no fused kernel, blocks of queries are written out in turn.
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from autopar.rules.shard_call.attention import (
    BLOCK_ROWS,
    aligned,
    check_first_derivative,
    fused_kernel,
    in_sum_dtype,
    lead_of,
    widened,
    with_heads,
)
from autopar.rules.shard_call.folded import attend_folded, kernel_for
from autopar.rules.shard_call.local_call import FactorSlice, LocalCall

__all__ = ["attend_last_rows", "causal_rows"]

aten = torch.ops.aten

# `custom_mask_type` of the memory-efficient kernel: the last query sees all keys.
LOWER_RIGHT = 2


def attend_last_rows(query: Tensor, key: Tensor, value: Tensor, scale: float | None, grouped: bool) -> Tensor:
    """Return the attention of `rows` queries that are the last ones of as many positions as there are keys.

    `query` is `... rows e`, `key` `... keys e`, `value` `... keys v`, with at most as many rows as keys. Leading dims
    broadcast; `grouped`: the last of them has fewer heads in keys and values, as `enable_gqa` says.
    """
    width = max(query.shape[-1], value.shape[-1])
    kernel = fused_kernel(query.device.type, query.device.index, query.dtype, width)
    if kernel in ("cpu", "flash") and kernel_for(query, width) in ("cpu", "cudnn"):
        before = key.shape[-2] - query.shape[-2]
        return attend_folded(query, key, value, scale, grouped, pieces=1, start=before)
    shape = (*lead_of(query, key, value, grouped), query.shape[-2], value.shape[-1])
    scale = 1 / sqrt(query.shape[-1]) if scale is None else scale
    if kernel == "efficient" and torch.compiler.is_compiling():
        kernel = "none"  # torch 2.13 does not know the shapes of what its backward gives
    q, k, v = with_heads(query, key, value, grouped, shares=kernel == "flash")
    if kernel == "flash":
        found = _flash(q, k, v, scale)
    elif kernel == "efficient":
        found = _efficient(q, k, v, scale)
    else:
        found = _Written.apply(q, k, v, scale)  # type: ignore[no-untyped-call]
    return found.reshape(shape)


# -- fused kernels of GPUs --------------------------------------------------------------------------------------------


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    width = aligned(max(q.shape[-1], v.shape[-1]))
    padded = [widened(x, width) for x in (q, k, v)]
    # For this op causal means that the last query sees all keys, unlike for `scaled_dot_product_attention`.
    found: Tensor = aten._scaled_dot_product_flash_attention.default(*padded, 0.0, True, False, scale=scale)[0]
    return found[..., : v.shape[-1]]


def _efficient(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    widths = [aligned(x.shape[-1]) for x in (q, k, v)]
    padded = [widened(x, width).transpose(1, 2) for x, width in zip((q, k, v), widths, strict=True)]
    saves = torch.is_grad_enabled() and any(x.requires_grad for x in padded)
    nothing = (None,) * 5  # no bias, all sequences of one length
    found: Tensor = aten._efficient_attention_forward.default(
        *padded, *nothing, 0.0, LOWER_RIGHT, saves, scale=scale, seqlen_k=None
    )[0]
    return found.transpose(1, 2)[..., : v.shape[-1]]


# -- written out ------------------------------------------------------------------------------------------------------


class _Written(torch.autograd.Function):
    """Attention in blocks of queries; the backward computes their weights again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        parts = [_weights(q, k, start, scale) @ in_sum_dtype(v[..., :seen, :]) for start, seen in _blocks(q, k)]
        found = torch.cat(parts, -2).to(q.dtype)
        ctx.save_for_backward(q, k, v, found)
        ctx.scale = scale
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative("fused causal attention")
        q, k, v, found = ctx.saved_tensors
        of_q, of_k, of_v = [], torch.zeros_like(in_sum_dtype(k)), torch.zeros_like(in_sum_dtype(v))
        for start, seen in _blocks(q, k):
            weights = _weights(q, k, start, ctx.scale)
            own, result = (in_sum_dtype(x[..., start : start + BLOCK_ROWS, :]) for x in (gradient, found))
            of_v[..., :seen, :] += weights.transpose(-1, -2) @ own
            moved = own @ in_sum_dtype(v[..., :seen, :]).transpose(-1, -2) - (own * result).sum(-1, keepdim=True)
            of_scores = weights * moved * ctx.scale
            of_q.append(of_scores @ in_sum_dtype(k[..., :seen, :]))
            of_k[..., :seen, :] += of_scores.transpose(-1, -2) @ in_sum_dtype(q[..., start : start + BLOCK_ROWS, :])
        return torch.cat(of_q, -2).to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), None


def _blocks(q: Tensor, k: Tensor) -> list[tuple[int, int]]:
    """Yield the start of each block of queries, and the number of keys that its last one sees."""
    rows, keys = q.shape[-2], k.shape[-2]
    return [(start, keys - rows + min(start + BLOCK_ROWS, rows)) for start in range(0, rows, BLOCK_ROWS)]


def _weights(q: Tensor, k: Tensor, start: int, scale: float) -> Tensor:
    """Return the attention weights of a block of queries over the keys that it sees."""
    own = in_sum_dtype(q[..., start : start + BLOCK_ROWS, :])
    rows = own.shape[-2]
    seen = k.shape[-2] - q.shape[-2] + start + rows
    scores = (own * scale) @ in_sum_dtype(k[..., :seen, :]).transpose(-1, -2)
    later = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
    square = scores[..., seen - rows :].masked_fill(later, -torch.inf)
    return torch.cat([scores[..., : seen - rows], square], -1).softmax(-1)


# -- rows that know their position -------------------------------------------------------------------------------------


def causal_rows(local: LocalCall, piece: FactorSlice) -> LocalCall:
    """Run queries `start` to `stop` of causal attention: query `i` sees keys `0` to `i`."""
    given = local.arguments
    if not given["is_causal"]:
        return local
    keys = given["key"].shape[-2]
    if given["dropout_p"] > 0:
        return _masked(local, piece)
    if piece.start >= keys or not piece.length:  # each sees all of them
        return local.with_arguments(is_causal=False)
    seen = min(piece.stop, keys)
    if piece.start == 0 and seen == piece.stop:
        return local.with_arguments(**_first(local, seen))
    return replace(local, op=_rows, arguments={**given, "start": piece.start})


def _first(local: LocalCall, seen: int) -> dict[str, torch.Tensor]:
    """Return the first keys and values, which are those seen."""
    return {name: local.arguments[name].narrow(-2, 0, seen) for name in ("key", "value")}


def _masked(local: LocalCall, piece: FactorSlice) -> LocalCall:
    """Return attention with an explicit mask; with dropout no kernel gives the weights' sums for a merge."""
    seen = min(piece.stop, local.arguments["key"].shape[-2])
    device = local.arguments["query"].device
    mask = torch.ones(piece.length, seen, dtype=torch.bool, device=device).tril(piece.start)
    return local.with_arguments(**_first(local, seen), attn_mask=mask, is_causal=False)


def _rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    enable_gqa: bool,
    start: int,
    **rest: object,
) -> torch.Tensor:
    """Return queries from `start` on; those after the last key see all keys."""
    keys = key.shape[-2]
    masked = min(query.shape[-2], keys - start)
    seen = start + masked
    first = query.narrow(-2, 0, masked)
    found = attend_last_rows(first, key.narrow(-2, 0, seen), value.narrow(-2, 0, seen), scale, enable_gqa)
    if masked == query.shape[-2]:
        return found
    others = query.narrow(-2, masked, query.shape[-2] - masked)
    later = torch.ops.aten.scaled_dot_product_attention.default(others, key, value, scale=scale, enable_gqa=enable_gqa)
    return torch.cat([found, later], -2)
