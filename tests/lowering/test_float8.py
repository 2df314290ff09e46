"""Linears in float8 beside torch's own product of float8 matrices, and what rounding and scaling keep exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional

from autopar.lowering.modules import float8
from autopar.lowering.modules.float8 import E4M3, E5M2, coded, decoded, float8_linear, rounded, scale_of
from autopar.lowering.modules.float8_weights import CastWeights


def operands(k: int = 64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, weight, bias, gradient = (
        (torch.randn(shape) * size).bfloat16()
        for shape, size in (((2, 16, k), 3), ((48, k), 0.02), ((48,), 1), ((2, 16, 48), 1e-4))
    )
    return x, weight, bias, gradient


def reference(a: Tensor, b: Tensor, dtype: torch.dtype, rows: bool) -> Tensor:
    """Return `a @ b` as `torch._scaled_mm` multiplies it, with scales by the definition of a power of two."""
    kinds = (dtype, E4M3)
    largest = [a.abs().amax(1, keepdim=True), b.abs().amax(0, keepdim=True)] if rows else [a.abs().max(), b.abs().max()]
    scales = [
        2.0 ** torch.floor(torch.log2(torch.finfo(kind).max / one.double())).float()
        for one, kind in zip(largest, kinds, strict=True)
    ]
    left, right = ((m.float() * s).to(kind) for m, s, kind in zip((a, b), scales, kinds, strict=True))
    right = right.t().contiguous().t()
    inverses = [1 / scale for scale in scales]
    return torch._scaled_mm(
        left.contiguous(), right, scale_a=inverses[0], scale_b=inverses[1], out_dtype=torch.bfloat16
    )


@pytest.mark.parametrize("emulated", [False, True])
@pytest.mark.parametrize("rows", [False, True])
def test_results_and_gradients_are_those_of_torch(rows: bool, emulated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if emulated:
        monkeypatch.setattr(float8, "_has_kernel", lambda x: False)
    x, weight, bias, gradient = (one.requires_grad_() for one in operands())
    made = float8_linear(x, weight, bias, rows)
    made.backward(gradient)
    flat, above, kind = x.detach().flatten(0, 1), gradient.detach().flatten(0, 1), E4M3 if rows else E5M2
    expected = (
        reference(flat, weight.detach().t(), E4M3, rows) + bias.detach(),
        reference(above, weight.detach(), kind, rows),
        reference(above.t(), flat, kind, rows),
        above.sum(0),
    )
    found = (made.detach().flatten(0, 1), x.grad, weight.grad, bias.grad)
    for one, other in zip(found, expected, strict=True):
        assert one is not None
        assert torch.equal(one.reshape(other.shape), other)
    exact = functional.linear(x.detach().float(), weight.detach().float(), bias.detach().float())
    error = (made.detach().float() - exact).norm() / exact.norm()
    assert 1e-3 < float(error) < 0.05, "three bits of mantissa"


def test_sizes_that_no_kernel_takes() -> None:
    x, weight, bias, _ = operands(k=40)
    made = float8_linear(x[:, :3], weight, bias, rows=True)
    kept = rounded(x[:, :3], scale_of(x[:, :3].abs().amax(-1, keepdim=True))).float()
    weights = rounded(weight, scale_of(weight.abs().amax(-1, keepdim=True))).float()
    assert torch.equal(made, functional.linear(kept, weights).bfloat16() + bias)
    assert float8_linear(x[:, :0], weight, bias, rows=False).shape == (2, 0, 48)


def test_scales_are_powers_of_two_that_fill_the_range() -> None:
    torch.manual_seed(0)
    largest = torch.cat([torch.logspace(-30, 30, 500), torch.tensor([448.0, 449.0, 224.0, 225.0])])
    scale = scale_of(largest)
    assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5))
    assert float((largest * scale).max()) <= 448
    assert float((largest * scale).min()) > 224 * (1 - 1e-6)
    assert scale_of(torch.tensor([0.0, 1e-40])).tolist() == [2.0**126, 2.0**126]


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_an_overflow_shows(value: float, rows: bool) -> None:
    x, weight, bias, _ = operands()
    x[0, 3, 5] = value
    made = float8_linear(x, weight, bias, rows)
    assert made[0, 3].isnan().all()
    assert bool(made[1].isfinite().all()) is rows, "scales of rows keep it to its row"


@pytest.mark.parametrize("seed", range(5))
def test_rounding_again_changes_nothing(seed: int) -> None:
    torch.manual_seed(seed)
    x = (torch.randn(4096) * 10.0 ** (2 * seed - 4)).bfloat16()
    once = rounded(x, scale_of(x.abs().max()))
    assert torch.equal(rounded(once, scale_of(once.abs().max())), once)


def test_what_is_coded_and_joined_is_decoded_by_its_own_scale() -> None:
    torch.manual_seed(0)
    parts = [(torch.randn(7, 3) * size).bfloat16() for size in (1e-3, 1.0, 3e4)]
    sent = torch.cat([coded(one) for one in parts])
    assert (sent.dtype, sent.shape) == (torch.uint8, (3 * (21 + 4),)), "one byte a number, and a scale"
    for one, back in zip(parts, decoded(sent, 3, torch.bfloat16), strict=True):
        assert torch.equal(back, rounded(one, scale_of(one.abs().max())).flatten())
    parts[1][2, 2] = torch.inf
    back = decoded(torch.cat([coded(one) for one in parts]), 3, torch.bfloat16)
    assert back.isfinite().all(1).tolist() == [True, False, True]


@pytest.mark.parametrize("trained", [(True, True), (True, False), (False, True)])
def test_frozen_operands_have_no_gradient_and_save_nothing(trained: tuple[bool, bool]) -> None:
    """Each operand is saved for the gradient of the other."""
    x, weight = (torch.randn(32, 32).bfloat16().requires_grad_(is_trained) for is_trained in trained)
    whole = [one.detach().clone().requires_grad_() for one in (x, weight)]
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: (saved.append(one), one)[1], lambda one: one):
        made = float8_linear(x, weight, None, rows=False)
    float8_linear(*whole, None, rows=False).sum().backward()  # type: ignore[call-arg]
    made.sum().backward()
    assert len(saved) == sum(trained)
    for one, is_trained, expected in zip((x, weight), trained, whole, strict=True):
        assert torch.equal(one.grad, expected.grad) if is_trained else one.grad is None


@pytest.mark.parametrize("rows", [False, True])
def test_a_compiler_sees_scales_and_casts(rows: bool) -> None:
    """They are then fused with the ops around them; the numbers are those of the eager op."""
    x, weight, bias, gradient = operands()
    operand = [one.requires_grad_() for one in (x, weight, bias)]
    graphs: list[str] = []

    def compiler(module: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(module.code)
        return make_boxed_func(module.forward)

    compiled = torch.compile(float8_linear, backend=aot_autograd(fw_compiler=compiler), fullgraph=True)
    made = [call(*operand, rows) for call in (float8_linear, compiled)]  # type: ignore[call-arg]
    assert torch.equal(*made)
    gradients = [torch.autograd.grad(one, operand, gradient) for one in made]
    assert all(map(torch.equal, *gradients))
    assert len(graphs) == 2, "forward and backward"
    for code in graphs:
        assert "float8_e4m3fn" in code
        assert "autopar.float8" not in code


def test_a_weight_that_is_kept_suits_kernels_whatever_rows_came_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifteen rows have no kernel, and make the cast that sixteen read. GPUs read the right operand by columns."""
    weight, casts, orders = torch.randn(32, 16, dtype=torch.bfloat16), CastWeights(), []

    def multiply(left: Tensor, right: Tensor, **given: Any) -> Tensor:
        orders.append(right.stride(0))
        return kernel(left, right, **given)

    kernel = torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    casts.add([weight])
    for count in (15, 16):
        gradient = torch.randn(count, 32, dtype=torch.bfloat16)
        apart = torch.ops.autopar.float8_input_gradient(gradient, weight, False)
        with casts.kept():
            assert torch.equal(torch.ops.autopar.float8_input_gradient(gradient, weight, False), apart)
    assert orders == [1, 1], "of sixteen rows, apart and kept"
