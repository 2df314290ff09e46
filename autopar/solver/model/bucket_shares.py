"""Least shares of parameters in their buckets, before it is known which of them are joined.

A bucket is full by what its elements take in the compute, in whatever dtype they are summed. Parameters that are split
in different ways may share a bucket, and each way of sending them has buckets of its own. So a share must hold for any
set of them: the shares of what fits in one bucket add up to one at most. Sizes do, as shares of a full bucket. So does
`_share_by_pieces`, which tells apart how often a parameter fits: three of 14 MiB need three buckets of 25 MiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autopar.sharding.buckets import BUCKET_BYTES, BUCKETS, LEAST_BYTES, SMALL_BYTES, TINY_BYTES, gather_limit
from autopar.solver import Floats, Ints

__all__ = ["Joinable"]

MOST_PIECES = 4
# Relative: sizes this close are equal.
CLOSE = 1e-9


class Joinable(NamedTuple):
    """Parameters that may be joined: their bytes, and the most of them in one bucket. A tuple, as a key of tables."""

    bytes: float
    limit: float
    # All of them fit in the first bucket.
    fits: bool
    # For each set of axes that parameters are sent along, a bit mask: the number of pieces of a bucket by which their
    # shares are counted; 0 where they are sizes.
    pieces: tuple[int, ...]

    @classmethod
    def gathered(cls, sizes: Sequence[float], axes: Sequence[int]) -> Joinable:
        """Return the parameters of one layer, which are gathered together, on axes of these sizes."""
        limit = float(gather_limit(sum(sizes)))
        return cls(sum(sizes), limit, sum(sizes) <= limit, _pieces(np.array(sizes) / limit, axes))

    @classmethod
    def summed(cls, sizes: Sequence[float], axes: Sequence[int]) -> Joinable:
        """Return the parameters of a model, whose gradients are summed together, on axes of these sizes."""
        limit = min(float(BUCKET_BYTES), max(LEAST_BYTES, sum(sizes) / BUCKETS))
        return cls(sum(sizes), limit, sum(sizes) <= SMALL_BYTES, _pieces(np.array(sizes) / limit, axes))

    def fills(self, sent: Floats, whole: float) -> Floats:
        """Return the parts of a bucket that a parameter fills, whose bytes are `whole` and those of its shards `sent`.

        A tiny one fills none. Where all fit in one bucket, they are compared before they are split: each kind of them
        has a bucket.
        """
        if self.fits:
            return np.full(np.shape(sent), min(1.0, whole / max(self.bytes, 1.0)))
        return np.where(sent <= TINY_BYTES, 0.0, np.minimum(1.0, sent / self.limit))

    def shares(self, fills: Floats, along: Ints) -> Floats:
        """Return the least shares of a collective for parameters that fill such parts of a bucket, along such axes."""
        if self.fits:
            return fills
        pieces = np.array(self.pieces)[along]
        return np.where(pieces, _share_by_pieces(fills, np.maximum(pieces, 1)), fills)


def _pieces(fills: Floats, axes: Sequence[int]) -> tuple[int, ...]:
    """Return for each set of axes the pieces that tell most, as the others may split parameters or not."""

    def degrees(along: int) -> list[int]:
        found = [1]
        for place, size in enumerate(axes):
            found += [] if along >> place & 1 else [size * other for other in found]
        return found

    parts = [[np.minimum(1.0, fills / degree) for degree in degrees(along)] for along in range(1 << len(axes))]
    return tuple(_best_pieces(each) for each in parts)


def _best_pieces(fills: Sequence[Floats]) -> int:
    """Return the pieces that tell most of how many buckets are needed, over the ways of splitting parameters."""

    def gain(pieces: int) -> float:
        return sum(float(_share_by_pieces(each, np.array(pieces)).sum() / max(each.sum(), CLOSE)) for each in fills)

    best = max(range(1, MOST_PIECES + 1), key=gain)
    return best if gain(best) > len(fills) else 0


def _share_by_pieces(fills: Floats, pieces: Ints) -> Floats:
    """Return how many of `pieces` a parameter takes that fills such a part of a bucket.

    Cut the bucket into `pieces` + 1: a parameter takes the pieces that it more than fills. Those of one bucket more
    than fill what they take, so together they take at most `pieces`.
    """
    found: Floats = np.maximum(0.0, np.ceil((pieces + 1) * fills - CLOSE) - 1) / pieces
    return found
