"""Products of stored rows by group: torch's kernel and a loop give the same numbers, for all operands."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.rules.shard_call import sparse_rows
from autopar.rules.shard_call.sparse_rows import counts_of, dispatch_rows, ends_of, grouped_rows, sort_rows

COUNTS = torch.tensor([5, 0, 17, 10])
KERNEL = "aten._grouped_mm.default"
Made = tuple[Tensor, Tensor, Tensor]


class Kernels(TorchDispatchMode):
    """Counts calls of torch's kernel."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func is torch.ops.aten._grouped_mm.default
        return func(*args, **(kwargs or {}))


def operands(width: int, hidden: int, dtype: torch.dtype, transposed: bool) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    rows = torch.randn(int(COUNTS.sum()), width).to(dtype)
    matrices = torch.randn(len(COUNTS), width, hidden).to(dtype)
    return rows, matrices.transpose(1, 2).contiguous().transpose(1, 2) if transposed else matrices


def products(rows: Tensor, matrices: Tensor, above: Callable[[Tensor], Tensor]) -> Made:
    rows, matrices = rows.detach().requires_grad_(), matrices.detach().requires_grad_()
    made = grouped_rows(rows, matrices, None, ends_of(COUNTS), KERNEL)
    return made, *torch.autograd.grad(above(made), (rows, matrices))


def shifted(x: Tensor) -> Tensor:
    """Return equal values at an address between the multiples of 16 bytes."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


ABOVE: dict[str, Callable[[Tensor], Tensor]] = {
    "of a sum, one number for all": lambda made: made.sum(),
    "dense": lambda made: made.pow(2).sum(),
    "by columns": lambda made: (made.t().contiguous() * torch.arange(32.0).to(made.dtype)).sum(),
    "of a slice": lambda made: made[:, 1:].pow(3).sum(),
    "at an odd address": lambda made: (shifted(made) ** 2).sum(),
}


@pytest.mark.parametrize("above", ABOVE)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_gives_the_numbers_of_the_loop(
    dtype: torch.dtype, transposed: bool, above: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = operands(16, 24, dtype, transposed)
    with Kernels() as kernels:
        found = products(*given, ABOVE[above])
    assert kernels.count == 3
    monkeypatch.setattr(sparse_rows, "_has_kernel", lambda *given: False)
    with Kernels() as kernels:
        expected = products(*given, ABOVE[above])
    assert kernels.count == 0
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert found[2].stride() == expected[2].stride()


@pytest.mark.parametrize(
    ("width", "hidden", "dtype", "change"),
    [
        (6, 10, torch.float32, None),
        (16, 10, torch.float32, None),
        (6, 16, torch.bfloat16, None),
        (16, 24, torch.float64, None),
        (16, 24, torch.float32, shifted),
        (16, 24, torch.float32, lambda x: x[:1].expand_as(x)),
    ],
)
def test_operands_that_the_kernel_refuses(
    width: int, hidden: int, dtype: torch.dtype, change: Callable[[Tensor], Tensor] | None
) -> None:
    rows, matrices = operands(width, hidden, dtype, False)
    rows = rows if change is None else change(rows)
    made, of_rows, of_matrices = products(rows, matrices, lambda made: made.pow(2).sum())
    start = 0
    for group, count in enumerate(COUNTS.tolist()):
        own = slice(start, start + count)
        torch.testing.assert_close(made[own], rows[own] @ matrices[group])
        torch.testing.assert_close(of_rows[own], 2 * made[own] @ matrices[group].t())
        torch.testing.assert_close(of_matrices[group], rows[own].t() @ (2 * made[own]))
        start += count


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("width", "hidden"), [(16, 24), (16, 10), (6, 16)])
def test_a_compiler_expects_the_layout_of_the_results(width: int, hidden: int, transposed: bool) -> None:
    rows, matrices = operands(width, hidden, torch.float32, transposed)
    ends = ends_of(COUNTS)
    ops, check = torch.ops.autopar, torch.library.opcheck
    check(ops.multiply_groups.default, (rows, matrices, ends, KERNEL), test_utils="test_faketensor")
    gradients = torch.randn(hidden, len(rows)).t() if transposed else torch.randn(len(rows), hidden)
    check(ops.sum_groups.default, (rows, gradients, ends, KERNEL), test_utils="test_faketensor")


def test_second_derivatives() -> None:
    rows, matrices = operands(8, 4, torch.float64, False)
    ends = ends_of(COUNTS)
    given = rows.requires_grad_(), matrices.requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x, m: grouped_rows(x, m, None, ends, KERNEL), given)


def test_the_order_of_rows_and_the_ends_of_their_groups() -> None:
    key = torch.tensor([3, 1, 3, 0, 1, 4])
    order, inverse, ends = sort_rows(key, 0, 5, True)
    assert order.tolist() == [3, 1, 4, 0, 2, 5]
    assert order[inverse].tolist() == list(range(6))
    assert ends.tolist() == [1, 3, 3, 5, 6]
    assert ends.dtype == torch.int32
    order, inverse, ends = sort_rows(key, 1, 3, False)
    assert order.tolist() == [1, 4, 0, 2]
    assert not inverse.numel()
    assert ends.tolist() == [2, 2, 4]
    assert counts_of(ends).tolist() == [2, 0, 2]


@pytest.mark.parametrize("every", [True, False])
def test_rows_that_repeat_are_taken_without_copies(every: bool) -> None:
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    key = torch.tensor([0, 2, 1, 0, 2, 2, 1, 1])
    order, inverse, _ = sort_rows(key, 0, 3 if every else 2, every)
    weights = torch.randn(len(order), 3, dtype=torch.float64)
    wide = x.unsqueeze(1).expand(4, 2, 3).reshape(8, 3)
    found, expected = dispatch_rows(x, order, inverse, 2), dispatch_rows(wide, order, inverse)
    assert torch.equal(found, expected)
    pair = [torch.autograd.grad((one * weights).sum(), x)[0] for one in (found, expected)]
    assert torch.equal(*pair)
