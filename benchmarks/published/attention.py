"""The published measurements of fused causal attention, forward: each row priced on the device it was measured on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.cost.compute.attention_time import attention_fractions
from autopar.cost.hardware.cluster import load_device
from benchmarks.published.metrics import Pair
from benchmarks.published.readers.rows import Row, read_rows
from benchmarks.published.sizes import JudgedBySize, Timing, judge_by_size

__all__ = ["READERS", "MeasuredAttention", "predicted_flops_per_second", "read", "tables"]

# Tokens from which a kernel runs at its rate rather than starts.
LONG = 2048
DEVICES = {"A100": "a100-80", "H100": "h100", "B200": "b200"}


@dataclass(frozen=True)
class MeasuredAttention:
    device: str | None
    software: str
    head_dim: int
    tokens: int
    flops_per_second: float
    # `fit` if constants of a device file were read off this row, `held` otherwise.
    half: str


def tables(paths: Iterable[Path]) -> list[JudgedBySize]:
    """Judge each file that is such a table: the whole of it, and each half of each device and software."""
    found: list[JudgedBySize] = []
    for path in paths:
        if any(part in path.name for part in READERS):
            found += judge(path.stem, read(path))
    return found


def read(path: Path) -> list[MeasuredAttention]:
    """Return the rows of a table."""
    return [_read(row) for row in read_rows(path)]


def judge(name: str, measured: Sequence[MeasuredAttention]) -> list[JudgedBySize]:
    parts = [(name, list(measured))]
    for key in sorted({(one.device or "", one.software, one.half) for one in measured}):
        own = [one for one in measured if (one.device or "", one.software, one.half) == key]
        parts.append((f"{name}, {', '.join(key)}", own))
    return [judge_by_size(part, map(_timing, rows)) for part, rows in parts]


def _timing(one: MeasuredAttention) -> Timing:
    # Seconds of equal FLOPs.
    pair = None
    if one.device is not None:
        predicted = predicted_flops_per_second(one.device, one.head_dim, one.tokens)
        pair = Pair(1 / predicted, 1 / one.flops_per_second)
    return Timing(one.tokens >= LONG, pair)


def predicted_flops_per_second(device_name: str, head_dim: int, tokens: int) -> float:
    """Return the rate of causal attention that fills a device."""
    device = load_device(device_name)
    forward, _ = attention_fractions(device.attention, 2 * head_dim, tokens / 2, is_causal=True)
    return forward * device.peak_flops["bfloat16"]


def _read(row: Row) -> MeasuredAttention:
    device = DEVICES.get(row.text("gpu"))
    rate = row.number("teraflops") * 1e12
    return MeasuredAttention(
        device, row.text("software"), row.whole("head_dim"), row.whole("tokens"), rate, row.text("half")
    )


# Parts of the file's name.
READERS = ("micro_attention",)
