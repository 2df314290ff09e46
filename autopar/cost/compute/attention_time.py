"""Seconds of fused attention on a device: its formula, scaled to the attention that was measured on it.

The rate follows from the head dims, the mask, and the keys that a query sees (`AttentionRates`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

import torch

from autopar.cost.compute.byte_time import seconds_of_bytes
from autopar.cost.compute.rates import peak_of, rate_of
from autopar.cost.hardware.cluster import AttentionRates, Device
from autopar.cost.measured.interpolation import Place, Ratios, place
from autopar.cost.measured.tables import AttentionTable

__all__ = [
    "BACKWARD_PRODUCTS",
    "AttentionShape",
    "attention_fractions",
    "least_attention_ratio",
    "measured_shape",
    "seconds_of_attention",
]

# Backward over forward FLOPs of fused attention: five products, one of which recomputes the scores, over two.
BACKWARD_PRODUCTS = 2.5


@dataclass(frozen=True)
class AttentionShape:
    """Local sizes of fused attention."""

    # Of all sequences.
    heads: float
    queries: int
    # Keys that a query sees on average.
    seen_keys: float
    # Dims of the keys of a head and of its values, added up.
    width: int
    is_causal: bool
    # Operands and result.
    bytes: float
    # Kernels that share the keys, as in a ring.
    calls: int = 1

    @property
    def flops(self) -> float:
        """Return the FLOPs of the forward, without masked scores."""
        return 2.0 * self.heads * self.queries * self.seen_keys * self.width

    @property
    def place(self) -> Place:
        return place(self.heads, self.queries, self.seen_keys, self.width)


def attention_fractions(
    rates: AttentionRates, width: int, seen_keys: float, is_causal: bool, calls: int = 1
) -> tuple[float, float]:
    """Return the shares of the peak that the forward and the backward reach.

    Parameters:
        width: dims of the keys of a head and of its values, added up.
        seen_keys: keys that a query sees on average; `calls` kernels share them.
    """
    # Each tile of queries starts and ends once in each call, however few keys it sees.
    started = seen_keys / (seen_keys + rates.start_keys * calls) if seen_keys else 1.0
    forward = rates.forward_fraction * (rates.causal_fraction if is_causal else 1.0)
    forward *= width / (width + 2 * rates.softmax)
    backward = rates.backward_fraction * (rates.causal_backward_fraction if is_causal else 1.0)
    backward *= width / (width + 2 * rates.backward_softmax)
    return forward * started, backward * started


def seconds_of_attention(device: Device, shape: AttentionShape, dtype: torch.dtype) -> tuple[float, float]:
    """Return the seconds of the forward and of the backward."""
    forward, backward = _predicted(device, shape, dtype)
    table = device.tables.attention
    ratios = None if table is None else _ratios(_Formula(device, dtype), table, shape.is_causal)
    if ratios is None:
        return forward, backward
    return forward * ratios[0].at(shape.place), backward * ratios[1].at(shape.place)


def _predicted(device: Device, shape: AttentionShape, dtype: torch.dtype) -> tuple[float, float]:
    # The only wave of a small op leaves processors idle; from the second wave on all are busy.
    blocks = shape.heads * ceil(shape.queries / device.attention.rows)
    matrix = device.matrix
    busy = min(1.0, blocks / matrix.processors) if matrix is not None and blocks else 1.0
    peak = peak_of(device, dtype) * device.sustained_fraction * busy
    reached = attention_fractions(device.attention, shape.width, shape.seen_keys, shape.is_causal, shape.calls)
    forward, backward = (
        max(times * shape.flops / (peak * share), seconds_of_bytes(times * shape.bytes, device))
        for times, share in zip((1.0, BACKWARD_PRODUCTS), reached, strict=True)
    )
    return forward, backward


def least_attention_ratio(device: Device, dtype: torch.dtype) -> float:
    """Return the least ratio of a measured attention to its formula; 1 where none was measured."""
    table = device.tables.attention
    if table is None:
        return 1.0
    every = (_ratios(_Formula(device, dtype), table, is_causal) for is_causal in (False, True))
    return min((one.least for both in every if both is not None for one in both), default=1.0)


# -- measured ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Formula:
    """The formula of attention in one dtype; equal for devices with the constants that it uses."""

    device: Device
    dtype: torch.dtype

    @property
    def key(self) -> tuple[object, ...]:
        device = self.device
        constants = (
            device.attention,
            device.matrix,
            device.op_seconds,
            device.launch_seconds,
            device.start_seconds,
            device.stream,
        )
        return self.dtype, peak_of(device, self.dtype), *constants

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Formula) and self.key == other.key


@lru_cache(maxsize=256)
def _ratios(formula: _Formula, table: AttentionTable, is_causal: bool) -> tuple[Ratios, Ratios] | None:
    """Return the ratios of the forward and the backward; None where nothing like it was measured."""
    # The table has times of a kernel alone, which the loss of speed under continuous load does not slow.
    device, dtype = replace(formula.device, sustained_fraction=1.0), formula.dtype
    name = rate_of(device, dtype).dtype
    forward: list[tuple[Place, float, float]] = []
    backward: list[tuple[Place, float, float]] = []
    for row in table.rows:
        if row.dtype == name and row.causal == is_causal:
            shape = measured_shape(row.heads, row.queries, row.keys, row.head_dim, is_causal, dtype.itemsize)
            predicted = _predicted(device, shape, dtype)
            forward.append((shape.place, row.forward_seconds * table.slowdown, predicted[0]))
            backward.append((shape.place, row.backward_seconds * table.slowdown, predicted[1]))
    return (Ratios.of(forward), Ratios.of(backward)) if forward else None


def measured_shape(
    heads: int, queries: int, keys: int, head_dim: int, is_causal: bool, itemsize: int
) -> AttentionShape:
    """Return the shape of a measurement: heads of equal keys and values, the last query at the last key."""
    seen = keys - (queries - 1) / 2 if is_causal else float(keys)
    moved = 2 * heads * (queries + keys) * head_dim * itemsize
    return AttentionShape(heads, queries, seen, 2 * head_dim, is_causal, moved)
