"""Ring attention on one shard: rows stay, keys and values pass from shard to shard.

Each rank begins with its own keys and values, and in each hop sends those that it has to the next rank. The next ones
are on their way while a kernel works on these. Results are merged by the logarithms of the sums of their weights. In
the backward keys and values pass once more, and their gradients follow them: those of the own keys stay at home, all
others arrive there with the last hop. At most the keys and values of two ranks are in memory beside the own ones: those
that are read and sent, and those that arrive. In the backward as many gradients are sent and arrive beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from autopar.rules.shard_call.attention import (
    BLOCK_ROWS,
    aligned,
    check_first_derivative,
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
    finite_sums,
    take_rows,
)
from autopar.rules.shard_call.folded import kernel_for
from autopar.rules.shard_call.key_blocks import BlockCall, Stretches, visible

__all__ = ["KeyRing", "RingShard", "attend_ring"]


class KeyRing(Protocol):
    """Ranks that pass a message to the next one and get one from the one before."""

    @property
    def place(self) -> int: ...

    @property
    def most_places(self) -> int | None:
        """Places that a simulation takes, since all hops but the first and the last are alike; None for all."""

    def begin(self, message: Tensor, received: int) -> Tensor:
        """Begin to send a flat message, and to receive one of `received` elements; it may be read after `end`."""

    def end(self, message: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class RingShard:
    """Positions of the rows of a shard, and of the keys of each, by its place in the ring."""

    rows: Stretches
    keys: tuple[Stretches, ...]
    causal: bool
    window: int
    # Columns of a mask for the keys of each place: first column and number of them.
    columns: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def total(self) -> int:
        """Return the keys of all places."""
        return sum(count for place in self.columns for _, count in place)

    def key_count(self, place: int) -> int:
        return sum(one.count for one in self.keys[place % len(self.keys)])


def attend_ring(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    grouped: bool,
    shard: RingShard,
    ring: KeyRing,
) -> Tensor:
    """Return the attention of the rows of a shard over the keys of all shards.

    `query` is `... rows e`, `key` `... keys e`, `value` `... keys v`, `mask` `... rows` by the keys of all shards.
    """
    lead = lead_of(query, key, value, grouped)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    width = max(query.shape[-1], value.shape[-1])
    kernel = "written" if mask is not None else kernel_for(query, width)
    if kernel in ("flash", "cudnn"):
        width = aligned(width)
    q, k, v = with_heads(query, key, value, grouped, shares=True)
    bias = None if mask is None else _added(mask, (*lead, query.shape[-2], shard.total), q)
    pass_ = _Pass(shard, kernel, scale, width)
    found: Tensor = _Ring.apply(widened(q, width), k, v, bias, pass_, ring)  # type: ignore[no-untyped-call]
    return found[..., : value.shape[-1]].reshape(*lead, query.shape[-2], value.shape[-1])


def _added(mask: Tensor, shape: tuple[int, ...], q: Tensor) -> Tensor:
    """Return a mask as numbers that are added to the scores, with the leading dims of the queries."""
    if mask.dtype is torch.bool:
        mask = torch.zeros(mask.shape, dtype=in_sum_dtype(q).dtype, device=mask.device).masked_fill(~mask, -torch.inf)
    mask = mask if mask.dim() >= 2 else mask[None]
    mask = mask.expand(*mask.shape[:-2], *shape[-2:])
    heads = mask.shape[-3] if mask.dim() > 2 else 1
    if mask.dim() > 3 and prod(mask.shape[:-3]) > 1:
        batch = mask.expand(*shape[:-3], heads, *shape[-2:]).reshape(-1, heads, *shape[-2:])
    else:
        batch = mask.reshape(1, heads, *shape[-2:])
    return batch


# -- hops --------------------------------------------------------------------------------------------------------------


def _opened(message: Tensor, k: Tensor, v: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values in a message, or their gradients."""
    shapes = [(*x.shape[:-2], count, x.shape[-1]) for x in (k, v)]
    sizes = [prod(shape) for shape in shapes]
    first, second = message.narrow(0, 0, sizes[0]), message.narrow(0, sizes[0], sizes[1])
    return first.reshape(shapes[0]), second.reshape(shapes[1])


