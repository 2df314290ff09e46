"""Attention of documents that do not see each other, on the rows of one shard.

A kernel runs once for the rows that a shard has of a document, in each of its stretches of the sequence: on the keys of
the document before them, and on their own square. No mask is made, and no score between documents is computed. Where
the documents begin is read by the host, once for all layers of a call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

from autopar.rules.shard_call.attention import (
    BLOCK_ROWS,
    aligned,
    check_first_derivative,
    in_sum_dtype,
    widened,
    with_heads,
)
from autopar.rules.shard_call.attention_kernels import BACKWARD, FORWARD, KeyRange, merged
from autopar.rules.shard_call.document_ranges import (
    ENDS,
    DocumentMask,
    RangeCall,
    calls_of_one,
    document_table,
    range_calls,
    several_ranges,
)
from autopar.rules.shard_call.folded import fold, kernel_for, stretches_of
from autopar.rules.shard_call.local_call import FactorSlice, LocalCall

__all__ = ["attend_documents", "document_rows", "ranges_of", "read_ends"]

_LIBRARY: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_OPTIONS = "float scale, str kernel, int pieces, int start, str kinds, bool causal, int window"
_LIBRARY.define(f"document_rows(Tensor q, Tensor k, Tensor v, Tensor table, {_OPTIONS}) -> (Tensor, Tensor)")
_LIBRARY.define(
    "document_rows_backward(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor table, Tensor result, Tensor sums, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor)"
)


def ranges_of(numbers: Tensor, kinds: str, causal: bool, window: int) -> Tensor:
    """Return the table of the keys that each row sees, from the numbers of each position."""
    return document_table(numbers, DocumentMask(tuple(kinds.split()), causal, window))


def attend_documents(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    scale: float | None,
    grouped: bool,
    pieces: int,
    kinds: str,
    causal: bool,
    window: int,
    start: int = 0,
) -> Tensor:
    """Return the attention of the queries of a shard over the keys that a table gives them.

    `query` is `batch heads rows e`, `key` `batch heads keys e`, `value` `batch heads keys v`. The queries hold the
    positions from `start` on of each piece of a fold; the table has the plain order.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    width = max(query.shape[-1], value.shape[-1])
    kernel = kernel_for(query, width)
    if kernel in ("flash", "cudnn"):
        width = aligned(width)
    q, k, v = (widened(x, width) for x in with_heads(query, key, value, grouped, shares=True))
    options = scale, kernel, pieces, start, kinds, causal, window
    # A run without data measures memory, inside of the calls as well.
    is_measured = isinstance(table, FakeTensor) and all(type(size) is int for x in (q, k) for size in x.shape)
    run: Any = _Measured.apply if is_measured else torch.ops.autopar.document_rows.default
    found: Tensor = run(q, k, v, table, *options)[0]
    return found[..., : value.shape[-1]]


def document_rows(local: LocalCall, piece: FactorSlice) -> LocalCall:
    """Run the rows of some positions of every piece."""
    return replace(local, op=_rows, arguments={**local.arguments, "start": piece.start})


def _rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    scale: float | None,
    enable_gqa: bool,
    start: int,
    **options: Any,
) -> Tensor:
    return attend_documents(query, key, value, table, scale, enable_gqa, start=start, **options)


# -- calls -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _HostTable:
    """Ends of the ranges on the host at a version of a table, and the calls that were made of them."""

    version: int
    ends: Tensor
    # By samples, rows, kernel and dtype: the kernel of each call, and the call.
    calls: dict[Any, tuple[tuple[str, RangeCall], ...]] = field(default_factory=dict)


# The layers of a model share the table of a call, and both directions its calls.
_ON_HOST: Any = WeakIdKeyDictionary()


def read_ends(table: Tensor) -> Tensor:
    """Return the ends of the ranges of keys on the host, for which the host waits."""
    return table[..., :ENDS].cpu()


def _on_host(table: Tensor) -> _HostTable:
    found: _HostTable | None = _ON_HOST.get(table)
    # Tensors of inference mode have no version; the table is made in one op.
    version = -1 if table.is_inference() else table._version
    if found is None or found.version != version:
        found = _ON_HOST[table] = _HostTable(version, read_ends(table))
    return found


