"""Tables of the measured times beside a calibrated cluster file, and the errors of prices with and without them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from statistics import median

import torch

from autopar.cost.calibration.fit import Errors, Measurements, prediction_errors
from autopar.cost.calibration.op_trials import TimedAttention
from autopar.cost.compute.attention_time import measured_shape, seconds_of_attention
from autopar.cost.compute.matmul_time import MatmulShape
from autopar.cost.compute.product_time import seconds_of_product
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.measured.tables import (
    AttentionTable,
    AttentionTime,
    CollectiveTable,
    CollectiveTime,
    DeviceTables,
    LibraryTables,
    ProductTable,
    ProductTime,
)

__all__ = ["errors_of", "measured_rows", "with_tables", "without_tables"]

Rows = tuple[list[ProductTime], list[AttentionTime], list[CollectiveTime]]


def measured_rows(found: Measurements, fitted_only: bool = False) -> Rows:
    """Return the rows of the three tables: of all measurements, or of those alone that were fitted."""
    products = [
        ProductTime(one.dtype, 1, one.rows, one.columns, one.reduction, one.seconds)
        for one in found.products
        if not (fitted_only and one.left_out)
    ]
    attentions = [
        AttentionTime(
            dtype=one.dtype,
            causal=one.causal,
            heads=one.heads,
            queries=one.rows,
            keys=one.rows,
            head_dim=one.head_dim,
            forward_seconds=one.forward_seconds,
            backward_seconds=one.backward_seconds,
        )
        for one in found.attentions
        if not (fitted_only and one.left_out)
    ]
    collectives = [
        # Across nodes a group has one rank of each.
        CollectiveTime(
            one.kind,
            f"{one.ranks}" if one.level == 0 else f"{one.ranks}x1",
            found.ranks // one.ranks,
            int(one.buffer_bytes),
            one.seconds,
        )
        for one in found.collectives
        if not (fitted_only and one.left_out)
    ]
    return products, attentions, collectives


def without_tables(cluster: Cluster) -> Cluster:
    """Return the cluster with its formulas alone."""
    device, library = replace(cluster.device, tables=DeviceTables()), replace(cluster.library, tables=LibraryTables())
    return replace(cluster, device=device, library=library)


def with_tables(cluster: Cluster, rows: Rows) -> Cluster:
    """Return the cluster with tables of some rows."""
    products, attentions, collectives = rows
    of_device = DeviceTables(
        ProductTable.of(products) if products else None, AttentionTable.of(attentions) if attentions else None
    )
    of_library = LibraryTables(CollectiveTable.of(collectives) if collectives else None)
    device, library = replace(cluster.device, tables=of_device), replace(cluster.library, tables=of_library)
    return replace(cluster, device=device, library=library)


def errors_of(cluster: Cluster, found: Measurements) -> dict[str, Errors]:
    """Return the median relative error of each kind of measurement: of those that were fitted, and of the others."""
    products = [(one.left_out, _product(cluster, found, i) / one.seconds) for i, one in enumerate(found.products)]
    attentions = [(one.left_out, ratio) for one in found.attentions for ratio in _attention(cluster, one)]
    errors = {"products": _medians(products), "attention": _medians(attentions)}
    return errors | prediction_errors(cluster, found)


def _product(cluster: Cluster, found: Measurements, i: int) -> float:
    one = found.products[i]
    return seconds_of_product(cluster.device, MatmulShape(1, one.rows, one.columns, one.reduction), _dtype(one.dtype))


def _attention(cluster: Cluster, one: TimedAttention) -> Iterator[float]:
    """Yield the predicted over the measured time of the forward and of the backward."""
    dtype = _dtype(one.dtype)
    shape = measured_shape(one.heads, one.rows, one.rows, one.head_dim, one.causal, dtype.itemsize)
    # A measurement is too short for the loss of speed under continuous load.
    device = replace(cluster.device, sustained_fraction=1.0)
    forward, backward = seconds_of_attention(device, shape, dtype)
    yield from (forward / one.forward_seconds, backward / one.backward_seconds)


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


def _medians(ratios: Iterable[tuple[bool, float]]) -> Errors:
    errors: dict[bool, list[float]] = {False: [], True: []}
    for is_left_out, ratio in ratios:
        errors[is_left_out].append(abs(ratio - 1))
    inside, outside = (median(found) if found else None for found in errors.values())
    return inside, outside
