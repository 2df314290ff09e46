"""Causal attention over a folded sequence, on the rows of one shard.

A fold cuts a sequence of `n` positions in `k` pieces and reverses every odd one. A shard holds the positions `start` to
`stop` of every piece, so its rows are `k` stretches of the sequence, and all shards see equally many keys. Each stretch
attends to the keys before it, in whatever order they stand, and to its own square. The kernel of a device knows the
causal form, so no mask is made; the parts are merged by the logarithms of the sums of their weights. In a window the
keys are put in their order first.
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
    rows = _Rows(pieces, key.shape[-2] // pieces, start, query.shape[-2] // pieces, window, kernel)
    found: Tensor = _Folded.apply(q, k, v, scale, rows)  # type: ignore[no-untyped-call]
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


# -- the calls of a kernel ---------------------------------------------------------------------------------------------

# Stretch of a folded tensor: its first row, their number, and whether the order is reversed.
_Range = tuple[int, int, bool]


def _take(x: Tensor, ranges: tuple[_Range, ...]) -> Tensor:
    """Return some rows, ascending by position; one range in its own order is no copy."""
    found = [x.narrow(-2, begin, count) for begin, count, _ in ranges]
    found = [one.flip(-2) if flips else one for one, (_, _, flips) in zip(found, ranges, strict=True)]
    return found[0] if len(found) == 1 else torch.cat(found, -2)


def _add(into: Tensor, ranges: tuple[_Range, ...], more: Tensor) -> None:
    """Add values to the rows that `_take` returns."""
    at = 0
    for begin, count, flips in ranges:
        part = more.narrow(-2, at, count)
        into.narrow(-2, begin, count).add_(part.flip(-2) if flips else part)
        at += count


@dataclass(frozen=True)
class _KeyRange:
    """Keys that rows see: all of them, those up to each row, or those in a window up to each row."""

    ranges: tuple[_Range, ...]
    causal: bool = False
    window: int = 0


@dataclass(frozen=True)
class _RowCall:
    """Rows, and the ranges of keys that they see; the last key of a causal range is that of the last row."""

    rows: _Range
    parts: tuple[_KeyRange, ...]


@dataclass(frozen=True)
class _Rows:
    """Rows of a shard: `rows` positions from `start` on of each piece of `length`."""

    pieces: int
    length: int
    start: int
    rows: int
    window: int
    kernel: str

    def calls(self) -> Iterator[_RowCall]:
        """Yield the calls of a kernel, by piece."""
        # A kernel takes a stretch at once; written out, and beside a mask for a window, it is cut in blocks.
        block = max(self.rows, 1)
        if self.kernel == "written":
            block = BLOCK_ROWS
        elif self.window and self.kernel == "cpu":
            block = max(self.window, BLOCK_ROWS)
        for piece in range(self.pieces):
            flips = piece % 2 == 1
            before = self.length - self.start - self.rows if flips else self.start
            begin = piece * self.length + before
            for first in range(0, self.rows, block):
                count = min(block, self.rows - first)
                at = self.rows - first - count if flips else first
                parts = self._window(begin + first, count) if self.window else self._causal(piece, begin, first + count)
                yield _RowCall((piece * self.rows + at, count, flips), tuple(parts))

    def _causal(self, piece: int, begin: int, count: int) -> Iterator[_KeyRange]:
        """Yield the keys before a stretch, in any order, and those of its first `count` rows."""
        offset = piece * self.length
        if piece % 2:
            # Earlier positions of a reversed piece stand behind the stretch.
            after = offset + self.start + self.rows
            earlier = [(0, offset), (after, offset + self.length - after)]
        else:
            earlier = [(0, offset + self.start)]
        yield from (_KeyRange(((at, number, False),)) for at, number in earlier if number)
        yield _KeyRange(self._stored(begin, begin + count), causal=True)

    def _window(self, begin: int, count: int) -> Iterator[_KeyRange]:
        yield _KeyRange(self._stored(max(0, begin - self.window + 1), begin + count), True, self.window)

    def _stored(self, first: int, stop: int) -> tuple[_Range, ...]:
        """Return where the positions from `first` to `stop` stand."""
        found = []
        for piece in range(first // self.length, (stop - 1) // self.length + 1):
            offset = piece * self.length
            begin, end = max(first, offset) - offset, min(stop, offset + self.length) - offset
            at = self.length - end if piece % 2 else begin
            found.append((offset + at, end - begin, piece % 2 == 1))
        return tuple(found)


def _merged(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge the results of rows over several ranges of keys by the logarithms of their sums."""
    found, total = parts[0]
    for more, sums in parts[1:]:
        joined = torch.logaddexp(total, sums)
        found = found * (total - joined).exp()[..., None] + more * (sums - joined).exp()[..., None]
        total = joined
    return found, total


