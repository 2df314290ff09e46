"""The published measurements of matrix products: each row priced on the device it was measured on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.cost.compute.matmul_time import MatmulShape, product_seconds
from autopar.cost.hardware.cluster import Device, load_device
from benchmarks.published.metrics import Pair
from benchmarks.published.readers.rows import Row, read_rows
from benchmarks.published.sizes import JudgedBySize, Timing, judge_by_size

__all__ = ["READERS", "MeasuredProduct", "by_software", "judge", "predicted_seconds", "slowest_seconds", "tables"]

# Flops below which the start of a kernel counts for more than its rate.
LARGE_FLOPS = 1e9
# Flops above which the limit of power counts.
LONG_FLOPS = 1e12
ITEMSIZE = 2
# Time between the events around a kernel of a device that was idle, beyond the kernel's own. Small products of an A100
# take so much more in EleutherAI's sweeps than where products follow one another.
EVENTS_SECONDS = 20e-6


@dataclass(frozen=True)
class MeasuredProduct:
    # None: autopar has no such device.
    device: str | None
    dtype: str
    product: MatmulShape
    seconds: float
    # Which half of a table, where one half was used to fit a device: `fit` or `held`.
    half: str = ""
    software: str = ""
    # The slowest of many runs, each of which was timed alone.
    slowest: bool = False


def tables(paths: Iterable[Path]) -> list[JudgedBySize]:
    """Judge each file that is one of these tables: the whole of it, then each device in it, then each software."""
    found: list[JudgedBySize] = []
    for path in paths:
        reader = next((reader for part, reader in READERS.items() if part in path.name), None)
        if reader is not None:
            found += judge(path.stem, [reader(row) for row in read_rows(path)])
    return found


def judge(name: str, measured: Sequence[MeasuredProduct]) -> list[JudgedBySize]:
    devices = sorted({one.device for one in measured if one.device is not None})
    parts = [(name, list(measured))]
    if len(devices) > 1:
        parts += [(f"{name}, {device}", [one for one in measured if one.device == device]) for device in devices]
    for key in sorted({_key(one) for one in measured if one.half}):
        own = [one for one in measured if _key(one) == key]
        long = [one for one in own if one.product.flops > LONG_FLOPS]
        parts.append((f"{name}, {', '.join(key)}", own))
        parts += [(f"{name}, {', '.join(key)}, above 1 TFLOP", long)] if long else []
    return [judge_by_size(part, map(_timing, rows)) for part, rows in parts]


def _key(one: MeasuredProduct) -> tuple[str, ...]:
    return one.device or "", one.software, one.half


def _timing(one: MeasuredProduct) -> Timing:
    if one.device is None:
        return Timing(one.product.flops > LARGE_FLOPS, None)
    predicted = predicted_seconds(one.device, one.dtype, one.product)
    if one.slowest:
        predicted = slowest_seconds(load_device(one.device), predicted)
    return Timing(one.product.flops > LARGE_FLOPS, Pair(predicted, one.seconds))


def predicted_seconds(device_name: str, dtype: str, product: MatmulShape) -> float:
    device = load_device(device_name)
    return product_seconds(product, ITEMSIZE, device.matrix, device.peak_flops[dtype], device.stream)


def slowest_seconds(device: Device, seconds: float) -> float:
    """Return the time of a product in the slowest of 200 runs, each of them timed by events and waited for."""
    return seconds / device.sustained_fraction + EVENTS_SECONDS


# -- readers ----------------------------------------------------------------------------------------------------------

DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
SERVED = {"A100": "a100-80", "H100": "h100", "B200": "b200"}
SWEPT = {"A100": "a100-40", "V100": "v100"}
BEST = {
    "A100 SXM": "a100-80",
    "H100 SXM": "h100",
    "H200 SXM": "h200",
    "B200 SXM": "b200",
    "GB200 SXM": "gb200",
    "B300 SXM": "b300",
    "AMD MI300X": "mi300x",
    "AMD MI355X": "mi355x",
}


def _swept(row: Row) -> MeasuredProduct:
    """EleutherAI's sweeps: A[m, n] @ B[n, k], `batch` times; n is the reduction.

    Each time is the slowest of 200 runs, timed by events with a wait after each (sizing/utils.py).
    """
    dtype = DTYPES.get(row.text("dtype"), "")
    device = SWEPT.get(row.text("gpu").split(" ")[0]) if dtype else None
    product = MatmulShape(row.whole("batch"), row.whole("m"), row.whole("k_out"), row.whole("n_reduction"))
    teraflops = row.number("tflops")
    if teraflops <= 0:  # rounded to nothing
        return MeasuredProduct(None, dtype, product, 1.0)
    return MeasuredProduct(device, dtype, product, product.flops / (teraflops * 1e12), slowest=True)


def _best(row: Row) -> MeasuredProduct:
    """Return the best shape that was found for a device."""
    dtype = DTYPES.get(row.text("dtype"), "")
    device = BEST.get(row.text("accelerator").removeprefix("NVIDIA ")) if dtype else None
    try:
        rows, columns, reduction = map(int, row.text("best_shape_MxNxK").split("x"))
    except ValueError:
        raise row.fail("best_shape_MxNxK", "a shape as in 4096x4096x4096") from None
    product = MatmulShape(1, rows, columns, reduction)
    return MeasuredProduct(device, dtype, product, product.flops / (row.number("max_achieved_tflops") * 1e12))


def by_software(row: Row) -> MeasuredProduct:
    """Return a product as an inference server runs it; half of the rows were used to fit the device.

    TensorRT-LLM's were measured with random numbers. The weights of vLLM's layers were never written (its collector is
    vllm/collect_gemm.py of the source), and a device that multiplies zeros has power left: no plan runs so fast.
    """
    dtype, device = row.text("dtype"), SERVED.get(row.text("gpu"))
    product = MatmulShape(1, row.whole("m"), row.whole("n"), row.whole("k"))
    return MeasuredProduct(
        device, dtype, product, row.number("microseconds") * 1e-6, row.text("half"), row.text("software")
    )


# Keys are parts of the file's name.
READERS: Mapping[str, Callable[[Row], MeasuredProduct]] = {
    "micro_gemm_sweeps": _swept,
    "micro_gemm_mamf": _best,
    "micro_products": by_software,
}
