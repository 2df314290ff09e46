"""Lowerings of ops whose rows know where they stand: causal attention, and products grouped by expert."""

from __future__ import annotations

from dataclasses import replace

import torch

from autopar.rules.shard_call.causal_rows import attend_last_rows
from autopar.rules.shard_call.local_call import FactorSlice, LocalCall

__all__ = ["causal_rows", "grouped_experts", "grouped_rows"]


def causal_rows(local: LocalCall, piece: FactorSlice) -> LocalCall:
    """Queries `start` to `stop` of causal attention: query `i` sees keys `0` to `i`, of those that there are."""
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
    """The keys and values that are seen, the first ones."""
    return {name: local.arguments[name].narrow(-2, 0, seen) for name in ("key", "value")}


def _masked(local: LocalCall, piece: FactorSlice) -> LocalCall:
    """With dropout no kernel gives the sums of the weights that are to be merged."""
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
    """Queries from `start` on; those after the last key see all keys."""
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


def grouped_rows(local: LocalCall, piece: FactorSlice) -> LocalCall:
    """Some of the rows: the groups end where they did, counted from the first of them."""
    return local.with_arguments(offs=(local.arguments["offs"] - piece.start).clamp(0, piece.length))


def grouped_experts(local: LocalCall, piece: FactorSlice) -> LocalCall:
    """Some of the experts: the rows of the others count as theirs, as zeros, whose product is zero.

    So every size is known beforehand, and neither rows nor weights are copied into another order.
    """
    rows, ends = next(iter(local.arguments)), local.arguments["offs"]
    total = local.arguments[rows]
    position = torch.arange(total.shape[0], device=ends.device)
    own = position < ends[piece.stop - 1]
    if piece.start:
        own = own & (position >= ends[piece.start - 1])
    kept = ends[piece.start : piece.stop].clone()
    kept[-1] = total.shape[0]
    return replace(local, arguments={**local.arguments, rows: torch.where(own[:, None], total, 0), "offs": kept})
