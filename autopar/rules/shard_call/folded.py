"""Causal attention over a folded sequence, on the rows of one shard.

A fold cuts a sequence of `n` positions in `k` pieces and reverses every odd one. A shard holds the positions `start` to
`stop` of every piece, so its rows are `k` stretches of the sequence, and all shards see equally many keys. Each stretch
attends to the keys up to its last row, or to those in its window. No mask of the whole is made: a kernel knows the
causal form, and parts of one stretch are merged by the logarithms of the sums of their weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autopar.rules.shard_call.attention import (
    BLOCK_ROWS,
    GPU_ALIGNMENT,
    broadcast_lead,
    check_first_derivative,
    fused_kernel,
    in_sum_dtype,
    widened,
    with_heads,
)
from autopar.rules.shard_call.local_call import FactorSlice, LocalCall

__all__ = ["RowStretch", "attend_folded", "fold", "folded_rows", "stretches_of"]

aten = torch.ops.aten


def fold(x: Tensor, dim: int, pieces: int) -> Tensor:
    """Return the tensor with every odd one of the pieces of a dim reversed; applied twice it changes nothing."""
    dim %= x.dim()
    if pieces == 1:
        return x
    shape = (*x.shape[:dim], pieces // 2, 2, x.shape[dim] // pieces, *x.shape[dim + 1 :])
    even, odd = x.reshape(shape).unbind(dim + 1)
    return torch.stack([even, odd.flip(dim + 1)], dim + 1).flatten(dim, dim + 2)


@dataclass(frozen=True)
class RowStretch:
    """Rows of a shard that are neighbours in the sequence: the first of them, their number, its position."""

    row: int
    rows: int
    begin: int


def stretches_of(pieces: int, length: int, start: int, rows: int) -> tuple[RowStretch, ...]:
    """Return the stretches of a shard that holds `rows` positions from `start` on of each piece of this length."""
    found: list[RowStretch] = []
    for piece in range(pieces if rows else 0):
        begin = (piece + 1) * length - start - rows if piece % 2 else piece * length + start
        last = found[-1] if found else None
        if last is not None and last.begin + last.rows == begin:
            found[-1] = replace(last, rows=last.rows + rows)
        else:
            found.append(RowStretch(piece * rows, rows, begin))
    return tuple(found)


def attend_folded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    grouped: bool,
    pieces: int,
    window: int = 0,
    start: int = 0,
) -> Tensor:
    """Return causal attention of the folded queries of a shard over all folded keys.

    `query` is `... rows e`, `key` `... keys e`, `value` `... keys v`. The queries hold the positions from `start` on of
    each piece. A row sees the last `window` keys up to its own, or all of them if it is 0.
    """
    leads = [tuple(x.shape[:-2]) for x in (query, key, value)]
    if grouped:
        leads = [leads[0], *((*lead[:-1], leads[0][-1]) for lead in leads[1:])]
    shape = (*broadcast_lead(leads), query.shape[-2], value.shape[-1])
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    width = max(query.shape[-1], value.shape[-1])
    # A trace has no device yet; the CPU's kernel knows the shapes of its results there, too.
    device = "cpu" if query.device.type == "meta" else query.device.type
    kernel = fused_kernel(device, query.device.index, query.dtype, width)
    kernel = kernel if kernel in ("cpu", "flash") else "written"
    if kernel == "flash":
        width = -(-width // GPU_ALIGNMENT) * GPU_ALIGNMENT
    q, k, v = (widened(x, width) for x in with_heads(query, key, value, grouped, shares=kernel != "written"))
    stretches = stretches_of(pieces, key.shape[-2] // pieces, start, query.shape[-2] // pieces)
    found: Tensor = _Folded.apply(q, k, v, scale, pieces, window, stretches, kernel)  # type: ignore[no-untyped-call]
    return found[..., : value.shape[-1]].reshape(shape)


def folded_rows(local: LocalCall, piece: FactorSlice) -> LocalCall:
    """Run the rows of some positions of every piece."""
    return replace(local, op=_rows, arguments={**local.arguments, "start": piece.start})


def _rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    enable_gqa: bool,
    pieces: int,
    window: int,
    start: int,
) -> Tensor:
    return attend_folded(query, key, value, scale, enable_gqa, pieces, window, start)


# -- all stretches as one function -------------------------------------------------------------------------------------


class _Folded(torch.autograd.Function):
    """Attention of all stretches; it saves its operands as they came, folded, and no part of the keys twice."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        pieces: int,
        window: int,
        stretches: tuple[RowStretch, ...],
        kernel: str,
    ) -> Tensor:
        rows, keys, values = (fold(x, -2, pieces) for x in (q, k, v))
        found, sums = [], []
        for call in _calls(stretches, window, kernel):
            own = rows.narrow(-2, call.row, call.rows)
            parts = [FORWARD[kernel](own, *part.of(keys, values), part, scale) for part in call.parts]
            one, total = _merged(parts)
            found.append(one.to(q.dtype))
            sums.append(total)
        result = fold(torch.cat(found, -2), -2, pieces) if found else q.new_zeros(*q.shape[:-1], v.shape[-1])
        ctx.save_for_backward(q, k, v, result, *([torch.cat(sums, -1)] if sums else []))
        ctx.call = scale, pieces, window, stretches, kernel
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative("attention over a folded sequence")
        q, k, v, result, *sums = ctx.saved_tensors
        scale, pieces, window, stretches, kernel = ctx.call
        rows, keys, values, found, given = (fold(x, -2, pieces) for x in (q, k, v, result, gradient))
        # The CPU's kernel reads rows that are contiguous.
        given = given.contiguous()
        of_keys, of_values = (torch.zeros_like(in_sum_dtype(x)) for x in (keys, values))
        of_rows = []
        for call in _calls(stretches, window, kernel):
            own, one, its = (x.narrow(-2, call.row, call.rows) for x in (rows, found, given))
            total = sums[0].narrow(-1, call.row, call.rows)
            of_own: Tensor | None = None
            for part in call.parts:
                seen = part.of(keys, values)
                # With the merged result and sums, the gradients of each part are its share of those of the whole.
                made = BACKWARD[kernel](its, own, *seen, one, total, part, scale)
                of_own = made[0] if of_own is None else of_own + made[0]
                for into, more in zip(part.of(of_keys, of_values), made[1:], strict=True):
                    into.add_(more)
            assert of_own is not None, "each row sees a key"
            of_rows.append(of_own)
        of_q = fold(torch.cat(of_rows, -2).to(q.dtype), -2, pieces) if of_rows else torch.zeros_like(q)
        back = (fold(of.to(x.dtype), -2, pieces) for of, x in ((of_keys, k), (of_values, v)))
        return of_q, *back, None, None, None, None, None


