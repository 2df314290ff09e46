"""Fits find the constants that times were made of; the written file says the same; a real run on two processes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from math import sqrt
from pathlib import Path

import numpy as np
import pytest
import torch

from autopar.cli import main
from autopar.cost.calibration.fit import (
    Measurements,
    TimedChain,
    TimedCollective,
    TimedProduct,
    fit_attention,
    fit_collectives,
    fit_ops,
    fit_products,
    fit_sustained,
    prediction_errors,
)
from autopar.cost.calibration.op_trials import TRIALS, OpTrial, TimedAttention, TimedOp, time_op
from autopar.cost.calibration.write_cluster import cluster_text, times_table
from autopar.cost.compute.attention_time import BACKWARD_PRODUCTS
from autopar.cost.hardware.cluster import load_cluster
from autopar.cost.hardware.describe import links_of
from autopar.cost.network import Network
from autopar.cost.overlap import OverlapCost

SIZES = [1024.0 * 2**i for i in range(15)]


def products(start: float, fill: int, peaks: dict[str, float]) -> tuple[TimedProduct, ...]:
    shapes = [(n, k, n) for n in (64, 256, 1024) for k in (64, 256, 1024)]
    return tuple(
        TimedProduct(dtype, m, k, n, start + 2 * m * n * (k + fill) / peak)
        for dtype, peak in peaks.items()
        for m, k, n in shapes
    )


@pytest.mark.parametrize(("start", "fill"), [(10e-6, 32), (0.0, 100), (50e-6, 1)])
def test_products(start: float, fill: int) -> None:
    fit = fit_products(products(start, fill, {"float32": 1e11, "bfloat16": 4e11}))
    assert fit.start_seconds == pytest.approx(start, rel=1e-3, abs=1e-9)
    assert fit.fill == fill
    assert fit.peak_flops == pytest.approx({"float32": 1e11, "bfloat16": 4e11}, rel=1e-3)
    assert fit.error == pytest.approx(0, abs=1e-6)


def test_products_that_mostly_read() -> None:
    shapes = [(n, k, n) for n in (64, 256, 1024) for k in (64, 256, 1024)] + [(32, 1024, 4096), (1024, 32, 4096)]
    timed = tuple(
        TimedProduct("float32", m, k, n, 10e-6 + 2 * m * n * (k + 2) / 1e11 + 1.5 * 4 * (m * k + k * n + m * n) / 2e10)
        for m, k, n in shapes
    )
    fit = fit_products(timed, None, 2e10)
    assert (fit.fill, fit.passes) == (2, pytest.approx(1.5, rel=0.02))
    assert fit.error == pytest.approx(0, abs=1e-3)
    assert fit.seconds("float32", 32, 1024, 4096) == pytest.approx(timed[-2].seconds, rel=1e-3)


@pytest.mark.parametrize("fills_cores", [False, True])
def test_ranks_on_all_cores_leave_none_to_communication(tmp_path: Path, fills_cores: bool) -> None:
    sent = [ring("all_reduce", 4, size, 5e-6, 20e-6, 3e9, False) for size in SIZES]
    found = replace(measurements(sent), fills_cores=fills_cores)
    fit = replace(fit_products(found.products), passes=1.5)
    path = tmp_path / "mine.toml"
    path.write_text(cluster_text("mine", "Mine", found, fit, fit_collectives(sent), "2026-01-31", "a test"))
    cluster = load_cluster(path)
    # One second sent beside two of compute.
    assert OverlapCost.of(cluster).seconds(1.0, 2.0) == (1.0 if fills_cores else 0.0)
    assert cluster.device.matrix is not None
    assert cluster.device.matrix.passes == 1.5


def ring(
    kind: str, ranks: int, size: float, base: float, hop: float, rate: float, pipelined: bool, level: int = 0
) -> TimedCollective:
    twice = 2 if kind == "all_reduce" else 1
    latency, sending = base + twice * (ranks - 1) * hop, twice * (ranks - 1) / ranks * size / rate
    seconds = latency + sending + (sqrt(latency * sending) if pipelined else 0.0)
    left_out = round(np.log2(size)) % 2 == 1
    return TimedCollective(kind, level, ranks, size, seconds, left_out)


def direct(kind: str, ranks: int, size: float, latency: float, rate: float) -> TimedCollective:
    share = 1.0 if kind == "send" else (ranks - 1) / ranks
    return TimedCollective(kind, 0, ranks, size, latency + share * size / rate, round(np.log2(size)) % 2 == 1)


def measurements(collectives: list[TimedCollective], nodes: int = 1) -> Measurements:
    ranks = max(one.ranks for one in collectives if one.level == 0)
    timed = products(10e-6, 32, {"float32": 1e11})
    return Measurements("device", 8e9, 2e-6, 1e10, timed, tuple(collectives), nodes, ranks)


@pytest.mark.parametrize("pipelined", [False, True])
def test_one_node_is_found_again_and_written(tmp_path: Path, pipelined: bool) -> None:
    collectives = [
        *(ring("all_reduce", ranks, size, 5e-6, 20e-6 * ranks, 3e9, pipelined) for ranks in (2, 4) for size in SIZES),
        *(ring("all_gather", ranks, size, 9e-6, 30e-6, 2e9, False) for ranks in (2, 4) for size in SIZES),
        *(direct("send", ranks, size, 40e-6, 1e9) for ranks in (2, 4) for size in SIZES),
    ]
    found = measurements(collectives)
    fits = fit_collectives(found.collectives)
    assert [(fit.kind, fit.ranks, fit.pipelined) for fit in fits] == [
        *(("all_reduce", (ranks,), pipelined) for ranks in (2, 4)),
        *(("all_gather", (ranks,), False) for ranks in (2, 4)),
        *(("send", (ranks,), False) for ranks in (2, 4)),
    ]
    assert fits[0].bytes_per_second == pytest.approx(3e9, rel=0.02)
    path = tmp_path / "mine.toml"
    path.write_text(cluster_text("mine", "Mine", found, fit_products(found.products), fits, "2026-01-31", "a test"))
    cluster = load_cluster(path)
    assert cluster.uncited == ()
    for kind, errors in prediction_errors(cluster, found).items():
        assert errors == pytest.approx((0, 0), abs=0.02), kind
    assert cluster.level[0].backplane_bytes_per_second is None
    # Two ranks that were twice as fast alone as all four are: what four send together is shared.
    alone = replace(found, lone_bytes_per_second=4e9)
    path.write_text(cluster_text("mine", "Mine", alone, fit_products(found.products), fits, "2026-01-31", "a test"))
    assert Network(load_cluster(path), {"a": 2}).group(("a",))[0].rate == pytest.approx(6e9, rel=0.02)
    assert Network(load_cluster(path), {"b": 2, "a": 2}).group(("a",))[0].rate == pytest.approx(3e9, rel=0.02)
    # Three ranks are priced as four, as no others were measured; more than four go on as a ring does.
    network = Network(cluster, {"a": 3})
    assert network.seconds("all_gather", ("a",), 1.0) == pytest.approx((9e-6 + 3 * 30e-6) * 2 / 3, rel=0.02)
    assert network.seconds("halo_exchange", ("a",), 1e6) == network.seconds("send", ("a",), 1e6)


@pytest.mark.parametrize("sizes", [(2,), (2, 4)])
def test_nodes_have_two_levels(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    count = max(sizes)
    collectives = [
        *(ring("all_reduce", ranks, size, 0.0, 2e-6, 100e9, False) for ranks in sizes for size in SIZES),
        *(ring("all_reduce", ranks, size, 0.0, 20e-6, 5e9, False, level=1) for ranks in sizes for size in SIZES),
    ]
    found = measurements(collectives, nodes=count)
    path = tmp_path / "mine.toml"
    fits = fit_collectives(found.collectives)
    assert [(fit.level, fit.ranks, fit.algorithm) for fit in fits] == [(0, sizes, "ring"), (1, sizes, "ring")]
    path.write_text(cluster_text("mine", "Mine", found, fit_products(found.products), fits, "2026-01-31", "a test"))
    cluster = load_cluster(path)
    node, network = cluster.level
    assert (node.name, node.units, network.name, network.units) == ("node", count, "network", None)
    assert network.rate_bytes_per_second == pytest.approx(count * 5e9, rel=0.02), "all ranks of a node at once"
    assert prediction_errors(cluster, found)["all_reduce"] == pytest.approx((0, 0), abs=0.02)


def test_the_algorithm_is_the_one_that_fits() -> None:
    """Latencies that grow with the logarithm are no ring's."""
    steps = {2: 1, 4: 2, 8: 3}
    measured = [
        TimedCollective("all_gather", level, ranks, size, 1e-6 + 50e-6 * count + (ranks - 1) / ranks * size / 1e9)
        for level in (0, 1)
        for ranks, count in steps.items()
        for size in SIZES
    ]
    assert {fit.algorithm for fit in fit_collectives(measured)} == {"halving_doubling"}


