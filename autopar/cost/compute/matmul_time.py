"""Time of a matrix product: tiles of the result, run by the processors of a device in waves.

A library cuts the result into tiles and gives each processor one at a time. The last wave is often not full, and tiles
overlap the edges of the result. With too few tiles the library also splits the reduction and adds up the parts. The
fastest kernel is taken. Rows that are not aligned to 16 bytes are read in smaller pieces, at a lower rate. A product
that lasts for a millisecond or more meets the limit of power of some devices: the longer it is, the lower is its rate.
The constants belong to a device (`[matrix]` in its file) and are fitted to measured products by `benchmarks.gemm`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, log

# Parts into which libraries split a reduction, and the least length of a part.
REDUCTION_PARTS = (1, 2, 4, 8, 16)
SHORTEST_PART = 256
# Products of up to so many FLOPs end before the limit of power is met, and from so many on they run at it. Between the
# two the rate falls by the logarithm (public products of random numbers on H100 and B200, in docs/costs.md).
UNTHROTTLED_FLOPS = 1e11
THROTTLED_FLOPS = 3e13


@dataclass(frozen=True)
class Tile:
    """A kernel: the part of the result that one processor computes at a time, in either orientation."""

    rows: int
    columns: int
    # Share of the peak of a processor that is busy.
    reached_fraction: float


@dataclass(frozen=True)
class MatmulUnit:
    """Constants of matrix products on one device."""

    # Each processor computes one tile at a time; together they have the peak rate.
    processors: int
    # Overhead of a product.
    start_seconds: float
    # Reduction steps that a tile takes before it runs at full rate.
    fill: int
    # Overhead of adding up the parts of a split reduction.
    split_seconds: float
    # Share of the rate for rows aligned to 2, 4 or 8 bytes only.
    aligned_fraction: Mapping[str, float]
    tile: tuple[Tile, ...]
    # Share of the rate that is left for a product long enough to meet the limit of power.
    throttled_fraction: float = 1.0
    # Passes over operands and result beside which nothing is multiplied: none on a GPU, one or two on a core of a CPU.
    passes: float = 0.0

    # `product_seconds` is cached by its arguments, and a mapping has no hash.
    def __hash__(self) -> int:
        shares = self.throttled_fraction, self.passes
        return hash((self.processors, self.start_seconds, self.fill, self.split_seconds, self.tile, *shares))

    def at_speed(self, fraction: float) -> MatmulUnit:
        """Return the constants of a device at a fraction of its speed; the peak rate is no part of them."""
        return replace(self, start_seconds=self.start_seconds / fraction, split_seconds=self.split_seconds / fraction)


@dataclass(frozen=True)
class MatmulShape:
    """Sizes of `batch` products of [rows, reduction] by [reduction, columns].

    Sizes can be fractions: a mixture of experts has the rows, or in its gradient the reduction, of an average expert.
    """

    batch: int
    rows: float
    columns: float
    reduction: float
    # True for the rows of experts, whose number depends on data: no matrix has rows of this length in memory.
    sums_rows: bool = False

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.rows * self.columns * self.reduction

    def bytes(self, itemsize: int) -> float:
        m, n, k = self.rows, self.columns, self.reduction
        return float(self.batch) * (m * k + k * n + m * n) * itemsize


@lru_cache(maxsize=65536)
def product_seconds(
    product: MatmulShape, itemsize: int, matrix: MatmulUnit | None, peak_flops: float, bytes_per_second: float
) -> float:
    """Return the seconds of the fastest kernel; by the roofline for a device without tiles."""
    streaming = product.bytes(itemsize) / bytes_per_second
    if matrix is None:
        return max(product.flops / peak_flops, streaming)
    share = _aligned_fraction(matrix, product, itemsize) * _throttled_fraction(matrix, product.flops)
    rate = peak_flops / matrix.processors * share
    reached = {
        size: tile.reached_fraction
        for tile in matrix.tile
        for size in ((tile.rows, tile.columns), (tile.columns, tile.rows))
    }
    best = min(
        _tile_seconds(product, size, parts, matrix, rate * share, bytes_per_second)
        for size, share in reached.items()
        for parts in REDUCTION_PARTS
    )
    return matrix.start_seconds + max(best + matrix.passes * streaming, streaming)


def _tile_seconds(
    product: MatmulShape, size: tuple[int, int], parts: int, matrix: MatmulUnit, rate: float, bytes_per_second: float
) -> float:
    part = product.reduction / parts
    if parts > 1 and part < SHORTEST_PART:
        return float("inf")
    rows, columns = size
    tiles = product.batch * ceil(product.rows / rows) * ceil(product.columns / columns) * parts
    waves = -(-tiles // matrix.processors)
    seconds = waves * 2 * rows * columns * (part + matrix.fill) / rate
    if parts > 1:
        # Each part is a sum in float32, written and read once more.
        summed = product.batch * product.rows * product.columns * parts * 4
        seconds += matrix.split_seconds + 2 * summed / bytes_per_second
    return seconds


def _throttled_fraction(matrix: MatmulUnit, flops: float) -> float:
    """Return the share of the rate that the limit of power leaves a product: all of it, if it is short."""
    if matrix.throttled_fraction == 1.0 or flops <= UNTHROTTLED_FLOPS:
        return 1.0
    way = log(flops / UNTHROTTLED_FLOPS) / log(THROTTLED_FLOPS / UNTHROTTLED_FLOPS)
    return 1.0 - (1.0 - matrix.throttled_fraction) * min(1.0, way)


def _aligned_fraction(matrix: MatmulUnit, product: MatmulShape, itemsize: int) -> float:
    """Return the share of the rate that the alignment of the rows allows."""
    # The rows of the three matrices are as long as the reduction or as the columns.
    reduction = 0.0 if product.sums_rows else product.reduction
    rows = (reduction * itemsize, product.columns * itemsize)
    for count in (2, 4, 8):
        unit = str(count)
        if unit in matrix.aligned_fraction and any(row % (2 * count) for row in rows):
            return matrix.aligned_fraction[unit]
    return 1.0
