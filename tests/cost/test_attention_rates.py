"""Rates of fused attention by length and head dims, beside measurements."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cost.compute.attention_time import attention_fractions
from autopar.cost.hardware.cluster import AttentionRates, load_device
from benchmarks.published import attention

MEASURED = Path(__file__).parents[2] / "benchmarks" / "published" / "measured" / "micro_attention_aiconfigurator.csv"
RATES = AttentionRates(128, 0.5, 0.25, causal_fraction=0.8, softmax=64, start_keys=1000)


def test_a_tile_that_sees_as_many_keys_as_its_start_takes_runs_at_half_of_the_rate() -> None:
    forward, backward = attention_fractions(RATES, 256, 1000, is_causal=False)
    assert forward == pytest.approx(0.5 * 256 / (256 + 128) / 2)
    assert backward == pytest.approx(0.25 / 2)


def test_the_softmax_of_the_backward_makes_narrow_heads_slower() -> None:
    rates = replace(RATES, backward_softmax=32)
    narrow, wide = (attention_fractions(rates, width, 1e9, is_causal=False) for width in (128, 256))
    assert narrow[1] / wide[1] == pytest.approx((128 / 192) / (256 / 320))
    assert wide[0] == attention_fractions(RATES, 256, 1e9, is_causal=False)[0], "the forward has one of its own"


# cuDNN without a mask: Shah et al., FlashAttention-3 (arXiv 2407.08608), figure 6.
BACKWARD = {
    128: {512: 305, 1024: 408, 2048: 465, 4096: 499, 8192: 518, 16384: 516},
    64: {512: 266, 1024: 348, 2048: 395, 4096: 417, 8192: 432, 16384: 433},
}


@pytest.mark.parametrize("head_dim", BACKWARD)
def test_the_measured_backward_of_an_h100(head_dim: int) -> None:
    device = load_device("h100")
    for tokens, teraflops in BACKWARD[head_dim].items():
        _, backward = attention_fractions(device.attention, 2 * head_dim, tokens, is_causal=False)
        assert backward * device.peak_flops["bfloat16"] == pytest.approx(teraflops * 1e12, rel=0.13)
    # Causal, heads of 128: 1.7 times 287 TFLOP/s at 8,192 tokens.
    _, causal = attention_fractions(device.attention, 256, 8192 / 2, is_causal=True)
    assert causal * device.peak_flops["bfloat16"] == pytest.approx(1.7 * 287e12, rel=0.03)


def test_each_call_of_a_ring_starts_its_tiles_again() -> None:
    whole = attention_fractions(RATES, 256, 4000, is_causal=False)
    pieces = attention_fractions(RATES, 256, 4000, is_causal=False, calls=4)
    assert pieces[0] / whole[0] == pytest.approx((4000 / 8000) / (4000 / 5000))


def test_a_causal_kernel_of_few_keys_is_slower_than_one_of_many() -> None:
    short, long = (attention_fractions(RATES, 256, keys, is_causal=True)[0] for keys in (500, 50_000))
    assert short < 0.4 * long
    assert long == pytest.approx(0.8 * 0.5 * 256 / 384, rel=0.03)
    assert attention_fractions(RATES, 256, 0, is_causal=True)[0] == pytest.approx(0.8 * 0.5 * 256 / 384), "no keys"


@pytest.mark.parametrize("tokens", [2048, 4096, 8192, 16384])
@pytest.mark.parametrize(
    ("device", "software"), [("h100", "sglang 0.5.14"), ("b200", "sglang 0.5.14"), ("a100-80", "vllm 0.14.0")]
)
def test_measured_at_all_lengths(device: str, software: str, tokens: int) -> None:
    (row,) = (
        one
        for one in attention.read(MEASURED)
        if (one.device, one.software, one.head_dim, one.tokens) == (device, software, 128, tokens)
    )
    predicted = attention.predicted_flops_per_second(device, 128, tokens)
    assert predicted == pytest.approx(row.flops_per_second, rel=0.1)


def test_a_device_without_a_start_has_one_rate() -> None:
    rates = load_device("v100").attention
    assert attention_fractions(rates, 256, 10, is_causal=False) == attention_fractions(rates, 256, 1e6, is_causal=False)