def test_noise_gives_no_negative_numbers() -> None:
    random = np.random.default_rng(0)
    collectives = [ring("all_reduce", ranks, size, 0.0, 50e-6, 1e9, False) for ranks in (2, 4) for size in SIZES[:4]]
    for _ in range(20):
        noisy = [replace(one, seconds=one.seconds * random.uniform(0.3, 3), left_out=False) for one in collectives]
        for fit in fit_collectives(noisy):
            assert fit.base_seconds >= 0
            assert fit.hop_seconds >= 0
            assert 0 < fit.bytes_per_second < float("inf")


def test_times_as_csv() -> None:
    assert times_table([TimedCollective("send", 0, 2, 1024.0, 1.5e-5, True)]) == (
        "kind,level,ranks,buffer_bytes,seconds,fitted\nsend,inside,2,1024,1.5e-05,no\n"
    )


def trained(seconds: float) -> Measurements:
    """A process of a CPU whose float32 products run at 1e11 FLOP/s, whose ops take 5 us to begin."""
    ops = (
        TimedOp("tanh", 8e6, 5e-6 + 8e6 / 2e9, 12e6, 5e-6 + 12e6 / 9e10),
        TimedOp("relu", 8e6, 5e-6 + 8e6 / 9e10, 12e6, 5e-6 + 12e6 / 9e10),
        TimedOp("clone", 8e6, 5e-6 + 8e6 / 4e9, 0.0, 1e-6),
    )
    attentions = tuple(
        TimedAttention(causal, flops / forward, BACKWARD_PRODUCTS * flops / backward, flops)
        for causal, forward, backward in ((False, 8e10, 6e10), (True, 4e10, 3e10))
        for flops in (1e8, 1e9, 1e10)
    )
    alone = Measurements("CPU", 8e9, 1e-6, 1e10, products(10e-6, 32, {"float32": 1e11}), (), 1, 1)
    return replace(
        alone, overhead_seconds=5e-6, ops=ops, attentions=attentions, chain=TimedChain(11, 1024, 512, seconds)
    )


