"""Attention whose keys pass from rank to rank, on ranks that are threads; its calls of a kernel, its memory."""

from __future__ import annotations

from queue import Queue
from threading import Thread
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from autopar.ir.analysis.op_memory import Footprint, fake_input, measure
from autopar.rules.shard_call import folded
from autopar.rules.shard_call.key_blocks import Stretches, hop_works, shard_stretches, visible
from autopar.rules.shard_call.ring import RingShard, attend_ring
from autopar.sharding.sharding import chunk


class ThreadRing:
    """Ring of threads: what one begins to send, the next one takes."""

    def __init__(self, place: int, queues: list[Queue[Tensor]]) -> None:
        self.place, self.queues, self.most_places = place, queues, None
        self.expected: list[int] = []

    def begin(self, message: Tensor, received: int) -> Tensor:
        self.queues[(self.place + 1) % len(self.queues)].put(message.clone())
        self.expected.append(received)
        return message.new_empty(0)

    def end(self, message: Tensor) -> Tensor:
        found = self.queues[self.place].get(timeout=60)
        assert found.numel() == self.expected.pop(0)
        return found


def shards(ranks: int, pieces: int, length: int) -> list[Stretches]:
    return [shard_stretches(pieces, length, *chunk(length, ranks, rank)) for rank in range(ranks)]


def positions(rows: Stretches) -> Tensor:
    found = [torch.arange(one.begin, one.stop) for one in rows]
    flipped = [one.flip(0) if stretch.flips else one for one, stretch in zip(found, rows, strict=True)]
    return torch.cat([*flipped, torch.empty(0, dtype=torch.long)])


def in_threads(
    operands: list[Tensor], gradient: Tensor, cut: list[Stretches], causal: bool, window: int, mask: Tensor | None
) -> list[Tensor]:
    """Return the result and the gradients of all ranks, put together."""
    ranks = len(cut)
    places = [positions(one) for one in cut]
    queues: list[Queue[Tensor]] = [Queue() for _ in cut]
    columns = tuple(tuple((one.at + sum(map(len, places[:i])), one.count) for one in cut[i]) for i in range(ranks))
    found: list[tuple[Tensor, ...]] = [()] * ranks

    def run(rank: int) -> None:
        own = [x.detach()[..., places[rank], :].requires_grad_() for x in operands]
        shard = RingShard(cut[rank], tuple(cut), causal, window, columns)
        rows = None if mask is None else mask[places[rank]][:, torch.cat(places)]
        result = attend_ring(*own, rows, None, True, shard, ThreadRing(rank, queues))  # type: ignore[call-arg]
        gradients = torch.autograd.grad(result, own, gradient[..., places[rank], :])
        found[rank] = (result.detach(), *gradients)

    threads = [Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    order = torch.cat(places).argsort()
    return [torch.cat(parts, -2)[..., order, :] for parts in zip(*found, strict=True)]


CASES = [
    (ranks, pieces, length, causal, window)
    for ranks, pieces, length in ((2, 1, 12), (3, 1, 13), (2, 2, 6), (4, 2, 7), (3, 4, 6))
    for causal, window in ((True, 0), (False, 0), (True, 1), (True, 5), (True, 9))
]


def compare(ranks: int, pieces: int, length: int, causal: bool, window: int, mask: Tensor | None = None) -> None:
    torch.manual_seed(0)
    extent = pieces * length
    shapes = (2, 4, extent, 6), (2, 2, extent, 6), (2, 2, extent, 5)
    operands = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    seen = torch.ones(extent, extent, dtype=torch.bool)
    seen = seen.tril() if causal else seen
    seen = seen.triu(1 - window) if window else seen
    seen = seen if mask is None else seen & mask
    expected = functional.scaled_dot_product_attention(*operands, attn_mask=seen, enable_gqa=True)
    gradient = torch.randn_like(expected)
    wanted = [expected.detach(), *torch.autograd.grad(expected, operands, gradient)]
    found = in_threads(operands, gradient, shards(ranks, pieces, length), causal, window, mask)
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("ranks", "pieces", "length", "causal", "window"), CASES)
def test_a_ring_is_attention(ranks: int, pieces: int, length: int, causal: bool, window: int) -> None:
    compare(ranks, pieces, length, causal, window)


@pytest.mark.parametrize("window", [0, 5])
def test_without_a_fused_kernel(window: int) -> None:
    with mock.patch.object(folded, "fused_kernel", return_value="none"):
        compare(3, 2, 6, True, window)
        compare(2, 1, 12, False, 0)