@dataclass(frozen=True)
class _KeyRange:
    """Keys that rows see: all of them, those up to each row, or those in a window up to each row."""

    begin: int
    keys: int
    causal: bool = False
    window: int = 0

    def of(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return keys.narrow(-2, self.begin, self.keys), values.narrow(-2, self.begin, self.keys)


@dataclass(frozen=True)
class _RowCall:
    """Rows with the ranges of keys that they see; the last key of the last range is that of the last row."""

    row: int
    rows: int
    parts: tuple[_KeyRange, ...]


def _calls(stretches: tuple[RowStretch, ...], window: int, kernel: str) -> Iterator[_RowCall]:
    """Yield the calls of a kernel for some stretches, in the order of the rows."""
    for one in stretches:
        # A kernel with a window of its own takes a stretch at once; elsewhere a block of rows has a small mask.
        block = one.rows
        if kernel == "written":
            block = BLOCK_ROWS
        elif window and kernel == "cpu":
            block = max(window, BLOCK_ROWS)
        for begin in range(0, one.rows, block):
            rows, at = min(block, one.rows - begin), one.begin + begin
            first = max(0, at - window + 1) if window else 0
            if kernel != "cpu" or (window and at + rows > window):
                parts: tuple[_KeyRange, ...] = (_KeyRange(first, at + rows - first, True, window),)
            else:
                # This kernel knows the square of the rows themselves and, apart, the keys before them.
                before = (_KeyRange(0, at),) if at else ()
                parts = (*before, _KeyRange(at, rows, True))
            yield _RowCall(one.row + begin, rows, parts)


def _merged(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge the results of rows over several ranges of keys by the logarithms of their sums."""
    found, total = parts[0]
    for more, sums in parts[1:]:
        joined = torch.logaddexp(total, sums)
        found = found * (total - joined).exp()[..., None] + more * (sums - joined).exp()[..., None]
        total = joined
    return found, total


# -- kernels: result and sums of one call, and its gradients -----------------------------------------------------------


def _hidden(rows: Tensor, part: _KeyRange) -> Tensor:
    """Return the keys that each row does not see; the last row sees the last key."""
    count = rows.shape[-2]
    seen = torch.ones(count, part.keys, dtype=torch.bool, device=rows.device).tril(part.keys - count)
    return ~(seen.triu(part.keys - count - part.window + 1) if part.window else seen)


def _mask(rows: Tensor, part: _KeyRange) -> Tensor | None:
    if not part.window:
        return None
    zeros = torch.zeros(rows.shape[-2], part.keys, dtype=rows.dtype, device=rows.device)
    return zeros.masked_fill(_hidden(rows, part), -torch.inf)


def _cpu(rows: Tensor, keys: Tensor, values: Tensor, part: _KeyRange, scale: float) -> tuple[Tensor, Tensor]:
    mask = _mask(rows, part)
    found: tuple[Tensor, Tensor] = aten._scaled_dot_product_flash_attention_for_cpu.default(
        rows, keys, values, 0.0, part.causal and mask is None, attn_mask=mask, scale=scale
    )
    return found


def _cpu_backward(
    gradient: Tensor,
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    found: Tensor,
    sums: Tensor,
    part: _KeyRange,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    mask = _mask(rows, part)
    made: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        *(gradient, rows, keys, values, found, sums, 0.0, part.causal and mask is None), attn_mask=mask, scale=scale
    )
    return made


def _flash(rows: Tensor, keys: Tensor, values: Tensor, part: _KeyRange, scale: float) -> tuple[Tensor, Tensor]:
    # For this op causal means that the last row sees all keys. It has the heads inside of the rows.
    q, k, v = (x.transpose(1, 2) for x in (rows, keys, values))
    found, sums, *_ = aten._flash_attention_forward.default(
        *(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, True, False), scale=scale, **_sides(part)
    )
    return found.transpose(1, 2), sums


def _flash_backward(
    gradient: Tensor,
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    found: Tensor,
    sums: Tensor,
    part: _KeyRange,
    scale: float,
) -> tuple[Tensor, ...]:
    given, q, k, v, out = (x.transpose(1, 2) for x in (gradient, rows, keys, values, found))
    # Without dropout the state of the generator is not read.
    state = torch.empty(2, dtype=torch.uint64, device=rows.device)
    unused = torch.empty((), dtype=torch.uint64, device=rows.device)
    made = aten._flash_attention_backward.default(
        *(given, q, k, v, out, sums.contiguous(), None, None, q.shape[1], k.shape[1], 0.0, True, state, unused),
        scale=scale,
        **_sides(part),
    )
    return tuple(x.transpose(1, 2) for x in made)


def _sides(part: _KeyRange) -> dict[str, int]:
    return {"window_size_left": part.window - 1, "window_size_right": 0} if part.window else {}


def _scores(rows: Tensor, keys: Tensor, part: _KeyRange, scale: float) -> Tensor:
    scores = (in_sum_dtype(rows) * scale) @ in_sum_dtype(keys).transpose(-1, -2)
    return scores.masked_fill(_hidden(rows, part), -torch.inf)


def _written(rows: Tensor, keys: Tensor, values: Tensor, part: _KeyRange, scale: float) -> tuple[Tensor, Tensor]:
    scores = _scores(rows, keys, part, scale)
    return scores.softmax(-1) @ in_sum_dtype(values), scores.logsumexp(-1)


def _written_backward(
    gradient: Tensor,
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    found: Tensor,
    sums: Tensor,
    part: _KeyRange,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    given, result = in_sum_dtype(gradient), in_sum_dtype(found)
    weights = (_scores(rows, keys, part, scale) - sums[..., None]).exp()
    moved = given @ in_sum_dtype(values).transpose(-1, -2) - (given * result).sum(-1, keepdim=True)
    of_scores = weights * moved * scale
    of_keys = of_scores.transpose(-1, -2) @ in_sum_dtype(rows)
    return of_scores @ in_sum_dtype(keys), of_keys, weights.transpose(-1, -2) @ given


FORWARD: dict[str, Any] = {"cpu": _cpu, "flash": _flash, "written": _written}
BACKWARD: dict[str, Any] = {"cpu": _cpu_backward, "flash": _flash_backward, "written": _written_backward}
