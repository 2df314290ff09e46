"""Products that put off the gradients of their weights: the same gradients as autograd's, computed later."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from autopar.lowering.modules.gradient_sums import GradientSums
from autopar.lowering.modules.late_weights import LateProduct, LateWeights

aten = torch.ops.aten
# Op, operands before those that are shared, places of weight and bias.
PRODUCTS: dict[str, tuple[Any, list[tuple[int, ...]], int, int | None]] = {
    "linear": (aten.linear.default, [(2, 3, 4), (5, 4), (5,)], 1, 2),
    "linear without bias": (aten.linear.default, [(6, 4), (5, 4)], 1, None),
    "addmm": (aten.addmm.default, [(5,), (6, 4), (4, 5)], 2, 0),
    "mm": (aten.mm.default, [(6, 4), (4, 5)], 1, None),
    "matmul": (aten.matmul.default, [(2, 3, 4), (4, 5)], 1, None),
}


def recomputed() -> AbstractContextManager[Any]:
    """What a region that recomputes its ops sets: tensors are saved in another form."""
    return saved_tensors_hooks(lambda x: x.numpy(force=True), torch.from_numpy)


@pytest.mark.parametrize("around", [nullcontext, recomputed])
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_are_those_of_autograd(name: str, around: Any, frozen: bool) -> None:
    """Of three backwards, with weights put off until all have run; with a frozen bias or input."""
    op, shapes, weight, bias = PRODUCTS[name]
    torch.manual_seed(0)
    leaves = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    (at,) = {0, 1, 2}.intersection(range(len(leaves))) - {weight, bias}
    if frozen:
        leaves[at if bias is None else bias].requires_grad_(False)
    late = LateWeights()
    product = LateProduct(op, weight, bias, late)
    sums = GradientSums(leaves)
    expected = [torch.zeros_like(leaf) for leaf in leaves]
    put_off = []
    for _ in range(3):
        gradient = torch.randn_like(op(*leaves))
        trained = [leaf for leaf in leaves if leaf.requires_grad]
        for leaf, one in zip(trained, torch.autograd.grad(op(*leaves), trained, gradient), strict=True):
            expected[[x is leaf for x in leaves].index(True)] += one
        with around():
            sums.add([product(*leaves)], [gradient])
        assert leaves[weight].grad is None, "it is put off"
        put_off.append(late.take())
    for found in put_off:
        assert [place for one in found for place in one.add(sums)] == [
            place for place in (weight, bias) if place is not None and leaves[place].requires_grad
        ]
    for leaf, found_one, wanted in zip(leaves, sums.found(), expected, strict=True):
        if leaf.requires_grad:
            assert found_one is not None
            torch.testing.assert_close(found_one, wanted, rtol=1e-12, atol=1e-12)


def test_a_region_decides_what_it_saves() -> None:
    """Under hooks of saved tensors the product keeps no operand itself."""
    saved: list[Tensor] = []

    def pack(x: Tensor) -> int:
        saved.append(x)
        return len(saved) - 1

    x, weight = torch.ones(2, 3, requires_grad=True), torch.ones(4, 3, requires_grad=True)
    product = LateProduct(aten.linear.default, 1, None, LateWeights())
    with saved_tensors_hooks(pack, saved.__getitem__):
        product(x, weight)
    assert any(one.data_ptr() == x.data_ptr() for one in saved)


def test_no_graph_without_gradients() -> None:
    x, weight = torch.ones(2, 3, requires_grad=True), torch.ones(4, 3, requires_grad=True)
    with torch.no_grad():
        assert not LateProduct(aten.linear.default, 1, None, LateWeights())(x, weight).requires_grad