def test_a_mask() -> None:
    mask = torch.rand(12, 12, generator=torch.Generator().manual_seed(0)) > 0.6
    # A row that sees no key of some ranks, and one that sees none at all.
    mask[3, :9] = False
    mask[5] = False
    compare(4, 1, 12, False, 0, mask)


def test_rows_see_each_key_once() -> None:
    # Rows of shards of another number than those of the keys, and blocks of rows.
    for rows_of, keys_of, pieces, window, block in (
        (4, 2, 2, 0, 99),
        (2, 4, 4, 0, 2),
        (4, 2, 2, 5, 3),
        (6, 2, 1, 0, 99),
    ):
        extent = 12 * pieces
        for rows in shards(rows_of, pieces, 12):
            seen = torch.zeros(extent, extent, dtype=torch.int)
            for keys in shards(keys_of, pieces, 12):
                for call in visible(rows, keys, True, window, block):
                    own = torch.cat([_range(positions(rows), one) for one in call.rows])
                    read = torch.cat([_range(positions(keys), one) for one in call.keys.ranges])
                    pairs = torch.ones(len(own), len(read), dtype=torch.int)
                    if call.keys.causal:
                        at = len(read) - len(own) + call.keys.behind
                        pairs = pairs.tril(at)
                        pairs = pairs.triu(at - window + 1) if window else pairs
                    assert call.pairs == pairs.sum()
                    seen[own[:, None], read] += pairs
            expected = torch.ones(extent, extent, dtype=torch.int).tril()
            expected = expected.triu(1 - window) if window else expected
            assert torch.equal(seen[positions(rows)], expected[positions(rows)])


def _range(stored: Tensor, one: tuple[int, int, bool]) -> Tensor:
    begin, count, flips = one
    found = stored[begin : begin + count]
    return found.flip(0) if flips else found


def test_a_fold_gives_each_hop_as_much() -> None:
    cut = shards(8, 2, 64)
    for rank, rows in enumerate(cut):
        works = hop_works(rows, tuple(cut[(rank - hop) % 8] for hop in range(8)), True, 0)
        # Of the own keys the lower half with its diagonal, of all others a half: one call each.
        assert [work.pairs for work in works] == [16 * 17 // 2, *[16 * 8] * 7]
        assert {work.calls for work in works} == {1}


class NoRing:
    """Ring that sends nothing, and holds each message until the hop has ended."""

    place = 0
    most_places = None

    def __init__(self) -> None:
        self.sent: list[Tensor] = []

    def begin(self, message: Tensor, received: int) -> Tensor:
        self.sent.append(message)
        return message.new_empty(received)

    def end(self, message: Tensor) -> Tensor:
        self.sent.pop(0)
        return message


def footprint(rows: Stretches, keys: list[Stretches], causal: bool, dtype: torch.dtype) -> Footprint:
    shard = RingShard(rows, tuple(keys), causal, window=0, columns=())
    sizes = [sum(stretch.count for stretch in one) for one in (rows, keys[0], keys[0])]
    with FakeTensorMode():
        operands = [fake_input((1, 2, size, 64), dtype, True) for size in sizes]
        return measure(operands, lambda: attend_ring(*operands, None, None, False, shard, NoRing()))  # type: ignore[call-arg]


@pytest.mark.parametrize("ranks", [3, 8])
def test_keys_of_two_ranks_are_in_memory(ranks: int) -> None:
    # So few rows that keys and values are nearly all of the memory.
    found = footprint(shard_stretches(1, 2, 0, 2), shards(ranks, 1, 4096 * ranks), False, torch.float64)
    size = 2 * 2 * 4096 * 64 * 8
    assert 2 <= found.forward_bytes / size < 2.01
    # In the backward as many gradients, and those that a kernel makes.
    assert 4 <= found.backward_bytes / size < 5.01
    assert found.internal_bytes < 0.01 * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [3, 8])
@pytest.mark.parametrize("pieces", [1, 2, 4, 16])
def test_a_ring_takes_keys_of_two_ranks_more_than_own_rows(pieces: int, ranks: int, dtype: torch.dtype) -> None:
    keys = shards(ranks, pieces, 512 * ranks)
    ring, own = footprint(keys[0], keys, True, dtype), footprint(keys[0], keys[:1], True, dtype)
    size = 2 * 2 * 512 * pieces * 64 * dtype.itemsize
    assert ring.forward_bytes - own.forward_bytes <= 2 * size
    # Own rows in the order of a fold are copied; before the gradients of other keys are there, these copies are gone.
    assert ring.backward_bytes - own.backward_bytes <= (2 if pieces == 2 else 4) * size