@dataclass(frozen=True)
class _ShardRows:
    """Rows of a shard, with the kernel that works on them."""

    scale: float
    kernel: str
    pieces: int
    start: int
    mask: DocumentMask

    def calls(self, q: Tensor, keys: int, table: Tensor) -> Iterator[tuple[str, RangeCall]]:
        """Yield the kernel and its calls."""
        if table.shape[1] != keys:
            raise ValueError(f"a table of {table.shape[1]} positions for {keys} keys")
        if not q.numel():
            return
        rows = q.shape[-2] // self.pieces
        stretches = stretches_of(self.pieces, keys // self.pieces, self.start, rows)
        if isinstance(table, FakeTensor):
            yield from ((self.kernel, one) for one in calls_of_one(q.shape[0], stretches, self.kernel, self.mask))
            return
        known = _on_host(table)
        ends, key = known.ends.expand(q.shape[0], -1, -1), (q.shape[0], stretches, self.kernel, q.dtype)
        if key not in known.calls:
            calls = range_calls(ends, stretches, self.kernel)
            known.calls[key] = tuple(
                self._masked(one, q) if one.ends is not None else (self.kernel, one) for one in calls
            )
        yield from known.calls[key]
        numbers = table[..., ENDS:].expand(q.shape[0], -1, -1)
        for sample in several_ranges(ends):
            for one in stretches:
                for first in range(0, one.rows, BLOCK_ROWS):
                    count, begin = min(BLOCK_ROWS, one.rows - first), one.begin + first
                    own = numbers[sample]
                    hidden = ~self.mask.visible(own[begin : begin + count], own, begin)
                    part = KeyRange(((0, keys, False),), bias=_added(hidden, q))
                    yield "written", RangeCall(sample, 1, one.row + first, count, (part,))

    def _masked(self, call: RangeCall, q: Tensor) -> tuple[str, RangeCall]:
        """Return a call of several runs, with the kernel that takes its mask."""
        assert call.ends is not None, "several runs share a call"
        (part,) = call.parts
        first, stop = call.ends.to(q.device)[..., None].unbind(1)
        key = torch.arange(part.ranges[0][1], device=q.device)
        part = replace(part, bias=_added((key < first) | (key >= stop), q))
        return self.kernel if self.kernel == "cpu" else "written", replace(call, parts=(part,))


def _added(hidden: Tensor, q: Tensor) -> Tensor:
    """Return a mask as numbers that are added to scores."""
    zeros = torch.zeros(hidden.shape, dtype=in_sum_dtype(q).dtype, device=q.device)
    return zeros.masked_fill_(hidden, -torch.inf)


def _taken(x: Tensor, call: RangeCall, first: int, count: int) -> Tensor:
    return x[call.sample : call.sample + call.samples, :, first : first + count]


def _with_groups(kernel: str, q: Tensor, x: Tensor) -> Tensor:
    """Return keys or values with the heads that a kernel takes."""
    groups = q.shape[1] // x.shape[1]
    return x.repeat_interleave(groups, 1) if kernel == "written" and groups > 1 else x


def _without_groups(gradient: Tensor, heads: int) -> Tensor:
    if gradient.shape[1] == heads:
        return gradient
    return gradient.reshape(gradient.shape[0], heads, -1, *gradient.shape[2:]).sum(2)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, scale: float, kernel: str, pieces: int, start: int, *mask: Any
) -> tuple[Tensor, Tensor]:
    shard = _ShardRows(scale, kernel, pieces, start, _mask(*mask))
    # Reversed pieces have their order inside.
    q, k, v = (fold(x, -2, pieces) for x in (q, k, v))
    result = q.new_zeros(*q.shape[:-1], v.shape[-1])
    sums = q.new_full(q.shape[:-1], -torch.inf, dtype=in_sum_dtype(q).dtype)
    for name, call in shard.calls(q, k.shape[-2], table):
        own, parts = _taken(q, call, call.row, call.rows), []
        for part in call.parts:
            ((at, count, _),) = part.ranges
            seen = (_with_groups(name, q, _taken(x, call, at, count)) for x in (k, v))
            parts.append(FORWARD[name](own, *seen, part, scale))
        one, total = merged(parts)
        _taken(result, call, call.row, call.rows).copy_(one)
        _taken(sums[..., None], call, call.row, call.rows).copy_(total[..., None])
    return fold(result, -2, pieces), fold(sums, -1, pieces)


def _backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    result: Tensor,
    sums: Tensor,
    scale: float,
    kernel: str,
    pieces: int,
    start: int,
    *mask: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    shard = _ShardRows(scale, kernel, pieces, start, _mask(*mask))
    gradient, q, k, v, result = (fold(x, -2, pieces) for x in (gradient, q, k, v, result))
    sums = fold(sums, -1, pieces)[..., None]
    of_q, of_k, of_v = (torch.zeros_like(in_sum_dtype(x)) for x in (q, k, v))
    for name, call in shard.calls(q, k.shape[-2], table):
        its, own, one, total = (_taken(x, call, call.row, call.rows) for x in (gradient, q, result, sums))
        for part in call.parts:
            ((at, count, _),) = part.ranges
            seen = [_with_groups(name, q, _taken(x, call, at, count)) for x in (k, v)]
            # With the merged result and sums, the gradients of each part are its share of those of the whole.
            made = BACKWARD[name](its.contiguous(), own, *seen, one, total[..., 0], part, scale)
            _taken(of_q, call, call.row, call.rows).add_(made[0])
            for into, more in zip((of_k, of_v), made[1:], strict=True):
                _taken(into, call, at, count).add_(_without_groups(more, into.shape[1]))
    return tuple(fold(x.to(like.dtype), -2, pieces) for x, like in ((of_q, q), (of_k, k), (of_v, v)))  # type: ignore[return-value]


def _mask(kinds: str, causal: bool, window: int) -> DocumentMask:
    return DocumentMask(tuple(kinds.split()), causal, window)


# -- as an op: the compiler does not look into it, since its calls depend on data --------------------------------------


def _result_like(q: Tensor, k: Tensor, v: Tensor, table: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=in_sum_dtype(q).dtype)


def _gradients_like(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4], *output)
    ctx.options = inputs[4:]


def _gradients(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
    check_first_derivative("attention of documents")
    made = torch.ops.autopar.document_rows_backward.default(gradient, *ctx.saved_tensors, *ctx.options)
    return (*made, None, *(None for _ in ctx.options))


class _Measured(torch.autograd.Function):
    """The same function, into which a count of live bytes looks."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        result, sums = _forward(*inputs)
        _save(ctx, inputs, (result, sums))
        ctx.mark_non_differentiable(sums)
        return result, sums

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
        made = _backward(gradient, *ctx.saved_tensors, *ctx.options)
        return (*made, None, *(None for _ in ctx.options))


_LIBRARY.impl("document_rows", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("document_rows_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("autopar::document_rows", _result_like, lib=_LIBRARY)
torch.library.register_fake("autopar::document_rows_backward", _gradients_like, lib=_LIBRARY)
torch.library.register_autograd("autopar::document_rows", _gradients, setup_context=_save, lib=_LIBRARY)
