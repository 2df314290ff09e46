"""Codes of vectors: what is sent, what is lost, and that nothing is lost for ever."""

from __future__ import annotations

import pytest
import torch

from autopar.runtime.sync.coders import code_of, with_feedback
from autopar.sharding.layout.drift import Coder

CODERS = [Coder("bfloat16"), Coder("int8"), Coder("topk", 5.0), Coder("topk", 100.0)]


@pytest.mark.parametrize("coder", CODERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1, 7, 256, 1000])
def test_what_is_lost_is_kept(coder: Coder, dtype: torch.dtype, length: int) -> None:
    code, draw = code_of(coder), torch.Generator().manual_seed(length)
    lost = torch.zeros(length, dtype=dtype)
    for scale in (1.0, 1e-6, 1e4):
        vector = torch.randn(length, generator=draw, dtype=dtype) * scale
        due = lost + vector
        sent = with_feedback(code, vector, lost)
        assert sent.dtype == torch.uint8
        decoded = code.decode(sent, length, dtype)
        assert torch.equal(decoded + lost, due), "exactly"
        if dtype == torch.float32:
            assert len(sent) == code.size(length)


@pytest.mark.parametrize(
    ("coder", "share"), [(CODERS[0], 1 / 2), (CODERS[1], 65 / 256), (CODERS[2], 2 * 0.05)], ids=str
)
def test_bytes_that_are_sent(coder: Coder, share: float) -> None:
    vector = torch.randn(25_600)
    assert len(code_of(coder).encode(vector)) == share * vector.numel() * 4


def test_all_of_the_largest_values_are_the_vector() -> None:
    vector = torch.randn(100, dtype=torch.float64)
    code = code_of(Coder("topk", 100.0))
    assert torch.equal(code.decode(code.encode(vector), 100, torch.float64), vector)


def test_the_largest_values_are_sent_first() -> None:
    code, lost = code_of(Coder("topk", 25.0)), torch.zeros(4)
    seen = []
    for _ in range(3):
        sent = with_feedback(code, torch.tensor([0.0, 3.0, -4.0, 2.0]), lost)
        seen.append(code.decode(sent, 4, torch.float32).tolist())
    assert seen == [[0, 0, -4, 0], [0, 6, 0, 0], [0, 0, -8, 0]]


def test_codes_of_zeros() -> None:
    for coder in CODERS:
        code = code_of(coder)
        assert not code.decode(code.encode(torch.zeros(300)), 300, torch.float32).any()
        assert not len(with_feedback(code, torch.empty(0), torch.empty(0)))
