"""The time of matrix products: tiles, waves, alignment; and a few measured ones."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import MappingProxyType

import pytest

from autopar.cost.compute.matmul_time import MatmulShape, MatmulUnit, Tile, product_seconds
from autopar.cost.hardware.cluster import load_device
from benchmarks.gemm import LARGE_FLOPS, errors, read
from benchmarks.published.products import by_software, predicted_seconds, slowest_seconds
from benchmarks.published.readers.rows import read_rows

PEAK, STREAM = 1e12, 1e12
PLAIN = MatmulUnit(10, 0.0, 0, 0.0, MappingProxyType({}), (Tile(100, 100, 1.0),))


def seconds(product: MatmulShape, matrix: MatmulUnit | None = PLAIN, itemsize: int = 2) -> float:
    return product_seconds(product, itemsize, matrix, PEAK, STREAM)


def test_a_full_wave_runs_at_the_peak() -> None:
    product = MatmulShape(1, 1000, 100, 1000)
    assert seconds(product) == pytest.approx(product.flops / PEAK)


def test_one_tile_more_is_one_wave_more() -> None:
    assert seconds(MatmulShape(1, 1001, 100, 200)) == pytest.approx(2 * seconds(MatmulShape(1, 1000, 100, 200)))
    assert seconds(MatmulShape(1, 1100, 100, 200)) == seconds(MatmulShape(1, 1001, 100, 200))
    assert seconds(MatmulShape(11, 100, 100, 200)) == seconds(MatmulShape(1, 1001, 100, 200)), (
        "a batch is dealt out too"
    )


def test_few_tiles_cut_the_reduction() -> None:
    long, short = MatmulShape(1, 100, 100, 8192), MatmulShape(1, 100, 100, 500)
    whole = 2 * 100 * 100 * long.reduction / (PEAK / PLAIN.processors)
    assert seconds(long) < whole / 4
    assert seconds(short) == pytest.approx(2 * 100 * 100 * 500 / (PEAK / PLAIN.processors)), "too short to be cut"


def test_the_roofline_below_everything() -> None:
    thin = MatmulShape(1, 4096, 1, 4096)
    assert seconds(thin, None) == thin.bytes(2) / STREAM
    assert seconds(thin) >= thin.bytes(2) / STREAM
    assert seconds(MatmulShape(1, 1000, 1000, 1000), None) == 2e9 / PEAK


@pytest.mark.parametrize(("columns", "share"), [(512, 1.0), (500, 0.8), (502, 0.5), (501, 0.2)])
def test_rows_off_the_grid_are_slower(columns: int, share: float) -> None:
    matrix = replace(PLAIN, aligned_fraction=MappingProxyType({"2": 0.2, "4": 0.5, "8": 0.8}))
    product = MatmulShape(1, 1000, columns, 496)
    assert seconds(product, matrix) == pytest.approx(seconds(product) / share)


@pytest.mark.parametrize(
    ("device", "rows", "columns", "reduction", "teraflops"),
    [
        # EleutherAI/cookbook@27dff48, sizing/results, the slowest of 200: columns off the grid, a wave too many, small
        ("a100-40", 27648, 256, 4096, 227),
        ("a100-40", 27648, 258, 4096, 117),
        ("a100-40", 8192, 51200, 14273, 72),
        ("a100-40", 4096, 4096, 4096, 249),
        ("v100", 27648, 384, 4096, 77),
        ("v100", 4096, 4096, 4096, 84),
        # openxla/xla, xla/service/gpu/model/matmul_interpolator_data.h, sm_90: a small, a short and a large product
        ("h100", 1024, 2048, 256, 139.5),
        ("h100", 4096, 4096, 256, 392.2),
        ("h100", 512, 4096, 1024, 373.3),
        ("h100", 4096, 4096, 4096, 783.3),
    ],
)
def test_measured(device: str, rows: int, columns: int, reduction: int, teraflops: float) -> None:
    found = load_device(device)
    product = MatmulShape(1, rows, columns, reduction)
    predicted = product_seconds(product, 2, found.matrix, found.peak_flops["float16"], found.stream)
    if device != "h100":
        predicted = slowest_seconds(found, predicted)
    assert product.flops / predicted / 1e12 == pytest.approx(teraflops, rel=0.15)


@pytest.mark.parametrize(("device", "most"), [("a100-40", 0.06), ("v100", 0.12)])
def test_published_sweeps(device: str, most: float) -> None:
    folder = os.environ.get("AUTOPAR_DATA")
    if folder is None:
        pytest.skip("AUTOPAR_DATA does not say where the published tables are")
    rows = read(Path(folder, "published", "micro_gemm_sweeps_a100_v100.csv"), device.partition("-")[0])
    large = [row for row in rows if row.product.flops > LARGE_FLOPS]
    assert len(large) > 300
    found = load_device(device)
    assert median(map(abs, errors(large, found.matrix, found))) < most


def test_long_products_meet_the_limit_of_power() -> None:
    """The rate falls from 0.1 to 30 TFLOP by the logarithm, and no further."""
    cold = replace(PLAIN, start_seconds=0.0, fill=0)
    hot = replace(cold, throttled_fraction=0.8)

    def slower(reduction: int) -> float:
        product = MatmulShape(1, 8192, 8192, reduction)
        return product_seconds(product, 2, hot, 1e15, 1e18) / product_seconds(product, 2, cold, 1e15, 1e18)

    per_step = 2 * 8192 * 8192
    assert slower(int(0.9e11 / per_step)) == 1.0
    assert slower(int((1e11 * 3e13) ** 0.5 / per_step)) == pytest.approx(1 / 0.9, rel=1e-3)
    assert [slower(int(flops / per_step)) for flops in (3.1e13, 1e14)] == pytest.approx([1 / 0.8] * 2, rel=1e-4)


MEASURED = Path(__file__).parents[2] / "benchmarks" / "published" / "measured"


@pytest.mark.parametrize(("device", "software"), [("h100", "trtllm"), ("b200", "trtllm"), ("a100-80", "vllm")])
def test_the_half_of_products_that_was_not_fitted(device: str, software: str) -> None:
    """Products of random numbers; those of an A100 have weights that nobody wrote, and its constants allow for it."""
    rows = [by_software(row) for row in read_rows(MEASURED / "micro_products_aiconfigurator.csv")]
    held = [one for one in rows if one.device == device and one.half == "held" and one.software.startswith(software)]
    assert len(held) > 70

    def error(least: float) -> float:
        own = (one for one in held if one.product.flops > least)
        return median(abs(predicted_seconds(device, one.dtype, one.product) / one.seconds - 1) for one in own)

    assert error(1e9) < 0.08
    assert error(1e12) < 0.05


def test_products_of_random_numbers_meet_the_limit_of_power() -> None:
    """Without the limit, long products of random numbers would be more than 10 % too fast."""
    rows = [by_software(row) for row in read_rows(MEASURED / "micro_products_aiconfigurator.csv")]
    for name in ("h100", "b200"):
        device = load_device(name)
        assert device.matrix is not None
        cold = replace(device.matrix, throttled_fraction=1.0)
        long = [one for one in rows if one.device == name and one.product.flops > 1e12 and "trtllm" in one.software]
        predicted = (
            product_seconds(one.product, 2, cold, device.peak_flops["bfloat16"], device.stream) for one in long
        )
        assert median(seconds / one.seconds for seconds, one in zip(predicted, long, strict=True)) < 0.9


def test_rows_of_experts_need_no_alignment() -> None:
    """Their gradient sums as many rows as data sends to an expert; an even number is as fast as its neighbours."""
    device = load_device("h100")
    aligned, beside = (
        product_seconds(MatmulShape(4, 7168, 4096, rows, True), 2, device.matrix, 989e12, 2.95e12)
        for rows in (4096, 4097.6)
    )
    assert beside == pytest.approx(aligned, rel=0.01)
    assert product_seconds(MatmulShape(4, 7168, 4096, 4097.6), 2, device.matrix, 989e12, 2.95e12) > 2 * aligned
