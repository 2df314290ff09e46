"""Products of rows by group in float8 beside torch's own product of float8 matrices, group by group."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.lowering.modules.float8 import E4M3, right_operand, scaled
from autopar.lowering.modules.float8_groups import float8_grouped, grouped_kernel, in_multiples, summing_kernel
from autopar.rules.shard_call.sparse_rows import ends_of
from tests.lowering.test_float8 import reference

COUNTS = [5, 0, 17, 10]
ENDS = ends_of(torch.tensor(COUNTS))
WIDTH, HIDDEN = 32, 48


def operands() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    rows = torch.randn(sum(COUNTS), WIDTH) * torch.logspace(-2, 2, sum(COUNTS)).unsqueeze(1)
    matrices, bias = torch.randn(len(COUNTS), WIDTH, HIDDEN) * 0.02, torch.randn(len(COUNTS), HIDDEN)
    gradient = torch.randn(sum(COUNTS), HIDDEN) * 1e-4
    found = (rows.bfloat16(), matrices.bfloat16(), bias.bfloat16(), gradient.bfloat16())
    return found


@pytest.mark.parametrize("transposed", [False, True])
def test_results_and_gradients_are_those_of_torch(transposed: bool) -> None:
    rows, matrices, bias, gradient = operands()
    if transposed:
        matrices = matrices.transpose(1, 2).contiguous().transpose(1, 2)
    given = [one.requires_grad_() for one in (rows, matrices, bias)]
    made = float8_grouped(*given, ENDS)  # type: ignore[call-arg]
    made.backward(gradient)
    with torch.no_grad():
        parts = [one.split(COUNTS) for one in (rows, gradient)]
        for group, (x, above) in enumerate(zip(*parts, strict=True)):
            start = sum(COUNTS[:group])
            own = slice(start, start + COUNTS[group])
            of_matrix = matrices.grad[group]  # type: ignore[index]
            if not COUNTS[group]:
                assert not of_matrix.any()
                continue
            expected = (
                reference(x, matrices[group], E4M3, rows=True) + bias[group],
                reference(above, matrices[group].t(), E4M3, rows=True),
            )
            for one, other in zip((made[own], rows.grad[own]), expected, strict=True):  # type: ignore[index]
                torch.testing.assert_close(one, other, rtol=2**-7, atol=0.0)
            torch.testing.assert_close(of_matrix, reference(x.t(), above, E4M3, rows=True), rtol=2**-7, atol=1e-9)
            torch.testing.assert_close(bias.grad[group], above.sum(0), rtol=2**-6, atol=1e-6)  # type: ignore[index]
    assert matrices.grad is not None
    assert matrices.grad.stride() == matrices.stride()


def test_the_rounding_is_that_of_float8() -> None:
    """A product in bfloat16 would be some ten times nearer."""
    rows, matrices, _, _ = operands()
    made = float8_grouped(rows, matrices, None, ENDS).float()
    expected = torch.cat([x.double() @ matrix.double() for x, matrix in zip(rows.split(COUNTS), matrices, strict=True)])
    error = ((made - expected).norm(dim=1) / expected.norm(dim=1)).max()
    assert 5e-3 < float(error) < 0.06


def test_rows_in_equal_groups_need_no_ends() -> None:
    rows, matrices, bias, _ = operands()
    ends = torch.tensor([8, 16, 24, 32], dtype=torch.int32)
    assert torch.equal(float8_grouped(rows, matrices, bias), float8_grouped(rows, matrices, bias, ends))


def test_no_rows_and_frozen_operands() -> None:
    rows, matrices, _, _ = operands()
    ends = torch.zeros(len(COUNTS), dtype=torch.int32)
    none = rows[:0].clone().requires_grad_()
    made = float8_grouped(none, matrices.requires_grad_(), None, ends)
    made.sum().backward()
    assert made.shape == (0, HIDDEN)
    assert none.grad is not None
    assert matrices.grad is not None
    assert not matrices.grad.any()
    frozen = matrices.detach()
    float8_grouped(rows.requires_grad_(), frozen, None, ENDS).sum().backward()
    assert rows.grad is not None
    assert frozen.grad is None


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_an_overflow_shows(value: float) -> None:
    rows, matrices, _, gradient = operands()
    rows[6, 3] = value
    made = float8_grouped(rows, matrices.requires_grad_(), None, ENDS)
    made.backward(gradient)
    assert made[6].isnan().all()
    assert made[:6].isfinite().all()
    assert matrices.grad is not None
    assert matrices.grad[2, 3].isnan().all()
    assert matrices.grad[0].isfinite().all()


def test_rows_before_a_kernel_begin_at_multiples() -> None:
    rows, _, _, _ = operands()
    counts = torch.tensor(COUNTS)
    group = torch.arange(len(COUNTS)).repeat_interleave(counts)
    padded = in_multiples(rows.to(E4M3), group, counts).float()
    assert padded.shape[0] % 16 == 0
    starts = {0: 0, 2: 16, 3: 48}
    for number, start in starts.items():
        taken = padded[start : start + COUNTS[number]]
        assert torch.equal(taken, rows.to(E4M3).float().split(COUNTS)[number])
    assert padded.ne(0).any(1).sum() == len(rows)


def test_kernels_take_what_they_are_given() -> None:
    """No GPU is needed: torch checks dtypes, strides and scales of tensors without values, too."""
    rows, matrices, _, gradient = (one.to("meta") for one in operands())
    counts = torch.tensor(COUNTS, device="meta")
    (left, left_scale), (right, right_inverse) = scaled(rows, E4M3, 1), right_operand(matrices, 1)
    made = grouped_kernel(left, right, (left_scale.squeeze(1), right_inverse.squeeze(1)), ENDS.to("meta"))
    assert made.shape == (len(rows), HIDDEN)
    columns = [torch.empty(len(COUNTS), size, device="meta") for size in (WIDTH, HIDDEN)]
    sides = [torch.empty(96, size, dtype=E4M3, device="meta") for size in (WIDTH, HIDDEN)]
    summed = summing_kernel(sides[0], sides[1], (columns[0], columns[1]), counts)
    assert summed.shape == (len(COUNTS), WIDTH, HIDDEN)
    assert made.dtype == summed.dtype == torch.bfloat16
    assert gradient.shape == made.shape
