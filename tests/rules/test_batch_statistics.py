"""Batch normalisation of a shard: results and gradients beside those of torch on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from threading import Barrier, Thread

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from autopar.rules.shard_call.batch_statistics import normalised_shard

CHANNELS, EPS = 5, 1e-5
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


class Shards:
    """Sums over some threads, each of which has one shard."""

    def __init__(self, count: int) -> None:
        self.barrier, self.count = Barrier(count), count
        self.given: dict[tuple[int, int], Tensor] = {}

    def of(self, rank: int) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        calls = 0

        def add(x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            self.given[calls, rank] = x
            self.barrier.wait(30)
            return torch.stack([self.given[calls, other] for other in range(self.count)]).sum(0)

        return add, add


def _drawn(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("shape", [(6, CHANNELS), (6, CHANNELS, 7), (6, CHANNELS, 3, 7)])
@pytest.mark.parametrize("rows", [(6,), (4, 2), (3, 3, 0)])
def test_shards_have_the_results_and_gradients_of_the_whole(
    dtype: torch.dtype, shape: tuple[int, ...], rows: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    image, given = _drawn(shape, dtype) * 2 + 3, _drawn(shape, dtype)
    for present in product((True, False), repeat=2):
        affine = [_drawn((CHANNELS,), dtype) if here else None for here in present]
        _compare(image, given, affine, rows)


def _compare(image: Tensor, given: Tensor, affine: list[Tensor | None], rows: tuple[int, ...]) -> None:
    whole = [None if one is None else one.double().clone().requires_grad_() for one in (image, *affine)]
    expected = functional.batch_norm(whole[0], None, None, *whole[1:], True, 0.0, EPS)  # type: ignore[call-arg]
    expected.backward(given.double())
    shards = Shards(len(rows))
    found: dict[int, tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor | None]]] = {}

    def run(rank: int, start: int, length: int) -> None:
        own = image[start : start + length].clone().requires_grad_()
        weights = [None if one is None else one.clone().requires_grad_() for one in affine]
        count = image.numel() // CHANNELS
        normed, mean, variance = normalised_shard(own, *weights, EPS, count, shards.of(rank))  # type: ignore[call-arg]
        normed.backward(given[start : start + length])
        found[rank] = normed, mean, variance, own, weights

    threads = [Thread(target=run, args=(i, sum(rows[:i]), length)) for i, length in enumerate(rows)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    parts = [found[rank] for rank in range(len(rows))]
    dims = [dim for dim in range(image.dim()) if dim != 1]
    variance, mean = torch.var_mean(image.double(), dims, correction=0)
    pairs = [(torch.cat([part[0] for part in parts]), expected)]
    pairs += [(torch.cat([part[3].grad for part in parts]), whole[0].grad)]
    pairs += [(part[1], mean) for part in parts] + [(part[2], variance) for part in parts]
    for i, one in enumerate(whole[1:]):
        if one is not None:
            pairs.append((torch.stack([part[4][i].grad.double() for part in parts]).sum(0), one.grad))
    for ours, theirs in pairs:
        assert ((ours.double() - theirs).abs().max() / theirs.abs().max()).item() < CLOSE[image.dtype]


def test_a_second_derivative_is_refused() -> None:
    x = torch.randn(4, CHANNELS, requires_grad=True)
    same = (lambda total: total), (lambda total: total)
    normed, _, _ = normalised_shard(x, None, None, EPS, 4, same)
    with pytest.raises(RuntimeError, match="batch normalisation over a split batch has no second derivative"):
        torch.autograd.grad(normed.square().sum(), x, create_graph=True)
