"""Calibrating a GPU, without one: a timer and a device that are made up, and times that a known device would take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autopar.cost.calibration import measure as measuring
from autopar.cost.calibration.fit import (
    Measurements,
    TimedChain,
    TimedCollective,
    TimedProduct,
    fit_attention,
    fit_collectives,
    fit_products,
)
from autopar.cost.calibration.measure import MeasuringBudget, RankPlace
from autopar.cost.calibration.op_trials import TRIALS, TimedAttention, TimedOp, attention_trials
from autopar.cost.calibration.write_cluster import cluster_text
from autopar.cost.compute.attention_time import BACKWARD_PRODUCTS
from autopar.cost.compute.matmul_time import MatmulShape, product_seconds
from autopar.cost.hardware.cluster import Device, load_cluster, load_device, shipped_for
from autopar.cost.hardware.describe import links_of
from autopar.errors import AutoparError
from autopar.plans.cluster_here import cluster_here

# -- which cluster -----------------------------------------------------------------------------------------------------

FOUND = {
    ("NVIDIA A100-SXM4-40GB", 42.3e9): "a100-40",
    ("NVIDIA A100-SXM4-80GB", 85.1e9): "a100-80",
    ("NVIDIA A100 80GB PCIe", 85.0e9): "a100-80",
    ("NVIDIA H100 80GB HBM3", 85.0e9): "h100",
    ("NVIDIA H200", 150.1e9): "h200",
    ("NVIDIA B200", 191.5e9): "b200",
    ("NVIDIA GB200", 197.9e9): "gb200",
    ("NVIDIA B300 SXM6 AC", 288.4e9): "b300",
    ("NVIDIA GB300", 297.0e9): "gb300",
    ("AMD Instinct MI300X", 206.1e9): "mi300x",
    ("AMD Instinct MI355X", 309.2e9): "mi355x",
    ("NVIDIA L40S", 47.8e9): "l40s",
    ("Tesla V100-SXM2-32GB", 34.1e9): "v100",
    ("Tesla V100-SXM2-16GB", 16.9e9): None,
    ("NVIDIA GH200 480GB", 102e9): None,
    ("NVIDIA GH200 144G HBM3e", 150e9): None,
    ("NVIDIA H100 NVL", 100e9): None,
    ("NVIDIA GeForce RTX 4090", 25.3e9): None,
}


@pytest.mark.parametrize(("device", "memory"), FOUND)
def test_the_cluster_of_a_device(device: str, memory: float) -> None:
    found = shipped_for(device, memory)
    assert (None if found is None else found.name) == FOUND[device, memory]


def test_the_cluster_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def machine(name: str, memory: float) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        properties = SimpleNamespace(name=name, total_memory=memory)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)

    machine("NVIDIA A100-SXM4-80GB", 85.1e9)
    assert cluster_here().name == "a100-80"
    machine("NVIDIA GH200 480GB", 102e9)
    with pytest.raises(AutoparError) as error:
        cluster_here()
    assert str(error.value).startswith("no cluster has a device 'NVIDIA GH200 480GB' with 102 GB\nfix: measure it, ")


# -- what is measured --------------------------------------------------------------------------------------------------


def measured(device: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Measurements, list[Any]]:
    """Everything on a device, by a timer that takes what calls give and says that each took a millisecond."""
    results: list[Any] = []

    def own_seconds(place: RankPlace, budget: MeasuringBudget, run: Callable[[], object]) -> float:
        results.append(run())
        return 1e-3

    monkeypatch.setattr(measuring, "own_seconds", own_seconds)
    monkeypatch.setattr(measuring, "place_here", lambda: RankPlace(torch.device(device), 0, 1, 1))
    return measuring.measure(MeasuringBudget(0, 256, 0.01), lambda text: None), results


@pytest.mark.slow
def test_all_is_measured_on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = measured("meta", monkeypatch)
    assert not found.own_host
    assert [one.name for one in found.ops] == [trial.name for trial in TRIALS]
    assert {(one.causal, one.head_dim) for one in found.attentions} == {
        (c, d) for c in (False, True) for d in (64, 128)
    }
    assert len(found.attentions) == len(attention_trials("cuda"))
    assert found.chain is not None
    assert found.overhead_seconds == pytest.approx(1e-3 / (2 * len(TRIALS)))


@pytest.mark.slow
def test_products_are_of_numbers_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    found, results = measured("cpu", monkeypatch)
    assert found.own_host
    products = [x for x in results if isinstance(x, torch.Tensor) and x.shape == (256, 256) and not x.requires_grad]
    assert len(products) >= 3
    assert all(len(x.unique()) > 100 for x in products)


# -- what is written ---------------------------------------------------------------------------------------------------

HOST, SHARE, SOFTMAX = 25e-6, 0.9, 39


def made(device: Device) -> Measurements:
    """What a GPU would measure that is as the shipped one, at nine tenths of its rate, with another host."""
    matrix = device.matrix
    assert matrix is not None
    sizes = (256, 512, 1024, 2048, 4096, 8192)
    shapes = [(n, k, n) for n in sizes for k in (n, n // 4)] + [(n // 4, n, n) for n in sizes]
    products = tuple(
        TimedProduct(
            dtype,
            m,
            k,
            n,
            product_seconds(MatmulShape(1, m, n, k), size, matrix, SHARE * device.peak_flops[dtype], 3e12),
        )
        for dtype, size in (("float32", 4), ("bfloat16", 2), ("float16", 2))
        for m, k, n in shapes
    )
    attentions = []
    for causal, forward, backward in ((False, 0.5, 0.3), (True, 0.4, 0.27)):
        for head_dim in (64, 128):
            flops, peak = 1e11 * head_dim, SHARE * device.peak_flops["float16"]
            spent = flops / (peak * forward * head_dim / (head_dim + SOFTMAX))
            back = BACKWARD_PRODUCTS * flops / (peak * backward)
            attentions.append(TimedAttention(causal, spent, back, flops, "float16", head_dim))
    ops = (TimedOp("tanh", 5e8, 5e8 / 2e12, 8e8, 8e8 / 2.9e12), TimedOp("cumsum", 5e8, 5e8 / 4e11, 8e8, 8e8 / 5e11))
    one = product_seconds(MatmulShape(1, 8192, 4096, 4096), 2, matrix, SHARE * device.peak_flops["float16"], 3e12)
    return Measurements(
        "NVIDIA H100 80GB HBM3",
        85e9,
        4e-6,
        2.9e12,
        products,
        (),
        1,
        1,
        overhead_seconds=HOST,
        ops=ops,
        attentions=tuple(attentions),
        chain=TimedChain(11, 8192, 4096, 11 * one / 0.97, "float16"),
        own_host=False,
        processors=132,
    )


def written(found: Measurements, path: Path, like: str | None = "h100") -> Any:
    shipped = shipped_for(found.device, found.memory_bytes)
    stream = found.stream_bytes_per_second
    products = fit_products(found.products, None if shipped is None else shipped.device, stream)
    fits = fit_collectives(found.collectives)
    links = ([], []) if like is None else links_of(like)
    path.write_text(cluster_text("mine", "", found, products, fits, "2026-01-31", "a test", links, shipped))
    cluster = load_cluster(path)
    assert cluster.uncited == ()
    return cluster


def test_a_file_says_what_was_measured_and_keeps_the_rest(tmp_path: Path) -> None:
    shipped = load_device("h100")
    device = written(made(shipped), tmp_path / "mine.toml").device
    text = (tmp_path / "mine.toml").read_text()
    assert (device.host_seconds, device.op_seconds) == (pytest.approx(HOST), 0.0)
    assert (device.memory_bytes, device.launch_seconds) == (85e9, 4e-6)
    assert (device.hbm_bytes_per_second, device.stream) == (shipped.hbm_bytes_per_second, 2.9e12)
    assert device.optimizer_stream == pytest.approx(shipped.optimizer_stream)
    attention = device.attention
    assert (attention.rows, attention.softmax) == (shipped.attention.rows, SOFTMAX)
    assert (attention.forward_fraction, attention.backward_fraction) == pytest.approx((0.5, 0.3), rel=0.03)
    assert (attention.causal_fraction, attention.causal_backward_fraction) == pytest.approx((0.8, 0.9), rel=0.03)
    assert device.matrix is not None
    assert (device.matrix.processors, len(device.matrix.tile)) == (132, 4)
    for dtype in ("float32", "bfloat16", "float16"):
        assert device.peak_flops[dtype] == pytest.approx(SHARE * shipped.peak_flops[dtype], rel=0.02)
    assert device.peak_flops["float8"] == shipped.peak_flops["float8"]
    assert device.sustained_fraction == shipped.sustained_fraction, "no short run finds the limit of power"
    assert dict(device.forward_bytes_per_second) == pytest.approx({"tanh": 2e12, "cumsum": 4e11})
    assert text.startswith('name = "mine"\ndescription = ""\n\n# [inherited]: not measured on this machine, but as in')
    assert 'float8 = "1.979e+06 GFLOP/s [inherited]"' in text


def test_a_device_that_is_not_shipped_has_what_was_measured(tmp_path: Path) -> None:
    """Attention too, and as many processors as there are: a library takes some of them from what is computed."""
    found = replace(made(load_device("h100")), device="NVIDIA GH200 480GB", memory_bytes=102e9)
    cluster = written(found, tmp_path / "mine.toml")
    device = cluster.device
    assert device.attention.softmax == SOFTMAX
    assert device.attention.forward_fraction < 1
    assert device.host_seconds == pytest.approx(HOST)
    assert device.matrix.processors == 132
    assert cluster.library.processors < device.matrix.processors
    assert device.sustained_fraction == pytest.approx(0.97, abs=0.06)
    assert "inherited" not in (tmp_path / "mine.toml").read_text()


def test_tiles_are_kept_where_they_fit() -> None:
    found = made(load_device("h100"))
    plain, tiled = fit_products(found.products), fit_products(found.products, load_device("h100"), 3e12)
    assert plain.matrix is None
    assert tiled.matrix is not None
    assert tiled.error < 0.01 < plain.error
    # Times that no tiles give: those of `start` and `fill` alone.
    smooth = tuple(
        replace(one, seconds=1e-5 + one.flops * (one.reduction + 8) / one.reduction / 1e14) for one in found.products
    )
    assert fit_products(smooth, load_device("h100"), 3e12).matrix is None


def test_ops_that_wait_for_the_host_are_left_out() -> None:
    """A host that takes 25 us for an op hides the times of small products and attentions."""
    whole = made(load_device("h100"))
    host = 2.5e-5
    late = replace(
        whole,
        products=tuple(replace(one, seconds=max(one.seconds, host)) for one in whole.products),
        attentions=tuple(
            replace(
                one, forward_seconds=max(one.forward_seconds, host), backward_seconds=max(one.backward_seconds, host)
            )
            for one in whole.attentions
        ),
    )
    kept = late.of_device()
    assert 0 < len(kept.products) < len(whole.products)
    assert all(one.seconds >= 2 * host for one in kept.products)
    assert all(min(one.forward_seconds, one.backward_seconds) >= 2 * host for one in kept.attentions)
    peak = fit_products(whole.products, load_device("h100"), 3e12).peak_flops["bfloat16"]
    found = fit_products(kept.products, load_device("h100"), 3e12).peak_flops["bfloat16"]
    assert found == pytest.approx(peak, rel=0.02)
    assert replace(late, own_host=True).of_device().products == late.products


def test_a_measured_library_takes_of_host_and_device_what_the_shipped_one_does(tmp_path: Path) -> None:
    sent = [TimedCollective("all_gather", 0, 2, 1024.0 * 2**i, 1e-5 + 512 * 2**i / 2e11, i % 2 == 1) for i in range(15)]
    found = replace(made(load_device("h100")), collectives=tuple(sent), ranks_per_node=2)
    library, shipped = written(found, tmp_path / "mine.toml", None).library, load_cluster("h100").library
    assert library.processors == shipped.processors
    assert dict(library.host_seconds) == pytest.approx(dict(shipped.host_seconds))


def test_one_size_of_heads_shows_no_softmax() -> None:
    found = [one for one in made(load_device("h100")).attentions if one.head_dim == 128]
    peaks = {"float16": SHARE * load_device("h100").peak_flops["float16"]}
    fit = fit_attention(found, peaks, load_device("h100").attention)
    assert fit is not None
    assert fit.softmax == load_device("h100").attention.softmax
    assert fit.forward_fraction == pytest.approx(0.5, rel=1e-3)
