"""Published matrix products: shapes are read the right way round, and judged by size."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.cost.compute.matmul_time import MatmulShape
from autopar.cost.hardware.cluster import load_device
from benchmarks.published.products import predicted_seconds, slowest_seconds, tables
from benchmarks.published.readers.rows import TableError

SWEEP = (
    "gpu,sweep,dtype,batch,m,n_reduction,k_out,tflops\n"
    "A100,x,fp16,1,4096,512,4096,{tflops}\n"
    "A100,x,fp16,1,64,64,64,0.5\n"
    "Z100,x,fp16,1,4096,4096,4096,100\n"
    "A100,x,fp16,1,8,8,8,0.000\n"
)


def test_the_reduction_is_the_second_size(tmp_path: Path) -> None:
    product = MatmulShape(1, 4096, 4096, 512)
    seconds = slowest_seconds(load_device("a100-40"), predicted_seconds("a100-40", "float16", product))
    path = tmp_path / "micro_gemm_sweeps_x.csv"
    path.write_text(SWEEP.format(tflops=product.flops / seconds / 1e12))
    (judged,) = tables([path])
    assert (judged.rows, judged.left_out, judged.large_rows, judged.small_rows) == (4, 2, 1, 1)
    assert judged.large_error == pytest.approx(0, abs=1e-6)


def test_twice_the_measured_time_is_an_error_of_one(tmp_path: Path) -> None:
    product = MatmulShape(1, 4096, 4096, 512)
    seconds = slowest_seconds(load_device("a100-40"), predicted_seconds("a100-40", "float16", product))
    path = tmp_path / "micro_gemm_sweeps_x.csv"
    path.write_text(SWEEP.format(tflops=2 * product.flops / seconds / 1e12))
    assert tables([path])[0].large_error == pytest.approx(1.0)


def test_a_shape_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "micro_gemm_mamf.csv"
    path.write_text("accelerator,dtype,max_achieved_tflops,best_shape_MxNxK\nNVIDIA H100 SXM,bf16,794.5,4096 by 4096\n")
    with pytest.raises(TableError, match="expected a shape as in 4096x4096x4096"):
        tables([path])


def test_each_half_of_a_software_is_judged_apart(tmp_path: Path) -> None:
    product = MatmulShape(1, 8192, 8192, 8192)
    micro = predicted_seconds("h100", "bfloat16", product) * 1e6
    path = tmp_path / "micro_products_x.csv"
    path.write_text(
        "gpu,software,dtype,m,n,k,microseconds,half\n"
        f"H100,trtllm 1,bfloat16,8192,8192,8192,{micro},held\n"
        f"H100,vllm 1,bfloat16,8192,8192,8192,{micro / 2},held\n"
        f"H100,vllm 1,bfloat16,64,64,64,{micro},fit\n"
    )
    errors = {one.name: one.large_error for one in tables([path])}
    assert errors["micro_products_x, h100, trtllm 1, held"] == pytest.approx(0.0, abs=1e-9)
    assert errors["micro_products_x, h100, vllm 1, held, above 1 TFLOP"] == pytest.approx(1.0)
    assert "micro_products_x, h100, vllm 1, fit, above 1 TFLOP" not in errors
