"""Attention of documents: what a mask gives, whatever the numbers are; and the calls of a kernel for it."""

from __future__ import annotations

import random
from itertools import pairwise
from math import exp

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from autopar.rules.ops.documents import DOCUMENT_ATTENTION, DOCUMENT_RANGES
from autopar.rules.shard_call import document_ranges, documents
from autopar.rules.shard_call.document_ranges import ENDS, DocumentMask, RangeCall, document_table, range_calls
from autopar.rules.shard_call.documents import attend_documents
from autopar.rules.shard_call.folded import fold, stretches_of

KINDS = ["same", "same same", "same order", "same seen", "same near3", "same near5 order", "same same order seen"]


def numbers_of(kinds: str, batch: int, rows: int) -> Tensor:
    """Return numbers as packed documents have them, or arbitrary ones."""
    place = torch.arange(rows).expand(batch, -1)
    document = place
    found = []
    for kind in kinds.split():
        regular = random.random() < 0.7
        if kind == "same":
            share = random.choice([0.05, 0.3, 0.9])
            document = torch.rand(batch, rows).lt(share).long().cumsum(1)
            found.append(document if regular else torch.randint(0, 3, (batch, rows)))
        elif kind == "seen":
            found.append((place < rows - 2).long() if regular else torch.randint(0, 2, (batch, rows)))
        else:
            found.append(place - 3 * document if regular else torch.randint(0, rows, (batch, rows)))
    return torch.stack(found, 1)


def visible(mask: DocumentMask, numbers: Tensor) -> Tensor:
    return torch.stack([mask.visible(one.mT, one.mT, 0) for one in numbers])[:, None]


