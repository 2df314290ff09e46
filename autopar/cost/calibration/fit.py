"""Fit the constants of a cluster to measurements, and report the errors on measurements left out of the fit.

    a product       start + flops (reduction + fill) / reduction / peak
    a collective    base + hops(ranks) hop + traffic(ranks) bytes / rate, with or without a pipeline that fills

The hops and traffic of each algorithm are known (autopar/cost/collective_algorithms.py). The algorithm that a library
runs is unknown: the candidate with the least error is taken. Errors are relative to the time; no constant is negative.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import inf, prod, sqrt
from operator import attrgetter
from statistics import median
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from autopar.cost.algorithm_registry import ALGORITHMS
from autopar.cost.calibration.op_trials import TimedAttention, TimedOp
from autopar.cost.collective_algorithms import LevelSpan, TopologyLevel
from autopar.cost.compute.matmul_time import MatmulShape, MatmulUnit, product_seconds
from autopar.cost.hardware.cluster import AttentionRates, Cluster, Device
from autopar.cost.network import Curve, Network
from autopar.mesh import SubMesh

# Median relative errors of the measurements that were fitted and of those left out; None where there are none.
Errors = tuple[float | None, float | None]
# Algorithms that a library may run for each collective; the first is taken where measurements cannot tell.
CANDIDATES: Mapping[str, tuple[str, ...]] = {
    "all_reduce": ("ring", "halving_doubling", "double_binary_tree"),
    "all_gather": ("ring", "halving_doubling"),
    "reduce_scatter": ("ring", "halving_doubling"),
    "broadcast": ("double_binary_tree", "ring"),
    "reduce": ("double_binary_tree", "ring"),
    "all_to_all": ("direct",),
    "gather": ("direct",),
    "scatter": ("direct",),
    "send": ("direct",),
}


@dataclass(frozen=True)
class TimedProduct:
    """Measured seconds of one matrix product, [rows, reduction] by [reduction, columns]."""

    dtype: str
    rows: int
    reduction: int
    columns: int
    seconds: float
    # Excluded from the fit.
    left_out: bool = False

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.reduction * self.columns

    @property
    def bytes(self) -> float:
        shape = MatmulShape(1, self.rows, self.columns, self.reduction)
        return shape.bytes(getattr(torch, self.dtype).itemsize)


@dataclass(frozen=True)
class TimedChain:
    """Measured seconds of `count` dependent products [rows, width] by [width, width] in a training step."""

    count: int
    rows: int
    width: int
    seconds: float
    dtype: str = "float32"


@dataclass(frozen=True)
class TimedCollective:
    """Measured seconds of a collective, run by all groups of `ranks` at once; level 0 is inside a node."""

    kind: str
    level: int
    ranks: int
    buffer_bytes: float
    seconds: float
    # Excluded from the fit: `prediction_errors` reports the error on these apart.
    left_out: bool = False


@dataclass(frozen=True)
class Measurements:
    """Measured numbers of one machine, before any constant is fitted."""

    device: str
    memory_bytes: float
    launch_seconds: float
    stream_bytes_per_second: float
    products: tuple[TimedProduct, ...]
    collectives: tuple[TimedCollective, ...]
    nodes: int
    ranks_per_node: int
    # Bandwidth between two ranks while all others are idle.
    lone_bytes_per_second: float | None = None
    # Share of a core that a rank has while all ranks compute.
    core_fraction: float = 1.0
    # True where ranks compute on all cores: communication takes its time from them.
    fills_cores: bool = False
    # Time of a small op in a training step: on the device if `own_host`, else on the host beside it.
    overhead_seconds: float = 0.0
    # True where the device launches its own ops, as a core of a CPU does.
    own_host: bool = True
    # Processors of the device; a library of collectives occupies some of them.
    processors: int = 1
    ops: tuple[TimedOp, ...] = ()
    attentions: tuple[TimedAttention, ...] = ()
    chain: TimedChain | None = None

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def of_device(self) -> Measurements:
        """Return the measurements without those whose time is that of the host, which queues ops for the device."""
        if self.own_host:
            return self
        attentions = _longer(_longer(self.attentions, "forward_seconds"), "backward_seconds")
        return replace(self, products=_longer(self.products, "seconds"), attentions=attentions)


# An op that takes less than so many times the shortest one may wait for the host.
SURELY_OF_DEVICE = 2.0

Timed = TypeVar("Timed")


def _longer(measured: tuple[Timed, ...], field: str) -> tuple[Timed, ...]:
    """Return the measurements that are longer than what the host takes; all of them if none is."""
    seconds = attrgetter(field)
    least = SURELY_OF_DEVICE * min(map(seconds, measured), default=0.0)
    return tuple(one for one in measured if seconds(one) >= least) or measured


# -- products ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MultiplyFit:
    """Constants of matrix products on one device, with their median relative error."""

    start_seconds: float
    fill: int
    peak_flops: Mapping[str, float]
    # Median of |predicted - measured| / measured.
    error: float
    # Tiles and processors of a shipped device, used where they fit better than the plain formula.
    matrix: MatmulUnit | None = None
    stream_bytes_per_second: float = inf
    # As those of `MatmulUnit`, without tiles.
    passes: float = 0.0

    def seconds(self, dtype: str, rows: int, reduction: int, columns: int) -> float:
        """Return the predicted seconds of one product."""
        product, size = MatmulShape(1, rows, columns, reduction), getattr(torch, dtype).itemsize
        if self.matrix is None:
            multiplying = product.flops * (reduction + self.fill) / reduction / self.peak_flops[dtype]
            streaming = product.bytes(size) / self.stream_bytes_per_second
            return self.start_seconds + max(multiplying + self.passes * streaming, streaming)
        return product_seconds(product, size, self.matrix, self.peak_flops[dtype], self.stream_bytes_per_second)


def fit_products(
    products: Sequence[TimedProduct], shipped: Device | None = None, stream_bytes_per_second: float = inf
) -> MultiplyFit:
    """Fit the time of matrix products, with the tiles of a shipped device where these fit better."""
    products = [one for one in products if not one.left_out]
    plain = _fit_plain(products, stream_bytes_per_second)
    if shipped is None or shipped.matrix is None:
        return plain
    tiled = _fit_tiled(products, plain, shipped, shipped.matrix, stream_bytes_per_second)
    return min(plain, tiled, key=lambda fit: fit.error)


def _fit_tiled(
    products: Sequence[TimedProduct], plain: MultiplyFit, shipped: Device, matrix: MatmulUnit, stream: float
) -> MultiplyFit:
    """Fit the peak of each dtype, with the tiles and overheads of a shipped device."""
    peaks = {}
    for dtype, plain_peak in plain.peak_flops.items():
        peak = shipped.peak_flops.get(dtype, plain_peak)
        fit = MultiplyFit(matrix.start_seconds, matrix.fill, {dtype: peak}, 0.0, matrix, stream)
        shares = []
        for one in products:
            if one.dtype == dtype:
                expected = fit.seconds(dtype, one.rows, one.reduction, one.columns) - matrix.start_seconds
                shares.append(expected / max(one.seconds - matrix.start_seconds, one.seconds / 10))
        peaks[dtype] = peak * median(shares)
    return _with_error(MultiplyFit(matrix.start_seconds, matrix.fill, peaks, 0.0, matrix, stream), products)


def _with_error(fit: MultiplyFit, products: Sequence[TimedProduct]) -> MultiplyFit:
    guesses = ((fit.seconds(one.dtype, one.rows, one.reduction, one.columns), one.seconds) for one in products)
    return replace(fit, error=_median_error(guess / seconds for guess, seconds in guesses))


def _fit_plain(products: Sequence[TimedProduct], stream_bytes_per_second: float) -> MultiplyFit:
    """Fit start, fill and passes to the dtype with most measurements, then a peak to each dtype."""
    dtypes = sorted({one.dtype for one in products}, key=lambda name: -sum(one.dtype == name for one in products))
    first = [one for one in products if one.dtype == dtypes[0]]
    seconds = np.array([one.seconds for one in first])
    flops, steps = _array(one.flops for one in first), _array(one.flops / one.reduction for one in first)
    streaming = _array(one.bytes / stream_bytes_per_second for one in first)
    terms = [np.ones(len(first)), flops, steps, *([streaming] if streaming.any() else [])]
    start, per_flop, per_step, *passes = _least_squares(terms, seconds)
    # Too few products can leave no per-flop term, or no start: the fastest product then gives the peak.
    per_flop = per_flop or min(one.seconds / one.flops for one in first)
    fit = MultiplyFit(start, max(1, round(per_step / per_flop)), {}, 0.0, None, stream_bytes_per_second, sum(passes))
    peaks = {}
    for dtype in dtypes:
        mine = [one for one in products if one.dtype == dtype]
        work = [one.flops * (one.reduction + fit.fill) / one.reduction for one in mine]
        others = [start + fit.passes * one.bytes / stream_bytes_per_second for one in mine]
        spent = [max(one.seconds - other, one.seconds / 10) for one, other in zip(mine, others, strict=True)]
        peaks[dtype] = median(done / time for done, time in zip(work, spent, strict=True))
    return _with_error(replace(fit, peak_flops=peaks), products)


def fit_sustained(fit: MultiplyFit, chain: TimedChain | None) -> float:
    """Return the share of the product rate that a training step reaches."""
    if chain is None or chain.dtype not in fit.peak_flops:
        return 1.0
    return min(1.0, chain.count * fit.seconds(chain.dtype, chain.rows, chain.width, chain.width) / chain.seconds)


def fit_attention(
    attentions: Sequence[TimedAttention], peak_flops: Mapping[str, float], shipped: AttentionRates | None = None
) -> AttentionRates | None:
    """Fit the share of the peak that fused attention reaches; `rows` comes from the shipped device."""
    attentions = [one for one in attentions if not one.left_out]
    if not attentions:
        return None

    def share(causal: bool, backward: bool, head_dim: int | None = None) -> float:
        mine = [one for one in attentions if one.causal == causal and head_dim in (None, one.head_dim)]
        return median(one.flops_per_second(backward) / peak_flops[one.dtype] for one in mine)

    dims = sorted({one.head_dim for one in attentions})
    times = {head_dim: 1 / share(False, False, head_dim) for head_dim in dims}
    softmax = 0 if shipped is None else shipped.softmax
    if len(dims) > 1:
        few, many = dims[0], dims[-1]
        # share(head_dim) = forward / (1 + softmax / head_dim), so 1 / share is linear in 1 / head_dim.
        slope = max(0.0, (times[few] - times[many]) / (1 / few - 1 / many))
        limit = times[many] - slope / many
        softmax = round(slope / limit) if limit > 0 else softmax
    forward = median((1 + softmax / head_dim) / spent for head_dim, spent in times.items())
    return AttentionRates(
        1 if shipped is None else shipped.rows,
        min(1.0, forward),
        min(1.0, share(False, True)),
        min(1.0, share(True, False) / share(False, False)),
        min(1.0, share(True, True) / share(False, True)),
        softmax,
    )


def fit_ops(measurements: Measurements) -> tuple[dict[str, float], dict[str, float]]:
    """Return bytes per second of ops slower than the memory stream, by name: forward, backward."""
    found: tuple[dict[str, float], dict[str, float]] = ({}, {})
    # A host beside the device runs ahead, so its overhead is not part of the op's time.
    overhead = measurements.overhead_seconds if measurements.own_host else 0.0
    for op in measurements.ops:
        ways = ((op.forward_bytes, op.forward_seconds), (op.backward_bytes, op.backward_seconds))
        for rates, (size, seconds) in zip(found, ways, strict=True):
            rate = size / max(seconds - overhead, seconds / 10)
            if 0 < rate < measurements.stream_bytes_per_second:
                rates[op.name] = rate
    return found


# -- collectives ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CollectiveFit:
    """Constants of one collective over the links of one level."""

    kind: str
    level: int
    # Group sizes of the measurements that were fitted.
    ranks: tuple[int, ...]
    algorithm: str
    base_seconds: float
    hop_seconds: float
    bytes_per_second: float
    pipelined: bool
    error: float


def fit_collectives(collectives: Iterable[TimedCollective]) -> list[CollectiveFit]:
    """Fit each collective at each level; the algorithm found inside nodes is also taken across nodes.

    On one node each group size has its own fit: ranks that share cores wait longer than the hop count predicts.
    """
    fits: list[CollectiveFit] = []
    fitted = [one for one in collectives if not one.left_out]
    if all(one.level == 0 for one in fitted):
        parts: dict[tuple[str, int], list[TimedCollective]] = {}
        for one in fitted:
            parts.setdefault((one.kind, one.ranks), []).append(one)
        return [fit_kind(part, CANDIDATES[kind][:1]) for (kind, _), part in parts.items()]
    for kind in dict.fromkeys(one.kind for one in fitted):
        algorithms = CANDIDATES[kind]
        for level in sorted({one.level for one in fitted if one.kind == kind}):
            mine = [one for one in fitted if (one.kind, one.level) == (kind, level)]
            fits.append(fit_kind(mine, algorithms))
            algorithms = (fits[-1].algorithm,)
    return fits


def fit_kind(measured: Sequence[TimedCollective], algorithms: Sequence[str]) -> CollectiveFit:
    """Fit every algorithm to the measurements of one collective at one level, and return the best fit."""
    kind, level = measured[0].kind, measured[0].level
    fits = [
        fit
        for algorithm in algorithms
        for pipelined in (False, True)
        if (fit := _fit(kind, level, algorithm, pipelined, measured)) is not None
    ]
    return min(fits, key=lambda fit: fit.error)


def _fit(
    kind: str, level: int, algorithm: str, pipelined: bool, measured: Sequence[TimedCollective]
) -> CollectiveFit | None:
    shapes = {ranks: _hops_and_traffic(algorithm, kind, ranks) for ranks in {one.ranks for one in measured}}
    known = {ranks: shape for ranks, shape in shapes.items() if shape is not None}
    if len(known) < len(shapes):
        return None
    hops = _array(known[one.ranks][0] for one in measured)
    traffic = _array(known[one.ranks][1] * one.buffer_bytes for one in measured)
    seconds = _array(one.seconds for one in measured)
    # Base and hop time cannot be separated with one group size: the base is then left at zero.
    steady = np.ones(len(measured)) if len(shapes) > 1 else np.zeros(len(measured))
    extra = np.zeros(len(measured))
    base = hop = per_byte = 0.0
    for _ in range(FILL_ROUNDS if pipelined else 1):
        # The fill time depends on the other constants: iterate, with steps damped by half.
        base, hop, per_byte = _least_squares([steady, hops, traffic], seconds - extra, seconds)
        if pipelined:
            extra = (extra + np.sqrt((base + hop * hops) * traffic * per_byte)) / 2
    if per_byte <= 0:
        # Too few or too noisy measurements: take the best bandwidth that was seen.
        per_byte = float((seconds / traffic).min())
    pairs = [
        (base + hop * count, passed * per_byte / one.buffer_bytes)
        for one, count, passed in zip(measured, hops, traffic, strict=True)
    ]
    curves = [Curve(algorithm, *pair, sqrt(prod(pair)) if pipelined else 0.0) for pair in pairs]
    error = _median_error(
        curve.seconds(one.buffer_bytes) / one.seconds for curve, one in zip(curves, measured, strict=True)
    )
    return CollectiveFit(kind, level, tuple(sorted(shapes)), algorithm, base, hop, 1 / per_byte, pipelined, error)


# Steps of the fixed-point iteration; each halves the distance, so 30 reach 1e-9.
FILL_ROUNDS = 30


def _hops_and_traffic(algorithm: str, kind: str, ranks: int) -> tuple[float, float] | None:
    """Return hops and traffic of an algorithm on one level, None if it cannot run the collective."""
    span = LevelSpan(TopologyLevel("level", "link", 1, 1.0), ranks, 1, 1.0, 1.0)
    phases = ALGORITHMS[algorithm](kind, (span,))
    if phases is None:
        return None
    return sum(phase.hops[0] for phase in phases), sum(phase.traffic[0] for phase in phases)


def _least_squares(
    columns: Sequence[NDArray[np.float64]], target: NDArray[np.float64], scale: NDArray[np.float64] | None = None
) -> list[float]:
    """Return the non-negative coefficients with the least sum of squared relative errors.

    Every subset of columns is solved without the sign constraint: with three columns that is exact and cheap.
    """
    weights = 1 / (target if scale is None else scale)
    matrix, goal = np.stack(columns, axis=1) * weights[:, None], target * weights
    best: tuple[float, list[float]] = (float("inf"), [0.0] * len(columns))
    for count in range(1, len(columns) + 1):
        for chosen in combinations(range(len(columns)), count):
            part = matrix[:, chosen]
            unit = np.maximum(np.linalg.norm(part, axis=0), 1e-300)
            found = np.linalg.lstsq(part / unit, goal, rcond=None)[0] / unit
            if (found < 0).any():
                continue
            loss = float(((part @ found - goal) ** 2).sum())
            if loss < best[0] * (1 - 1e-9):
                coefficients = [0.0] * len(columns)
                for i, value in zip(chosen, found, strict=True):
                    coefficients[i] = float(value)
                best = (loss, coefficients)
    return best[1]


def _array(values: Iterable[float]) -> NDArray[np.float64]:
    return np.array(list(values), dtype=np.float64)


def _median_error(ratios: Iterable[float]) -> float:
    return median(abs(ratio - 1) for ratio in ratios)


def prediction_errors(cluster: Cluster, measurements: Measurements) -> dict[str, Errors]:
    """Return the median relative error of each collective: on fitted measurements, on those left out."""
    found: dict[str, Errors] = {}
    for kind in dict.fromkeys(one.kind for one in measurements.collectives):
        errors: dict[bool, list[float]] = {False: [], True: []}
        for one in measurements.collectives:
            if one.kind == kind:
                guess = _network_of(cluster, measurements, one).seconds(kind, ("group",), one.buffer_bytes)
                errors[one.left_out].append(abs(guess / one.seconds - 1))
        found[kind] = (median(errors[False]) if errors[False] else None, median(errors[True]) if errors[True] else None)
    return found


def _network_of(cluster: Cluster, measurements: Measurements, one: TimedCollective) -> Network:
    """Return the network of a mesh whose axis `group` spans the ranks of a measurement."""
    if one.level == 0:
        return Network(cluster, SubMesh({"others": measurements.ranks // one.ranks, "group": one.ranks}))
    inside = measurements.ranks_per_node
    sizes = {"others": measurements.nodes // one.ranks, "group": one.ranks, "inside": inside}
    return Network(cluster, SubMesh(sizes))
