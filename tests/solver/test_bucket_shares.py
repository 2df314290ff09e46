"""Least shares of parameters in buckets: for no set of parameters are they more than the buckets that it takes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import inf

import numpy as np
import pytest

from autopar.sharding.buckets import BUCKET_BYTES, gather_limit, in_buckets
from autopar.sharding.reshard.reshard import StepKind
from autopar.solver.model.bucket_shares import Joinable

AXES = (2, 4)
KINDS = {
    "gathered": ((((StepKind.ALL_GATHER, "dp"),), ()), Joinable.gathered),
    "summed": (((), ((StepKind.ALL_REDUCE, "dp"),)), Joinable.summed),
}


@dataclass(frozen=True)
class Sent:
    """Parameter as buckets see it."""

    kind: tuple[object, ...]
    bytes: int
    block: str = ""


def drawn(draw: random.Random) -> list[int]:
    """Return sizes of some parameters: many small ones, some of a bucket's size, and equal ones."""
    most = draw.choice((2**14, 2**20, BUCKET_BYTES, 4 * BUCKET_BYTES))
    sizes = [draw.randrange(1, most) for _ in range(draw.randrange(1, 12))]
    return sizes + [draw.choice(sizes) for _ in range(draw.randrange(12))]


@pytest.mark.parametrize("kind", KINDS)
def test_shares_are_at_most_the_buckets(kind: str) -> None:
    draw, (steps, joinable) = random.Random(kind), KINDS[kind]
    least = inf
    for _ in range(400):
        sizes = drawn(draw)
        joined = joinable(sizes, AXES)
        sent = [(size, size // draw.choice((1, 2, 4, 8))) for size in sizes if draw.random() < 0.8]
        along = np.array(draw.randrange(4))
        shares = [joined.shares(joined.fills(np.array(float(part)), whole), along) for whole, part in sent]
        buckets = len(list(in_buckets([Sent((steps,), part) for _, part in sent], {"": gather_limit(sum(sizes))})))
        assert sum(map(float, shares)) <= buckets * (1 + 1e-9)
        if sent:
            least = min(least, 1 - float(sum(shares)) / buckets)
    assert least <= 1e-9, "some set of parameters takes as many buckets as the shares say"


def test_three_of_more_than_half_a_bucket_take_three() -> None:
    """Sizes of a layer of Llama-3-8B in bf16, of which the MLP is split by 8 in three of 14 MiB."""
    mib = 2.0**20
    sizes = [32 * mib, 8 * mib, 8 * mib, 32 * mib, *(3 * [112 * mib]), *(2 * [2**13])]
    joined = Joinable.gathered(sizes, (8, 8))
    mlp = joined.fills(np.array(14 * mib), 112 * mib)
    assert 3 * float(joined.shares(mlp, np.array(1))) == 3
    assert 3 * float(mlp) == pytest.approx(3 * 14 * mib / gather_limit(sum(sizes)))


def test_a_block_is_gathered_in_equal_parts() -> None:
    """A layer of ViT-H/14 in bf16 is more than one full bucket and less than two: it is gathered at once."""
    mib = 2**20
    layer = [int(3.125 * mib)] * 4 + [int(12.5 * mib)] * 2
    assert gather_limit(sum(layer)) == sum(layer) == int(37.5 * mib)
    assert [gather_limit(size * mib) for size in (1, 25, 49, 50, 74)] == [
        25 * mib,
        25 * mib,
        49 * mib,
        25 * mib,
        37 * mib,
    ]
    steps = KINDS["gathered"][0]

    def count(limits: dict[str, int]) -> int:
        return len(list(in_buckets([Sent((steps,), size, "layers.0") for size in layer], limits)))

    assert count({"layers.0": gather_limit(sum(layer))}) == 1
    assert count({}) == 2
