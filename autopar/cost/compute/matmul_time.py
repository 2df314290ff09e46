"""The time of a matrix product: tiles of the result, dealt to the processors of a device in waves.

A library cuts the result into tiles and gives each processor one at a time; the last wave is often not full, and tiles
hang over the edges. Where there are too few tiles, it cuts the reduction too, and adds up the parts. It takes the
kernel that is fastest. Rows that do not begin at multiples of 16 bytes are read in smaller pieces, which costs a share
of the rate. The constants are those of a device (`[matrix]` in its file), fitted to measured products by
`benchmarks.gemm`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

__all__ = ["MatmulShape", "MatmulUnit", "Tile", "product_seconds"]


@dataclass(frozen=True)
class Tile:
    """A kernel, by the piece of the result that one processor makes at a time; either way round."""

    rows: int
    columns: int
    reached_fraction: float
    """Of the peak, while it is at work."""

    @property
    def ways(self) -> tuple[tuple[int, int], ...]:
        return ((self.rows, self.columns), (self.columns, self.rows))


@dataclass(frozen=True)
class MatmulUnit:
    """How a device multiplies matrices."""

    processors: int
    """Each of them makes one tile at a time; together they have the peak rate."""
    start_seconds: float
    """What a product takes beyond its tiles."""
    fill: int
    """Steps of the reduction that a tile loses at its start."""
    split_seconds: float
    """What it takes to add up the parts of a reduction that is cut."""
    aligned_fraction: Mapping[str, float]
    """The share of the rate for rows that begin at multiples of 2, 4 and 8 bytes only."""
    tile: tuple[Tile, ...]

    def __hash__(self) -> int:
        return hash((self.processors, self.start_seconds, self.fill, self.split_seconds, self.tile))


@dataclass(frozen=True)
class MatmulShape:
    """`batch` products of [rows, reduction] by [reduction, columns].

    Of a mixture of experts the rows, or in its gradient the reduction, are those of an average expert: a fraction.
    """

    batch: int
    rows: float
    columns: float
    reduction: float

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
    """What the fastest kernel takes; without a description of the device, the roofline alone."""
    streaming = product.bytes(itemsize) / bytes_per_second
    if matrix is None:
        return max(product.flops / peak_flops, streaming)
    rate = peak_flops / matrix.processors * _aligned(matrix, product, itemsize)
    sizes = {(rows, columns): tile.reached_fraction for tile in matrix.tile for rows, columns in tile.ways}
    best = min(
        _tiled(product, size, parts, matrix, rate * reached, bytes_per_second)
        for size, reached in sizes.items()
        for parts in PARTS
    )
    return matrix.start_seconds + max(best, streaming)


PARTS = (1, 2, 4, 8, 16)
"""Into how many parts libraries cut a reduction."""
_SHORTEST = 256
"""A part of a reduction is no shorter."""


def _tiled(
    product: MatmulShape, size: tuple[int, int], parts: int, matrix: MatmulUnit, rate: float, bytes_per_second: float
) -> float:
    part = product.reduction / parts
    if parts > 1 and part < _SHORTEST:
        return float("inf")
    rows, columns = size
    tiles = product.batch * ceil(product.rows / rows) * ceil(product.columns / columns) * parts
    waves = -(-tiles // matrix.processors)
    seconds = waves * 2 * rows * columns * (part + matrix.fill) / rate
    if parts > 1:  # the parts are sums in 4 bytes, written and read again
        summed = product.batch * product.rows * product.columns * parts * 4
        seconds += matrix.split_seconds + 2 * summed / bytes_per_second
    return seconds


def _aligned(matrix: MatmulUnit, product: MatmulShape, itemsize: int) -> float:
    """Rows of a matrix are as long as the reduction or as the columns."""
    for count in (2, 4, 8):
        unit = str(count)
        rows = (product.reduction * itemsize, product.columns * itemsize)
        if unit in matrix.aligned_fraction and any(row % (2 * count) for row in rows):
            return matrix.aligned_fraction[unit]
    return 1.0