# -- all calls as one function -----------------------------------------------------------------------------------------


class _Folded(torch.autograd.Function):
    """Attention of all rows; it saves its operands as they came, folded, and copies no more keys than it has rows."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, shard: _Rows) -> Tensor:
        found: list[tuple[int, Tensor, Tensor]] = []
        for call in shard.calls():
            own, parts = _take(q, (call.rows,)), []
            for part in call.parts:
                parts.append(FORWARD[shard.kernel](own, _take(k, part.ranges), _take(v, part.ranges), part, scale))
            one, total = _merged(parts)
            at, _, flips = call.rows
            found.append((at, one.flip(-2), total.flip(-1)) if flips else (at, one, total))
        found.sort(key=lambda one: one[0])
        if not found:
            result, sums = q.new_zeros(*q.shape[:-1], v.shape[-1]), q.new_zeros(q.shape[:-1])
        else:
            result = torch.cat([one.to(q.dtype) for _, one, _ in found], -2)
            sums = torch.cat([total for _, _, total in found], -1)
        ctx.save_for_backward(q, k, v, result, sums)
        ctx.call = scale, shard
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative("attention over a folded sequence")
        q, k, v, result, sums = ctx.saved_tensors
        scale, shard = ctx.call
        of_q, of_k, of_v = (torch.zeros_like(in_sum_dtype(x)) for x in (q, k, v))
        for call in shard.calls():
            its, own, one = (_take(x, (call.rows,)) for x in (gradient, q, result))
            total = _take(sums[..., None], (call.rows,))[..., 0]
            for part in call.parts:
                seen = _take(k, part.ranges), _take(v, part.ranges)
                # With the merged result and sums, the gradients of each part are its share of those of the whole.
                made = BACKWARD[shard.kernel](its.contiguous(), own, *seen, one, total, part, scale)
                _add(of_q, (call.rows,), made[0])
                _add(of_k, part.ranges, made[1])
                _add(of_v, part.ranges, made[2])
        return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), None, None


# -- kernels: result and sums of one call, and its gradients -----------------------------------------------------------


def _hidden(rows: Tensor, keys: int, part: _KeyRange) -> Tensor:
    """Return the keys that each row does not see; the last row sees the last key."""
    count = rows.shape[-2]
    seen = torch.ones(count, keys, dtype=torch.bool, device=rows.device).tril(keys - count)
    return ~(seen.triu(keys - count - part.window + 1) if part.window else seen)


def _mask(rows: Tensor, keys: Tensor, part: _KeyRange) -> Tensor | None:
    if not part.window:
        return None
    zeros = torch.zeros(rows.shape[-2], keys.shape[-2], dtype=rows.dtype, device=rows.device)
    return zeros.masked_fill(_hidden(rows, keys.shape[-2], part), -torch.inf)


def _cpu(rows: Tensor, keys: Tensor, values: Tensor, part: _KeyRange, scale: float) -> tuple[Tensor, Tensor]:
    mask = _mask(rows, keys, part)
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
    mask = _mask(rows, keys, part)
    made: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        *(gradient, rows, keys, values, found, sums, 0.0, part.causal and mask is None), attn_mask=mask, scale=scale
    )
    return made


def _flash(rows: Tensor, keys: Tensor, values: Tensor, part: _KeyRange, scale: float) -> tuple[Tensor, Tensor]:
    # For this op causal means that the last row sees all keys. It has the heads inside of the rows.
    q, k, v = (x.transpose(1, 2) for x in (rows, keys, values))
    found, sums, *_ = aten._flash_attention_forward.default(
        *(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, part.causal, False), scale=scale, **_sides(part)
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
        *(given, q, k, v, out, sums.contiguous(), None, None, q.shape[1], k.shape[1], 0.0, part.causal, state, unused),
        scale=scale,
        **_sides(part),
    )
    return tuple(x.transpose(1, 2) for x in made)


def _sides(part: _KeyRange) -> dict[str, int]:
    return {"window_size_left": part.window - 1, "window_size_right": 0} if part.window else {}


def _scores(rows: Tensor, keys: Tensor, part: _KeyRange, scale: float) -> Tensor:
    scores = (in_sum_dtype(rows) * scale) @ in_sum_dtype(keys).transpose(-1, -2)
    return scores.masked_fill(_hidden(rows, keys.shape[-2], part), -torch.inf) if part.causal else scores


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