@pytest.mark.parametrize("kernel", ["cpu", "written"])
@pytest.mark.parametrize("kinds", KINDS)
def test_equals_attention_under_the_mask(kinds: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "kernel_for", lambda query, width: kernel)
    torch.manual_seed(0)
    random.seed(0)
    ranges = 0
    for _ in range(24):
        rows, batch, pieces = random.choice([8, 16, 96]), random.choice([1, 2, 3]), random.choice([1, 2, 4])
        causal = random.random() < 0.7
        mask = DocumentMask(tuple(kinds.split()), causal, random.choice([0, 0, 3]) if causal else 0)
        numbers = numbers_of(kinds, random.choice([1, batch]), rows)
        q, k, v = (torch.randn(batch, h, rows, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
        seen = visible(mask, numbers)
        expected = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        options = {"causal": mask.causal, "window": mask.window}
        table = DOCUMENT_RANGES(numbers, kinds, **options)
        given = (fold(x, -2, pieces) for x in (q, k, v))
        found = DOCUMENT_ATTENTION(*given, table, kinds, **options, enable_gqa=True, pieces=pieces)
        found = fold(found, -2, pieces)
        gradient = torch.randn_like(expected)
        results = [[one, *torch.autograd.grad(one, (q, k, v), gradient)] for one in (expected, found)]
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-13)
        # The ends are those of the mask where there is one range.
        for sample, ends in zip(seen.expand(len(table), -1, -1, -1)[:, 0], table[..., :ENDS], strict=True):
            if ends[0, 0] >= 0:
                ranges += 1
                place = torch.arange(rows)
                assert torch.equal(sample, (place >= ends[:, :1]) & (place < ends[:, 1:]))
    assert ranges > 5


def calls_of(table: Tensor, pieces: int, shards: int, kernel: str = "flash") -> list[list[RangeCall]]:
    """Return the calls of each shard."""
    rows = table.shape[1] // pieces
    own = [stretches_of(pieces, rows, place * rows // shards, rows // shards) for place in range(shards)]
    return [[*range_calls(table[..., :ENDS], one, kernel)] for one in own]


def pairs(calls: list[RangeCall]) -> int:
    found = 0
    for call in calls:
        for part in call.parts:
            ((_, keys, _),) = part.ranges
            found += call.rows * keys - (call.rows * (call.rows - 1) // 2 if part.causal else 0)
    return found


def packed(mean: float, rows: int, seed: int) -> Tensor:
    """Return the numbers of documents of log-normal lengths."""
    random.seed(seed)
    lengths: list[int] = []
    while sum(lengths) < rows:
        lengths.append(min(1 + int(random.lognormvariate(0, 1) * mean / exp(0.5)), rows - sum(lengths)))
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]


def test_pieces_balance_documents() -> None:
    """The busiest of 8 shards over the mean: two pieces balance one document, 16 pieces balance several."""
    rows, shards = 2**15, 8
    for mean, most in ((rows, 1.001), (rows / 2, 1.15), (rows / 8, 1.2), (rows / 32, 1.3)):
        found = {}
        for pieces in (1, 2, 16):
            busiest = total = needed = 0
            for seed in range(4):
                numbers = packed(mean, rows, seed) if mean < rows else torch.zeros(1, rows, dtype=torch.int64)
                table = document_table(numbers[:, None], DocumentMask(("same",), causal=True))
                each = [pairs(calls) for calls in calls_of(table, pieces, shards)]
                busiest, total = busiest + max(each), total + sum(each)
                needed += int((table[..., 1] - table[..., 0]).sum())
            found[pieces] = busiest / (total / shards)
            # Short documents share calls.
            assert needed <= total <= 1.02 * needed
        assert found[16] < most < 1.8 < found[1], (mean, found)
        assert mean == rows or found[16] < found[2], (mean, found)


def test_a_document_takes_a_call_for_each_stretch() -> None:
    lengths = [300, 20, 40, 152]
    numbers = torch.arange(4).repeat_interleave(torch.tensor(lengths))[None, None]
    table = document_table(numbers, DocumentMask(("same",), causal=True))
    (whole,) = calls_of(table, 1, 1)
    assert [(call.row, call.rows) for call in whole] == [(0, 300), (300, 20), (320, 40), (360, 152)]
    assert all(call.parts[0].causal and call.parts[0].ranges == ((call.row, call.rows, False),) for call in whole)
    # The second of two shards has the end of the first document.
    _, last = calls_of(table, 1, 2, "cpu")
    assert [part.ranges[0][:2] for part in last[0].parts] == [(0, 256), (256, 44)]


def test_short_documents_share_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = (torch.arange(256) // 4)[None, None]
    table = document_table(numbers, DocumentMask(("same",), causal=True))
    (shared,) = calls_of(table, 1, 1)
    assert [(call.row, call.rows) for call in shared] == [(first, 64) for first in range(0, 256, 64)]
    assert all(one.row + one.rows == other.row for one, other in pairwise(shared))
    monkeypatch.setattr(document_ranges, "SHORT_ROWS", 0)
    (apart,) = calls_of(table, 1, 1)
    assert len(apart) == 64


def test_calls_are_made_once_for_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Tensor] = []
    monkeypatch.setattr(documents, "range_calls", lambda ends, *rest: made.append(ends) or range_calls(ends, *rest))
    q = torch.randn(1, 2, 64, 8, requires_grad=True)
    for number in range(2):
        table = DOCUMENT_RANGES((torch.arange(64) // 20)[None, None] + number, "same", causal=True)
        for _ in range(3):
            DOCUMENT_ATTENTION(q, q, q, table, "same", causal=True).sum().backward()
        assert len(made) == number + 1
    with torch.inference_mode():
        table = DOCUMENT_RANGES(torch.zeros(1, 1, 64, dtype=torch.int64), "same", causal=True)
        DOCUMENT_ATTENTION(q, q, q, table, "same", causal=True)
    table = DOCUMENT_RANGES((torch.arange(64) // 20)[None, None], "same", causal=True)
    DOCUMENT_ATTENTION(q, q, q, table, "same", causal=True)
    made.clear()
    # Other documents in the same tensor.
    table[:, :, :2] = DOCUMENT_RANGES(torch.zeros(1, 1, 64, dtype=torch.int64), "same", causal=True)[:, :, :2]
    found = DOCUMENT_ATTENTION(q, q, q, table, "same", causal=True)
    torch.testing.assert_close(found, functional.scaled_dot_product_attention(q, q, q, is_causal=True))
    assert len(made) == 1


def test_a_table_of_other_keys_is_an_error() -> None:
    table = DOCUMENT_RANGES(torch.zeros(1, 1, 8, dtype=torch.int64), "same", causal=True)
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match="a table of 8 positions for 4 keys"):
        attend_documents(q, q, q, table, None, False, 1, "same", True, 0)


def test_half_precision_is_as_near_as_fused_attention() -> None:
    torch.manual_seed(0)
    numbers = packed(40, 256, 0)[:, None]
    table = DOCUMENT_RANGES(numbers, "same", causal=True)
    seen = visible(DocumentMask(("same",), causal=True), numbers)
    q, k, v = (torch.randn(2, h, 256, 16, requires_grad=True) for h in (4, 2, 2))
    half = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    given = torch.randn(2, 4, 256, 16)
    results = []
    for run in (
        lambda: functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True),
        lambda: functional.scaled_dot_product_attention(*half, attn_mask=seen, enable_gqa=True),
        lambda: DOCUMENT_ATTENTION(*half, table, "same", causal=True, enable_gqa=True),
    ):
        found = run()
        leaves = [q, k, v] if found.dtype is torch.float32 else half
        results.append([found, *torch.autograd.grad(found, leaves, given.to(found.dtype))])
    for exact, fused, own in zip(*results, strict=True):
        assert (own - exact).abs().max() <= 1.5 * (fused - exact).abs().max()


def test_no_second_derivative() -> None:
    q = torch.randn(1, 2, 8, 4, requires_grad=True)
    table = DOCUMENT_RANGES(torch.zeros(1, 1, 8, dtype=torch.int64), "same", causal=True)
    found = DOCUMENT_ATTENTION(q, q, q, table, "same", causal=True)
    with pytest.raises(RuntimeError, match="attention of documents has no second derivative"):
        torch.autograd.grad(found.sum(), q, create_graph=True)