def _numel(k: Tensor, v: Tensor, count: int) -> int:
    return sum(prod((*x.shape[:-2], count, x.shape[-1])) for x in (k, v))


class _Hops:
    """Keys and values of one place at a time, the own ones first; the next are on their way while these are read."""

    def __init__(self, shard: RingShard, k: Tensor, v: Tensor, ring: KeyRing) -> None:
        self.shard, self.ring, self.count = shard, ring, len(shard.keys)
        self.own = self.keys, self.values = k, v
        self.place = ring.place
        self.message: Tensor | None = None
        self.begun: Tensor | None = None

    def begin(self, hop: int) -> None:
        """Begin to pass the keys on, and to receive those of the place before."""
        if hop + 1 == self.count:
            return
        if self.message is None:
            self.message = torch.cat([self.keys.reshape(-1), self.values.reshape(-1)])
        expected = _numel(*self.own, self.shard.key_count(self.place - 1))
        self.begun = self.ring.begin(self.message, expected)

    def end(self) -> None:
        """Take the keys that were received in place of those that were read."""
        if self.begun is None:
            return
        self.place = (self.place - 1) % self.count
        self.message = self.ring.end(self.begun)
        self.keys, self.values = _opened(self.message, *self.own, self.shard.key_count(self.place))
        self.begun = None


class _Gradients:
    """Gradients of keys and values that pass from rank to rank behind their keys; each rank adds its own."""

    def __init__(self, ring: KeyRing, like: Tensor) -> None:
        self.ring, self.like = ring, like
        self.begun: Tensor | None = None

    def begin(self, message: Tensor, received: int) -> None:
        """Begin to send the gradients of keys, and to receive those of the keys of the place before."""
        self.begun = self.ring.begin(message, received)

    def end(self, numel: int) -> Tensor:
        """Return the gradients that arrive, or zeros where no rank had these keys before."""
        if self.begun is None:
            return self.like.new_zeros(numel)
        begun, self.begun = self.begun, None
        return self.ring.end(begun)


