"""Attention whose values have another width than its keys: numbers, memory, and where it stands in a graph."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import autopar
from autopar.ir.analysis.op_memory import fake_input, measure
from autopar.rules.shard_call.attention import SDPA
from autopar.rules.shard_call.unequal_widths import attention_of_unequal_widths
from tests.runtime.launcher import launch

MASKS = {
    "none": lambda: None,
    "bool": lambda: torch.rand(2, 1, 5, 7).gt(0.4).index_fill(2, torch.tensor([2]), False),
    "bool rows": lambda: torch.rand(5, 7).gt(0.4),
    "added": lambda: torch.randn(4, 5, 7, dtype=torch.float64),
    "trained": lambda: torch.randn(4, 5, 7, dtype=torch.float64).requires_grad_(),
}


def operands(widths: tuple[int, int], heads: int = 4) -> list[Tensor]:
    of_keys, of_values = widths
    shapes = (2, 4, 5, of_keys), (2, heads, 7, of_keys), (2, heads, 7, of_values)
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("widths", [(6, 4), (4, 6)])
@pytest.mark.parametrize("mask", MASKS)
def test_results_and_gradients_are_those_of_torch(widths: tuple[int, int], mask: str) -> None:
    """Also of rows that see no key, and of masks that are trained, which the fused kernel does not take."""
    torch.manual_seed(0)
    for heads, causal, scale in product((4, 2), (False, True), (None, 0.3)):
        given, bias = operands(widths, heads), MASKS[mask]()
        if bias is not None and causal:
            continue
        options: Any = {"attn_mask": bias, "is_causal": causal, "scale": scale, "enable_gqa": heads == 2}
        expected = functional.scaled_dot_product_attention(*given, **options)
        found = attention_of_unequal_widths(*given, **options)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
        leaves = [*given, *(() if mask != "trained" else (bias,))]
        gradient = torch.randn_like(expected)
        wanted = torch.autograd.grad(expected, leaves, gradient)
        torch.testing.assert_close(torch.autograd.grad(found, leaves, gradient), wanted, rtol=1e-12, atol=1e-13)


def test_what_is_saved_is_what_a_kernel_of_gpus_saves() -> None:
    """No scores: queries, keys, values, the result and the sums of weights, each in its own width."""
    with FakeTensorMode():
        given = [fake_input((2, 8, 512, width), torch.bfloat16, True) for width in (48, 48, 32)]
        found = measure(given, lambda: attention_of_unequal_widths(*given, is_causal=True))
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention.default
        fused = measure(given, lambda: kernel(*given, None, True, 0.0, True))
        scores = measure(given, lambda: SDPA(*given, None, 0.0, True))
    assert found.keeps == fused.keeps == (0, 1, 2)
    assert found.keeps_outputs == (0,)
    assert fused.keeps_outputs[:2] == (0, 1), "the sums are a result of this op"
    sums = 2 * 8 * 512 * 4
    assert found.internal_bytes == sums
    assert scores.internal_bytes > 50 * sums


DIMS = {"x": "batch seq d_model"}


class Latent(nn.Module):
    """Attention whose keys have some dims more than its values."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 4 * (12 + 12 + 8))
        self.out = nn.Linear(4 * 8, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (4, 32)).transpose(1, 2).split([12, 12, 8], -1)
        made = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(made.transpose(1, 2).flatten(2)).square().mean()


def attend(mesh: str, layout: str) -> tuple[str, set[str], float]:
    """The code of the module, the ops that it runs, and the largest difference from one process."""
    torch.manual_seed(0)
    model, x = Latent().double(), torch.randn(2, 16, 32, dtype=torch.float64)
    expected = model(x)
    wanted = torch.autograd.grad(expected, tuple(model.parameters()))
    parallel = autopar.parallelize(model, mesh, (x,), layout=layout, dims=DIMS)
    with torch.profiler.profile() as profile:
        found = parallel(x)
        found.backward()
    pairs = [(one.grad.full_tensor(), other) for one, other in zip(parallel.parameters(), wanted, strict=True)]
    worst = max(float((one - other).abs().max()) for one, other in [(found, expected), *pairs])
    return parallel.code, {event.key for event in profile.key_averages()}, worst


@pytest.mark.parametrize("layout", ["batch -> a; * -> none", "micro 2; * -> none"])
def test_a_module_runs_the_fused_kernel(layout: str) -> None:
    for code, names, worst in launch(attend, "a=2", layout, ranks=2):
        assert "attention_of_unequal_widths" in code
        assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names
        assert not any("attention_math" in name for name in names)
        assert worst < 1e-13
