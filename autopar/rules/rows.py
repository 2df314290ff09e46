"""Lowerings of ops whose rows know where they stand: causal attention, and products grouped by expert."""

from __future__ import annotations

from dataclasses import replace

import torch

from autopar.rules.local import Local, Piece

__all__ = ["causal_rows", "grouped_experts", "grouped_rows"]


def causal_rows(local: Local, piece: Piece) -> Local:
    """Queries `start` to `stop` of causal attention see no key after `stop`: drop those, and mask the rest."""
    if not local.arguments["is_causal"]:
        return local
    query, key, value = (local.arguments[name] for name in ("query", "key", "value"))
    seen = min(piece.stop, key.shape[-2])
    causal = torch.ones(piece.length, seen, dtype=torch.bool, device=query.device).tril(piece.start)
    return local.with_arguments(
        key=key.narrow(-2, 0, seen), value=value.narrow(-2, 0, seen), attn_mask=causal, is_causal=False
    )


def grouped_rows(local: Local, piece: Piece) -> Local:
    """Some of the rows: the groups end where they did, counted from the first of them."""
    return local.with_arguments(offs=(local.arguments["offs"] - piece.start).clamp(0, piece.length))


def grouped_experts(local: Local, piece: Piece) -> Local:
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
