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
    aligned,
    check_first_derivative,
    fused_kernel,
    in_sum_dtype,
    lead_of,
    widened,
    with_heads,
)
from autopar.rules.shard_call.attention_kernels import (
    BACKWARD,
    FORWARD,
    KeyRange,
    StoredRange,
    add_rows,
    merged,
    prefers_cudnn,
    take_rows,
)
from autopar.rules.shard_call.local_call import FactorSlice, LocalCall

__all__ = ["RowStretch", "attend_folded", "fold", "folded_rows", "kernel_for", "stretches_of"]


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
    shape = (*lead_of(query, key, value, grouped), query.shape[-2], value.shape[-1])
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    width = max(query.shape[-1], value.shape[-1])
    kernel = kernel_for(query, width)
    if kernel in ("flash", "cudnn"):
        width = aligned(width)
    q, k, v = (widened(x, width) for x in with_heads(query, key, value, grouped, shares=kernel != "written"))
    rows = _Rows(pieces, key.shape[-2] // pieces, start, query.shape[-2] // pieces, window, kernel)
    found: Tensor = _Folded.apply(q, k, v, scale, rows)  # type: ignore[no-untyped-call]
    return found[..., : value.shape[-1]].reshape(shape)


def kernel_for(query: Tensor, width: int) -> str:
    """Return the kernel of parts of attention: `cpu`, `flash`, `cudnn`; `written` where none gives sums of weights."""
    # A trace has no device yet; the CPU's kernel knows the shapes of its results there, too.
    device = "cpu" if query.device.type == "meta" else query.device.type
    kernel = fused_kernel(device, query.device.index, query.dtype, width)
    if kernel == "flash" and prefers_cudnn(query.device.index, query.dtype, aligned(width)):
        return "cudnn"
    return kernel if kernel in ("cpu", "flash") else "written"


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


@dataclass(frozen=True)
class _RowCall:
    """Rows, and the ranges of keys that they see; the last key of a causal range is that of the last row."""

    rows: StoredRange
    parts: tuple[KeyRange, ...]


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

    def _causal(self, piece: int, begin: int, count: int) -> Iterator[KeyRange]:
        """Yield the keys before a stretch, in any order, and those of its first `count` rows."""
        offset = piece * self.length
        if piece % 2:
            # Earlier positions of a reversed piece stand behind the stretch.
            after = offset + self.start + self.rows
            earlier = [(0, offset), (after, offset + self.length - after)]
        else:
            earlier = [(0, offset + self.start)]
        yield from (KeyRange(((at, number, False),)) for at, number in earlier if number)
        yield KeyRange(self._stored(begin, begin + count), causal=True)

    def _window(self, begin: int, count: int) -> Iterator[KeyRange]:
        yield KeyRange(self._stored(max(0, begin - self.window + 1), begin + count), True, self.window)

    def _stored(self, first: int, stop: int) -> tuple[StoredRange, ...]:
        """Return where the positions from `first` to `stop` stand."""
        found = []
        for piece in range(first // self.length, (stop - 1) // self.length + 1):
            offset = piece * self.length
            begin, end = max(first, offset) - offset, min(stop, offset + self.length) - offset
            at = self.length - end if piece % 2 else begin
            found.append((offset + at, end - begin, piece % 2 == 1))
        return tuple(found)


# -- all calls as one function -----------------------------------------------------------------------------------------


class _Folded(torch.autograd.Function):
    """Attention of all rows; it saves its operands as they came, folded, and copies no more keys than it has rows."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, shard: _Rows) -> Tensor:
        found: list[tuple[int, Tensor, Tensor]] = []
        for call in shard.calls():
            own, parts = take_rows(q, (call.rows,)), []
            for part in call.parts:
                parts.append(
                    FORWARD[shard.kernel](own, take_rows(k, part.ranges), take_rows(v, part.ranges), part, scale)
                )
            one, total = merged(parts)
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
            its, own, one = (take_rows(x, (call.rows,)) for x in (gradient, q, result))
            total = take_rows(sums[..., None], (call.rows,))[..., 0]
            for part in call.parts:
                seen = take_rows(k, part.ranges), take_rows(v, part.ranges)
                # With the merged result and sums, the gradients of each part are its share of those of the whole.
                made = BACKWARD[shard.kernel](its.contiguous(), own, *seen, one, total, part, scale)
                add_rows(of_q, (call.rows,), made[0])
                add_rows(of_k, part.ranges, made[1])
                add_rows(of_v, part.ranges, made[2])
        return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), None, None