def test_what_a_cpu_takes_beyond_products_and_bytes(tmp_path: Path) -> None:
    each = 10e-6 + 2 * 1024 * 512 * (512 + 32) / 1e11
    found = trained(11 * each / 0.8)
    path = tmp_path / "mine.toml"
    links, sources = links_of("local-cpu")
    text = cluster_text("mine", "", found, fit_products(found.products), [], "2026-01-31", "a test", (links, sources))
    path.write_text(text)
    device = load_cluster(path).device
    assert device.op_seconds == pytest.approx(4e-6)
    assert device.sustained_fraction == pytest.approx(0.8, rel=1e-2)
    assert dict(device.forward_bytes_per_second) == pytest.approx({"tanh": 2e9, "clone": 4e9}, rel=1e-3)
    assert dict(device.backward_bytes_per_second) == {}
    rates = device.attention
    assert (rates.forward_fraction, rates.causal_fraction) == pytest.approx((0.8, 0.5), rel=1e-2)
    assert (rates.backward_fraction, rates.causal_backward_fraction) == pytest.approx((0.6, 0.5), rel=1e-2)


def test_a_machine_that_needs_no_more_says_nothing_of_it() -> None:
    """No rate is above the memory's, no share above the whole."""
    assert fit_sustained(fit_products(products(10e-6, 32, {"float32": 1e11})), TimedChain(11, 1024, 512, 1e-6)) == 1.0
    fast = replace(trained(1.0), ops=(TimedOp("tanh", 8e6, 1e-5, 12e6, 1e-5),))
    assert fit_ops(fast) == ({}, {})
    assert fit_attention((), 1e11) is None


