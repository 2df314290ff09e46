"""Attention over a folded sequence: its stretches, and what fused attention gives on the plain order."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from autopar.rules.shard_call.folded import attend_folded, fold, stretches_of


def shard(x: Tensor, dim: int, pieces: int, place: int, shards: int) -> Tensor:
    """Return the part of each piece of a folded tensor."""
    opened = x.unflatten(dim, (pieces, -1))
    return opened.tensor_split(shards, dim + 1)[place].flatten(dim, dim + 1)


@pytest.mark.parametrize(("pieces", "shards", "length"), [*product((2, 4, 6), (1, 2, 3), (3, 4, 6))])
def test_stretches_are_those_of_the_fold(pieces: int, shards: int, length: int) -> None:
    folded = fold(torch.arange(pieces * length), 0, pieces)
    assert fold(folded, 0, pieces).tolist() == list(range(pieces * length))
    for place in range(shards):
        own = shard(folded, 0, pieces, place, shards)
        rows = len(own) // pieces
        start = sum(len(part) for part in torch.arange(length).tensor_split(shards)[:place])
        found = stretches_of(pieces, length, start, rows)
        ascending = [one.begin + i for one in found for i in range(one.rows)]
        assert fold(own, 0, pieces).tolist() == ascending
        assert [one.row for one in found] == [sum(other.rows for other in found[:i]) for i in range(len(found))]
        assert all(one.begin + one.rows < other.begin for one, other in pairwise(found))


CASES = [
    # pieces, shards, window, heads of queries and keys, written out
    (2, 1, 0, (4, 4), False),
    (2, 4, 0, (4, 2), False),
    (4, 3, 0, (4, 1), False),
    (2, 2, 7, (4, 2), False),
    (2, 2, 1000, (2, 2), False),
    (4, 2, 0, (4, 2), True),
    (2, 3, 7, (4, 4), True),
]


@pytest.mark.parametrize(("pieces", "shards", "window", "heads", "written"), CASES)
def test_equals_fused_attention(pieces: int, shards: int, window: int, heads: tuple[int, int], written: bool) -> None:
    torch.manual_seed(0)
    # Longer than the blocks of rows that have a mask of their own.
    rows = 24 * pieces * (6 if window == 7 else 1)
    q, k, v = (torch.randn(2, h, rows, 8, dtype=torch.float64, requires_grad=True) for h in (heads[0], *heads[1:] * 2))
    place = torch.arange(rows)
    seen = place <= place[:, None]
    if window:
        seen &= place > place[:, None] - window
    expected = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.3, enable_gqa=True)
    given = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (q, k, v), given)
    keys, values = fold(k, -2, pieces), fold(v, -2, pieces)
    parts, gradients = [], []
    with sdpa_kernel(SDPBackend.MATH) if written else sdpa_kernel(list(SDPBackend.__members__.values())[1:]):
        for place_of in range(shards):
            own, its = (shard(fold(x, -2, pieces), 2, pieces, place_of, shards) for x in (q, given))
            start = sum(len(part) for part in torch.arange(rows // pieces).tensor_split(shards)[:place_of])
            found = attend_folded(own, keys, values, 0.3, True, pieces, window, start)
            parts.append(found.unflatten(2, (pieces, -1)))
            gradients.append(torch.autograd.grad(found, (q, k, v), its, retain_graph=True))
    result = fold(torch.cat(parts, 3).flatten(2, 3), -2, pieces)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-13)
    for mine, theirs in zip(map(sum, zip(*gradients, strict=True)), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)


def test_half_precision_is_as_near_as_fused_attention() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 64, 16) for _ in range(3))
    exact = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    half = [x.bfloat16() for x in (q, k, v)]
    fused = functional.scaled_dot_product_attention(*half, is_causal=True)
    found = fold(attend_folded(*(fold(x, -2, 2) for x in half), None, False, 2), -2, 2)  # type: ignore[call-arg]
    assert found.dtype is torch.bfloat16
    assert (found - exact).abs().max() <= 1.5 * (fused - exact).abs().max()


def test_no_second_derivative() -> None:
    q, k, v = (torch.randn(1, 1, 8, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    found = attend_folded(q, k, v, None, False, 2)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(found.sum(), q, create_graph=True)


@pytest.mark.parametrize(("shards", "pieces"), [*product((2, 3, 8, 64), (2, 4, 16))])
def test_all_shards_see_as_many_keys(shards: int, pieces: int) -> None:
    length = 3 * shards
    seen = [
        sum(one.begin + row + 1 for one in stretches_of(pieces, length, 3 * place, 3) for row in range(one.rows))
        for place in range(shards)
    ]
    assert len(set(seen)) == 1
    # The last of as many contiguous shards has nearly twice the mean.
    rows = pieces * length
    last = sum(range(rows - rows // shards + 1, rows + 1))
    assert last / (sum(seen) / shards) == pytest.approx(2 - 1 / shards, rel=1 / rows)
