"""Seconds of a matrix product on a device: its formula, scaled to the products that were measured on it."""

from __future__ import annotations

from functools import lru_cache

import torch

from autopar.cost.compute.matmul_time import MatmulShape, MatmulUnit, product_seconds
from autopar.cost.compute.rates import rate_of
from autopar.cost.hardware.cluster import Device
from autopar.cost.measured.interpolation import Place, Ratios, place
from autopar.cost.measured.tables import ProductTable

__all__ = ["least_product_ratio", "seconds_of_product"]


def seconds_of_product(device: Device, product: MatmulShape, dtype: torch.dtype) -> float:
    """Return the seconds of a product alone on the device, before the loss of speed under continuous load."""
    rate = rate_of(device, dtype)
    hardware = (dtype.itemsize, device.matrix, rate.flops_per_second, device.stream)
    seconds = product_seconds(product, *hardware)
    table = device.tables.products
    return seconds if table is None else seconds * _ratio(product, table, rate.dtype, *hardware)


def least_product_ratio(device: Device, dtype: torch.dtype) -> float:
    """Return the least ratio of a measured product to its formula; 1 where none was measured."""
    table = device.tables.products
    if table is None:
        return 1.0
    rate = rate_of(device, dtype)
    hardware = (dtype.itemsize, device.matrix, rate.flops_per_second, device.stream)
    every = (_ratios(table, rate.dtype, is_batched, *hardware) for is_batched in (False, True))
    return min((ratios.least for ratios in every if ratios is not None), default=1.0)


@lru_cache(maxsize=65536)
def _ratio(
    product: MatmulShape,
    table: ProductTable,
    dtype: str,
    itemsize: int,
    matrix: MatmulUnit | None,
    peak_flops: float,
    bytes_per_second: float,
) -> float:
    """Return the measured over the predicted time of a product; 1 where nothing like it was measured."""
    ratios = _ratios(table, dtype, product.batch > 1, itemsize, matrix, peak_flops, bytes_per_second)
    return 1.0 if ratios is None else ratios.at(_place(product))


@lru_cache(maxsize=256)
def _ratios(
    table: ProductTable,
    dtype: str,
    is_batched: bool,
    itemsize: int,
    matrix: MatmulUnit | None,
    peak_flops: float,
    bytes_per_second: float,
) -> Ratios | None:
    """Return the ratios of the products of one dtype, of batches or of single ones."""
    times = []
    for row in table.rows:
        if row.dtype == dtype and (row.batch > 1) == is_batched:
            product = MatmulShape(row.batch, row.rows, row.columns, row.reduction)
            predicted = product_seconds(product, itemsize, matrix, peak_flops, bytes_per_second)
            times.append((_place(product), row.seconds * table.slowdown, predicted))
    return Ratios.of(times) if times else None


def _place(product: MatmulShape) -> Place:
    sizes = place(product.rows, product.columns, product.reduction)
    return (*sizes, *place(product.batch)) if product.batch > 1 else sizes