# -- one block of keys -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pass:
    """Rows of a shard with the kernel that works on them."""

    shard: RingShard
    kernel: str
    scale: float
    width: int

    def calls(self, place: int) -> tuple[BlockCall, ...]:
        shard = self.shard
        # A kernel takes a stretch at once; written out, and beside a mask for a window, it is cut in blocks.
        block = max(1, sum(one.count for one in shard.rows))
        if self.kernel == "written":
            block = BLOCK_ROWS
        elif shard.window and self.kernel == "cpu":
            block = max(shard.window, BLOCK_ROWS)
        return visible(shard.rows, shard.keys[place], shard.causal, shard.window, block)

    def masked(self, place: int, bias: Tensor | None) -> Iterator[tuple[BlockCall, KeyRange]]:
        """Yield the calls for the keys of a place, each with its part of the mask."""
        block = None
        if bias is not None:
            columns = [bias.narrow(-1, first, count) for first, count in self.shard.columns[place]]
            block = torch.cat(columns, -1) if len(columns) > 1 else columns[0]
        for call in self.calls(place):
            part = call.keys
            if block is not None:
                own = take_rows(block, call.rows)
                part = replace(part, bias=take_rows(own.transpose(-1, -2), part.ranges).transpose(-1, -2))
            yield call, part

    def attend(self, q: Tensor, hops: _Hops, bias: Tensor | None, found: Tensor, sums: Tensor) -> None:
        """Merge the results over the keys of one place into those of earlier ones."""
        keys, values = self.block(q, hops.keys, hops.values)
        for call, part in self.masked(hops.place, bias):
            seen = take_rows(keys, part.ranges), take_rows(values, part.ranges)
            _merge(found, sums, call.rows, *FORWARD[self.kernel](take_rows(q, call.rows), *seen, part, self.scale))

    def gradients(
        self,
        saved: tuple[Tensor, ...],
        hops: _Hops,
        bias: Tensor | None,
        of_q: Tensor,
        arriving: _Gradients,
    ) -> Tensor:
        """Add the gradients of the rows, and return those of the keys and values of one place, as one message."""
        gradient, q, result, sums = saved
        keys, values = self.block(q, hops.keys, hops.values)
        calls = list(self.masked(hops.place, bias))
        numel = _numel(hops.keys, hops.values, hops.keys.shape[-2])
        # The gradients of one call are added where those of other ranks arrive; those of several first to each other.
        made = None if len(calls) <= 1 else of_q.new_zeros(numel)
        for call, part in calls:
            its, own, one = (take_rows(x, call.rows) for x in (gradient, q, result))
            total = take_rows(sums[..., None], call.rows)[..., 0]
            seen = take_rows(keys, part.ranges), take_rows(values, part.ranges)
            # With the merged result and sums, the gradients of each part are its share of those of the whole.
            back = BACKWARD[self.kernel](its.contiguous(), own, *seen, one, total, part, self.scale)
            add_rows(of_q, call.rows, back[0])
            made = arriving.end(numel) if made is None else made
            of_keys, of_values = _opened(made, hops.keys, hops.values, hops.keys.shape[-2])
            add_rows(of_keys, part.ranges, self.unblocked(back[1], hops.keys))
            add_rows(of_values, part.ranges, self.unblocked(back[2], hops.values))
        if made is None or len(calls) > 1:
            received = arriving.end(numel)
            made = received if made is None else received.add_(made)
        return made

    def block(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values as the kernel takes them."""
        found = [widened(x, self.width) for x in (k, v)]
        groups = q.shape[1] // k.shape[1]
        if self.kernel == "written" and groups > 1:
            found = [x.repeat_interleave(groups, 1) for x in found]
        return found[0], found[1]

    def unblocked(self, gradient: Tensor, given: Tensor) -> Tensor:
        """Return the gradient of keys or values from that of what the kernel takes."""
        if gradient.shape[1] != given.shape[1]:
            gradient = gradient.reshape(gradient.shape[0], given.shape[1], -1, *gradient.shape[2:]).sum(2)
        return gradient[..., : given.shape[-1]]


def _merge(into: Tensor, total: Tensor, ranges: tuple[StoredRange, ...], found: Tensor, sums: Tensor) -> None:
    """Merge the results of some rows with those of earlier keys, in place."""
    at = 0
    for begin, count, flips in ranges:
        more, added = found.narrow(-2, at, count), sums.narrow(-1, at, count)
        if flips:
            more, added = more.flip(-2), added.flip(-1)
        own, known = into.narrow(-2, begin, count), total.narrow(-1, begin, count)
        joined = torch.logaddexp(known, added)
        safe = finite_sums(joined)
        own.mul_((known - safe).exp()[..., None]).add_(more * (added - safe).exp()[..., None])
        known.copy_(joined)
        at += count


# -- the ring ----------------------------------------------------------------------------------------------------------


class _Ring(torch.autograd.Function):
    """Attention of all rows; it saves its operands, its result and the sums, and passes keys again in the backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, given: _Pass, ring: KeyRing) -> Tensor:
        wide = in_sum_dtype(q)
        found = wide.new_zeros(*q.shape[:-1], given.width)
        sums = wide.new_full(q.shape[:-1], -torch.inf)
        hops = _Hops(given.shard, k, v, ring)
        for hop in range(hops.count):
            hops.begin(hop)
            given.attend(q, hops, bias, found, sums)
            hops.end()
        result = found.to(q.dtype)
        ctx.save_for_backward(q, k, v, bias, result, sums)
        ctx.call = given, ring
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative("ring attention")
        q, k, v, bias, result, sums = ctx.saved_tensors
        given, ring = ctx.call
        of_q = torch.zeros_like(in_sum_dtype(q))
        hops, arriving = _Hops(given.shard, k, v, ring), _Gradients(ring, k)
        home = None
        for hop in range(hops.count):
            hops.begin(hop)
            made = given.gradients((gradient, q, result, sums), hops, bias, of_q, arriving)
            if home is None:
                home = made
            else:
                # They go where their keys go; after the last hop that is their home.
                arriving.begin(made, _numel(k, v, given.shard.key_count(hops.place - 1)))
            hops.end()
        assert home is not None, "the first block is the own one"
        if hops.count > 1:
            home += arriving.end(home.numel())
        of_k, of_v = _opened(home, k, v, k.shape[-2])
        return of_q.to(q.dtype), of_k, of_v, None, None, None
