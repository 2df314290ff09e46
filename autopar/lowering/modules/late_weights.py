"""Products with a weight that put off the weight's gradient.

The backward of such a product computes the gradient of its input, and records what the weight's gradient needs: the
input and the gradient of the result. A schedule of a pipeline computes it later, when other stages have their values.
A product of matrices is added to the sum of the gradients as it is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

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


class WeightSums(Protocol):
    """Sums of the gradients of leaves, by place."""

    def put(self, place: int, gradient: Tensor) -> None:
        """Add a gradient of one leaf, in memory of its own."""
        ...

    def put_product(self, place: int, left: Tensor, right: Tensor) -> None:
        """Add a gradient of one leaf that is a product of two matrices."""
        ...


class _LateGradient(NamedTuple):
    """Operands of the gradients of a weight and a bias: the input and the gradient of the result."""

    product: LateProduct
    inputs: Tensor
    gradients: Tensor
    has_bias: bool

    def add(self, sums: WeightSums) -> list[int]:
        """Compute the gradients, add them to sums; return the places of their tensors."""
        product, inputs, gradients, has_bias = self
        if gradients.ndim != 2:
            inputs, gradients = inputs.reshape(-1, inputs.shape[-1]), gradients.reshape(-1, gradients.shape[-1])
        if product.is_linear:
            sums.put_product(product.weight, gradients.t(), inputs)
        else:
            sums.put_product(product.weight, inputs.t(), gradients)
        if not has_bias:
            return [product.weight]
        assert product.bias is not None, "its gradient is wanted"
        sums.put(product.bias, gradients.sum(0))
        return [product.weight, product.bias]


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
        found: Tensor
        if not is_late or (bias is not None and bias.ndim != 1):
            found = self.op(*operands)
        elif _saves_as_they_are() and (x := operands[self.input_at]) is not None and x.requires_grad:
            found = self._with_hook(x, operands)
        else:
            found = _LateProduct.apply(self, *operands)  # type: ignore[no-untyped-call]
        return found

    def _with_hook(self, x: Tensor, operands: Sequence[Tensor | None]) -> Tensor:
        """Multiply by constants, so that autograd computes the gradient of the input alone; keep that of the result."""
        bias = self.bias_of(operands)
        has_bias = bias is not None and bias.requires_grad
        constant = [one if one is None or one is x else one.detach() for one in operands]
        found: Tensor = self.op(*constant)
        late, of = self.late, x.detach()

        def keep(gradient: Tensor) -> None:
            late.append(_LateGradient(self, of, gradient, has_bias))

        found.register_hook(keep)  # type: ignore[no-untyped-call]
        return found

    def bias_of(self, operands: Sequence[Any]) -> Any:
        """Return what belongs to the bias; None without one."""
        at = self.bias_at
        return None if at is None or at >= len(operands) else operands[at]

    def extra_repr(self) -> str:
        return f"{self.op}, with the gradient of its weight put off"


def _saves_as_they_are() -> bool:
    """Return whether autograd keeps tensors for the backward, and no region recomputes or moves them."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is None


class _LateProduct(torch.autograd.Function):
    """Product that saves its operands as autograd does, for regions that recompute them."""

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
        product.late.append(_LateGradient(product, x, gradient, has_bias))
        found: list[Tensor | None] = [None] * (1 + len(wanted))
        if wanted[product.input_at]:
            found[1 + product.input_at] = flat.mm(weight if product.is_linear else weight.t()).reshape(shape)
        return tuple(found)
