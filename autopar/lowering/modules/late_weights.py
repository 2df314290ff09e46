"""Products with a weight that put off the weight's gradient.

The backward of such a product computes the gradient of its input, and records what the weight's gradient needs: the
input and the gradient of the result. A schedule of a pipeline computes it later, when other stages have their values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Node

from autopar.sharding.pipelining import PRODUCTS

__all__ = ["LateProduct", "LateWeights", "operands_of"]

aten = torch.ops.aten


def operands_of(node: Node) -> tuple[Node, Node | None] | None:
    """Return the weight and the bias of a product; None for other ops."""
    places = PRODUCTS.get(str(node.target))
    if places is None:
        return None
    _, weight, bias = (None if i is None or i >= len(node.args) else node.args[i] for i in places)
    assert isinstance(weight, Node), f"{node} has a weight"
    assert bias is None or isinstance(bias, Node), f"{node} has a bias that is a tensor"
    return weight, bias


class _LateGradient(NamedTuple):
    """Operands of the gradients of a weight and a bias, as matrices."""

    product: LateProduct
    inputs: Tensor
    gradients: Tensor
    has_bias: bool

    def add(self, put: Callable[[int, Tensor], None]) -> None:
        """Compute the gradients, and hand them on with the places of their tensors."""
        product, inputs, gradients, has_bias = self
        if product.is_linear:
            put(product.weight, gradients.t().mm(inputs))
        else:
            put(product.weight, inputs.t().mm(gradients))
        if has_bias:
            assert product.bias is not None, "its gradient is wanted"
            put(product.bias, gradients.sum(0))


class LateWeights:
    """Gradients of weights that the backward of one part has put off."""

    def __init__(self) -> None:
        self._found: list[_LateGradient] = []

    def append(self, one: _LateGradient) -> None:
        self._found.append(one)

    def take(self) -> list[_LateGradient]:
        """Return what has been put off since the last time."""
        found, self._found = self._found, []
        return found


class LateProduct(nn.Module):
    """Product whose weight and bias are inputs of a loop, at these places."""

    def __init__(self, op: Any, weight: int, bias: int | None, late: LateWeights) -> None:
        super().__init__()
        self.op, self.weight, self.bias, self.late = op, weight, bias, late
        # Places among the operands.
        self.input_at, self.weight_at, self.bias_at = PRODUCTS[str(op)]
        self.is_linear = op is aten.linear.default

    def forward(self, *operands: Tensor | None) -> Tensor:
        weight, bias = operands[self.weight_at], self.bias_of(operands)
        is_late = torch.is_grad_enabled() and weight is not None and weight.requires_grad and weight.ndim == 2
        if is_late and (bias is None or bias.ndim == 1):
            found: Tensor = _LateProduct.apply(self, *operands)  # type: ignore[no-untyped-call]
        else:
            found = self.op(*operands)
        return found

    def bias_of(self, operands: Sequence[Any]) -> Any:
        """Return what belongs to the bias; None without one."""
        at = self.bias_at
        return None if at is None or at >= len(operands) else operands[at]

    def extra_repr(self) -> str:
        return f"{self.op}, with the gradient of its weight put off"


class _LateProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: LateProduct, *operands: Tensor | None) -> Tensor:
        ctx.product = product
        ctx.save_for_backward(operands[product.input_at], operands[product.weight_at])
        found: Tensor = product.op(*operands)
        return found

    # The loop computes no second derivatives, so gradients have no graph.
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        product: LateProduct = ctx.product
        _, *wanted = ctx.needs_input_grad
        shape = x.shape
        flat = gradient.reshape(-1, gradient.shape[-1])
        has_bias = bool(product.bias_of(wanted))
        product.late.append(_LateGradient(product, x.reshape(-1, shape[-1]), flat, has_bias))
        found: list[Tensor | None] = [None] * (1 + len(wanted))
        if wanted[product.input_at]:
            found[1 + product.input_at] = flat.mm(weight if product.is_linear else weight.t()).reshape(shape)
        return tuple(found)
