"""Matrix products: what the cost model says and what was measured; `--fit` finds the constants of `[matrix]`.

    python -m benchmarks.gemm a100 micro_gemm_sweeps.csv
    python -m benchmarks.gemm a100 micro_gemm_sweeps.csv --fit

The file has the columns gpu, sweep, batch, m, n_reduction, k_out, tflops: products of [m, n] by [n, k] in two bytes.
Each rate is that of the slowest of 200 runs.
"""

from __future__ import annotations

import argparse
import csv
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from statistics import mean, median
from types import MappingProxyType

from autopar.cost.compute.matmul_time import MatmulShape, MatmulUnit, Tile, product_seconds
from autopar.cost.hardware.cluster import Device, load_device
from benchmarks.published.products import slowest_seconds

TILES = ((256, 128), (128, 128), (128, 64), (64, 64))
LARGE_FLOPS = 1e9


@dataclass(frozen=True)
class Row:
    sweep: str
    product: MatmulShape
    seconds: float


def read(path: Path, gpu: str) -> list[Row]:
    """Return the rows of a GPU; those whose rate was rounded to nothing are left out."""
    found = []
    with path.open() as lines:
        for row in csv.DictReader(lines):
            if row["gpu"].lower().startswith(gpu.lower()) and float(row["tflops"]) >= 0.1:
                batch, rows, columns, reduction = (int(row[key]) for key in ("batch", "m", "k_out", "n_reduction"))
                product = MatmulShape(batch, rows, columns, reduction)
                found.append(Row(row["sweep"], product, product.flops / (float(row["tflops"]) * 1e12)))
    return found


def errors(rows: Sequence[Row], matrix: MatmulUnit | None, device: Device) -> list[float]:
    """Predicted over measured, less one."""
    peak, stream = device.peak_flops["float16"], device.stream
    alone = (product_seconds(row.product, 2, matrix, peak, stream) for row in rows)
    return [slowest_seconds(device, seconds) / row.seconds - 1 for seconds, row in zip(alone, rows, strict=True)]


def report(rows: list[Row], matrix: MatmulUnit | None, device: Device) -> None:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.sweep].append(row)
        groups["above 1 GFLOP" if row.product.flops > LARGE_FLOPS else "below 1 GFLOP"].append(row)
    print(f"{'sweep':28} rows  median |error|  median error")
    for name, members in groups.items():
        found = errors(members, matrix, device)
        print(f"{name:28} {len(members):4}  {median(map(abs, found)):13.1%}  {median(found):12.1%}")


def fit(rows: list[Row], device: Device, processors: int, rounds: int = 20) -> MatmulUnit:
    """Return the constants with the smallest mean |log error|, every sweep counting alike; one constant at a time."""
    draw = random.Random(0)
    sweeps: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.product.flops > LARGE_FLOPS / 5:
            sweeps[row.sweep].append(row)
    sample = [row for members in sweeps.values() for row in draw.sample(members, min(len(members), 40))]
    values = {"start": 1e-5, "fill": 100.0, "split": 1e-5, "2": 0.3, "4": 0.6, "8": 0.6}
    reached = max(row.product.flops / row.seconds for row in rows) / device.peak_flops["float16"]
    values |= {f"tile{i}": reached * (1 - 0.1 * i) for i in range(len(TILES))}

    def loss(values: Mapping[str, float]) -> float:
        found = errors(sample, made(values, processors), device)
        return mean(abs(log(1 + error)) for error in found)

    best, step = loss(values), 1.4
    for _ in range(rounds):
        before = best
        for name in values:
            for factor in (step, 1 / step):
                changed = values | {name: values[name] * factor}
                if name.startswith(("tile", "2", "4", "8")):
                    changed[name] = min(changed[name], 1.0)
                if (found := loss(changed)) < best:
                    best, values = found, changed
        if best > 0.995 * before:
            step = 1 + (step - 1) / 2
    return made(values, processors)


def made(values: Mapping[str, float], processors: int) -> MatmulUnit:
    tiles = tuple(Tile(*size, values[f"tile{i}"]) for i, size in enumerate(TILES))
    aligned = MappingProxyType({unit: values[unit] for unit in ("2", "4", "8")})
    return MatmulUnit(processors, values["start"], round(values["fill"]), values["split"], aligned, tiles)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", help="a device of cost_models/devices, as in a100")
    parser.add_argument("file", type=Path)
    parser.add_argument("--gpu", help="the name in the file; by default that of the device up to its first dash")
    parser.add_argument("--fit", action="store_true")
    options = parser.parse_args()
    device = load_device(options.device)
    rows = read(options.file, options.gpu or options.device.partition("-")[0])
    matrix = device.matrix
    if options.fit:
        assert matrix is not None, "the number of processors is no matter of fitting: it stands in [matrix]"
        matrix = fit(rows, device, matrix.processors)
        print(matrix)
    report(rows, matrix, device)


if __name__ == "__main__":
    main()
