"""Attention that torch writes out and a kernel could take: numbers, memory, and where it stands in a graph."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import autopar
import autopar.rules.shard_call.fused_attention as fused_attention_file
from autopar.ir.analysis.op_memory import fake_input, measure
from autopar.rules.shard_call.attention import SDPA
from autopar.rules.shard_call.fused_attention import fused_attention
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


@pytest.mark.parametrize("widths", [(6, 4), (4, 6), (4, 4)])
@pytest.mark.parametrize("mask", MASKS)
def test_results_and_gradients_are_those_of_torch(
    widths: tuple[int, int], mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of rows that see no key, and of masks that are trained, whose gradient is computed in blocks of rows."""
    torch.manual_seed(0)
    monkeypatch.setattr(fused_attention_file, "BLOCK_ROWS", 3)
    for heads, causal, scale in product((4, 2), (False, True), (None, 0.3)):
        given, bias = operands(widths, heads), MASKS[mask]()
        if bias is not None and causal:
            continue
        options: Any = {"attn_mask": bias, "is_causal": causal, "scale": scale, "enable_gqa": heads == 2}
        expected = functional.scaled_dot_product_attention(*given, **options)
        found = fused_attention(*given, **options)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
        leaves = [*given, *(() if mask != "trained" else (bias,))]
        gradient = torch.randn_like(expected)
        wanted = torch.autograd.grad(expected, leaves, gradient)
        torch.testing.assert_close(torch.autograd.grad(found, leaves, gradient), wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        ((3, 5), (3, 7)),
        ((5,), (7,)),
        ((2, 4, 5), (2, 1, 7)),
        ((2, 4, 5), (1, 4, 7)),
        ((2, 1, 5), (2, 4, 7)),
        ((2, 3, 4, 5),) * 2,
    ],
)
def test_other_leading_dims_are_expanded(queries: tuple[int, ...], keys: tuple[int, ...]) -> None:
    """Torch takes no fused kernel for them, on any device."""
    torch.manual_seed(0)
    shapes = (*queries, 6), (*keys, 6), (*keys, 6)
    given = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    for mask in (None, torch.rand(queries[-1], keys[-1]).gt(0.3)):
        expected = functional.scaled_dot_product_attention(*given, attn_mask=mask)
        found = fused_attention(*given, attn_mask=mask)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
        wanted = torch.autograd.grad(expected.square().sum(), given)
        torch.testing.assert_close(torch.autograd.grad(found.square().sum(), given), wanted, rtol=1e-12, atol=1e-13)


def test_what_is_saved_is_what_a_kernel_of_gpus_saves() -> None:
    """No scores: queries, keys, values, the result and the sums of weights, each in its own width."""
    with FakeTensorMode():
        given = [fake_input((2, 8, 512, width), torch.bfloat16, True) for width in (48, 48, 32)]
        found = measure(given, lambda: fused_attention(*given, is_causal=True))
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


class Biased(nn.Module):
    """Attention with a bias that is trained, as of T5, and one head of keys for all of queries, as of Falcon."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 4 * 8 + 8 + 8)
        self.bias = nn.Parameter(torch.randn(4, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).split([32, 8, 8], -1)
        heads = q.unflatten(-1, (4, 8)).transpose(1, 2)
        made = functional.scaled_dot_product_attention(heads, k[:, None], v[:, None], self.bias)
        return made.transpose(1, 2).flatten(2).square().mean()


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


def attend(name: str, layout: str) -> tuple[str, set[str], float]:
    """The code of the module, the ops that it runs, and the largest difference from one process."""
    torch.manual_seed(0)
    model, x = MODELS[name]().double(), torch.randn(2, 16, 32, dtype=torch.float64)
    expected = model(x)
    wanted = torch.autograd.grad(expected, tuple(model.parameters()))
    parallel = autopar.parallelize(model, "a=2", (x,), layout=layout, dims=DIMS)
    with torch.profiler.profile() as profile:
        found = parallel(x)
        found.backward()
    pairs = [(one.grad.full_tensor(), other) for one, other in zip(parallel.parameters(), wanted, strict=True)]
    worst = max(float((one - other).abs().max()) for one, other in [(found, expected), *pairs])
    return parallel.code, {event.key for event in profile.key_averages()}, worst


MODELS = {"latent": Latent, "biased": Biased}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", ["batch -> a; * -> none", "micro 2; * -> none"])
def test_a_module_runs_the_fused_kernel(name: str, layout: str) -> None:
    for code, names, worst in launch(attend, name, layout, ranks=2):
        assert "fused_attention" in code
        assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names
        assert not any("attention_math" in name for name in names)
        assert worst < 1e-13