@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial.name)
def test_what_is_tried_is_what_models_call(trial: OpTrial) -> None:
    """The op is found in the graph by its name, and the cost model counts its bytes."""
    found = time_op(trial, 4096, torch.device("cpu"), lambda run: float(run() is not None))
    assert (found.name, found.forward_seconds, found.backward_seconds) == (trial.name, 1.0, 1.0)
    assert found.forward_bytes >= 2 * 4096
    assert found.backward_bytes >= 2 * 4096 or trial.name == "clone"


@pytest.mark.slow
def test_a_real_run(tmp_path: Path) -> None:
    """Two processes over Gloo; what is measured varies, what must be written does not."""
    path, times = tmp_path / "mine.toml", tmp_path / "times.csv"
    command = [sys.executable, "-m", "autopar", "calibrate", "--processes", "2", "--largest", "64 KiB"]
    command += ["--seconds", "0.01", "--output", str(path), "--times", str(times)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert "not fitted" in done.stdout
    assert "Warning" not in done.stderr
    cluster = load_cluster(path)
    assert cluster.name == "mine"
    assert cluster.uncited == ()
    assert set(cluster.device.peak_flops) == {"float32", "bfloat16", "float64"}
    assert 0 < cluster.device.attention.forward_fraction < 1
    assert cluster.device.forward_bytes_per_second, "some op is slower than a copy"
    network = Network(cluster, {"a": 2})
    kinds = {line.split(",")[0] for line in times.read_text().splitlines()[1:]}
    assert kinds == {
        *("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"),
        *("all_to_all", "gather", "scatter", "send"),
    }
    for kind in kinds:
        assert 0 < network.seconds(kind, ("a",), 1e3) < network.seconds(kind, ("a",), 1e9)


@pytest.mark.slow
def test_one_process_takes_the_links_of_another_cluster(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    words = ["--processes", "1", "--like", "h100", "--seconds", "0.01", "--output", str(path)]
    assert main(["calibrate", *words]) == 0
    assert "products" in capsys.readouterr().out
    mine, other = load_cluster(path), load_cluster("h100")
    assert (mine.level, mine.library) == (other.level, other.library)
    assert mine.name == "mine"
    assert set(mine.device.peak_flops) == {"float32", "bfloat16", "float64"}
    assert mine.sources["measured"].date


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--processes", "1", "--output", "x.toml"], "1 process has no links to measure\nfix: take those of a cluster"),
        (["--output", "nowhere/x.toml"], "--output nowhere/x.toml: there is no folder "),
        (["--largest", "1 GHz", "--output", "x.toml"], "--largest: '1 GHz' is not a size: the units are B, "),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(["calibrate", *words]) == 2
    assert message in capsys.readouterr().err
