"""Linears in float8: operands are scaled and rounded, multiplied, and the products summed in float32.

Each rank scales what it multiplies: a tensor by one number, or each row of the left and each column of the right
operand by its own. Scales are powers of two, so that scaling rounds nothing, and rounding a rounded tensor again
changes nothing. Inputs and weights are e4m3. Gradients of results are e5m2, which has more range, or e4m3 with a scale
for each row. `torch._scaled_mm` multiplies; sizes that it does not take are multiplied in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode

from autopar.ir.analysis.float8_products import MULTIPLE
from autopar.lowering.modules.float8_weights import cast_weight

__all__ = [
    "E4M3",
    "FLOAT8_LINEAR",
    "MULTIPLE",
    "coded",
    "decoded",
    "float8_linear",
    "right_operand",
    "rounded",
    "scale_of",
    "scaled",
]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Of a float32.
EXPONENT_BITS = 0x7F800000

_LIBRARY: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("float8_linear(Tensor input, Tensor weight, Tensor? bias, bool rows) -> Tensor")
# Two ops: a frozen weight has no gradient, nor has an input that nothing before it trains.
_LIBRARY.define("float8_input_gradient(Tensor gradient, Tensor weight, bool rows) -> Tensor")
_LIBRARY.define("float8_weight_gradient(Tensor gradient, Tensor input, bool rows) -> Tensor")


def float8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, rows: bool) -> Tensor:
    """Return `linear(x, weight, bias)` of operands in float8, with a scale for each row or for each tensor."""
    found: Tensor = torch.ops.autopar.float8_linear.default(x, weight, bias, rows)
    return found


def scale_of(largest: Tensor, dtype: torch.dtype = E4M3) -> Tensor:
    """Return the power of two by which numbers up to `largest` fill the range of a dtype; NaN for inf."""
    largest = largest.float()
    # Few ops: on a GPU they take longer to start than to run. Without its mantissa a number is the power of two below.
    bits = (torch.finfo(dtype).max / largest).view(torch.int32).bitwise_and(EXPONENT_BITS)
    # Beyond these exponents the scale or its inverse is no normal float32; zeros may have any scale.
    found = bits.view(torch.float32).clamp(2.0**-126, 2.0**126)
    # An overflow must show in the result: casts to float8 may turn infinity into the largest number.
    return torch.addcmul(found, largest, torch.zeros_like(largest))


def scaled(x: Tensor, dtype: torch.dtype, dim: int | None) -> tuple[Tensor, Tensor]:
    """Return a tensor in float8 and its scale: one number, or one for each slice along a reduced dim."""
    largest = _largest(x, dim)
    scale = scale_of(largest, dtype)
    return (x * scale.to(x.dtype)).to(dtype), scale


def rounded(x: Tensor, scale: Tensor, dtype: torch.dtype = E4M3) -> Tensor:
    """Return the numbers of a tensor as float8 has them under a scale."""
    return (x * scale.to(x.dtype)).to(dtype).to(x.dtype) / scale.to(x.dtype)


# Bytes of a float32: a scale stands behind the numbers that it belongs to.
SCALE_BYTES = 4


def coded(x: Tensor) -> Tensor:
    """Return the numbers of a tensor in float8, and the inverse of their scale, as bytes."""
    made, scale = scaled(x.reshape(-1), E4M3, None)
    return torch.cat([made.view(torch.uint8), scale.reciprocal().reshape(1).view(torch.uint8)])


def decoded(x: Tensor, parts: int, dtype: torch.dtype) -> Tensor:
    """Return the numbers of tensors that were coded apart and joined, one in each row."""
    rows = x.view(parts, -1)
    scales = rows[:, -SCALE_BYTES:].contiguous().view(torch.float32)
    return rows[:, :-SCALE_BYTES].view(E4M3).to(dtype).mul_(scales.to(dtype))


def _largest(x: Tensor, dim: int | None) -> Tensor:
    if not x.numel():
        return x.new_zeros(() if dim is None else [1 if i == dim else size for i, size in enumerate(x.shape)])
    if dim is None:
        low, high = torch.aminmax(x)
    else:
        low, high = torch.aminmax(x, dim=dim, keepdim=True)
    return torch.maximum(-low, high)


def product(
    a: Tensor, b: Tensor, dtypes: tuple[torch.dtype, torch.dtype], rows: bool, by_weight: bool = False
) -> Tensor:
    """Return `a @ b` of operands in float8, in the dtype of `a`; `by_weight`: `b` is a weight, in e4m3."""
    left, left_scale = scaled(a, dtypes[0], 1 if rows else None)
    cast, dim = partial(right_operand, dtype=dtypes[1]), 0 if rows else None
    right, right_inverse = cast_weight(b, dim, cast) if by_weight else cast(b, dim)
    inverses = left_scale.reciprocal(), right_inverse
    if 0 in (*a.shape, *b.shape) or any(size % MULTIPLE for size in (*a.shape, *b.shape)) or not _has_kernel(a):
        return emulated(left, right, inverses, a.dtype)
    made: Tensor = torch._scaled_mm(
        left.contiguous(), right, scale_a=inverses[0], scale_b=inverses[1], out_dtype=a.dtype
    )
    return made


def right_operand(x: Tensor, dim: int | None, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    """Return matrices in float8 by columns, as kernels read the right operand, and the inverse of their scale."""
    made, scale = scaled(x, dtype, dim)
    by_columns = made if made.stride(-2) == 1 else made.transpose(-2, -1).contiguous().transpose(-2, -1)
    return by_columns, scale.reciprocal()


def emulated(left: Tensor, right: Tensor, inverses: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """Return a product of matrices in float8 by a product in float32."""
    return (left.float() @ right.float() * (inverses[0] * inverses[1])).to(dtype)


def _has_kernel(x: Tensor) -> bool:
    if x.is_cuda:
        return torch.cuda.get_device_capability(x.device) >= (8, 9)
    return x.device.type == "cpu"


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, rows: bool) -> Tensor:
    made = product(x.reshape(-1, x.shape[-1]), weight.t(), (E4M3, E4M3), rows, by_weight=True)
    made = made if bias is None else made + bias
    return made.reshape(*x.shape[:-1], weight.shape[0])


def _input_gradient(gradient: Tensor, weight: Tensor, rows: bool) -> Tensor:
    made = product(_matrix(gradient), weight, (E4M3 if rows else E5M2, E4M3), rows, by_weight=True)
    return made.reshape(*gradient.shape[:-1], weight.shape[1])


def _weight_gradient(gradient: Tensor, x: Tensor, rows: bool) -> Tensor:
    return product(_matrix(gradient).t(), _matrix(x), (E4M3 if rows else E5M2, E4M3), rows)


def _matrix(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, ctx.rows = inputs
    needed = ctx.needs_input_grad
    # Each operand is saved for the gradient of the other one.
    ctx.save_for_backward(x if needed[1] else None, weight if needed[0] else None)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    ops = torch.ops.autopar
    of_input = None if weight is None else ops.float8_input_gradient.default(gradient, weight, ctx.rows)
    of_weight = None if x is None else ops.float8_weight_gradient.default(gradient, x, ctx.rows)
    return of_input, of_weight, _matrix(gradient).sum(0) if ctx.needs_input_grad[2] else None, None


def _in_parts(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return a function by which a compiler sees the ops inside of one of ours, and fuses scales and casts."""

    def run(mode: FunctionalTensorMode, op: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with mode:
            return function(*args, **kwargs)

    return run


for _name, _function in (
    ("float8_linear", _linear),
    ("float8_input_gradient", _input_gradient),
    ("float8_weight_gradient", _weight_gradient),
):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_torch_dispatch(f"autopar::{_name}", FunctionalTensorMode, _in_parts(_function), lib=_LIBRARY)
torch.library.register_fake(
    "autopar::float8_linear", lambda x, weight, bias, rows: x.new_empty(*x.shape[:-1], weight.shape[0]), lib=_LIBRARY
)
torch.library.register_fake(
    "autopar::float8_input_gradient",
    lambda gradient, weight, rows: gradient.new_empty(*gradient.shape[:-1], weight.shape[1]),
    lib=_LIBRARY,
)
torch.library.register_fake(
    "autopar::float8_weight_gradient",
    lambda gradient, x, rows: gradient.new_empty(gradient.shape[-1], x.shape[-1]),
    lib=_LIBRARY,
)
FLOAT8_LINEAR = torch.ops.autopar.float8_linear.default
torch.library.register_autograd("autopar::float8_linear", _backward, setup_context=_setup, lib=_LIBRARY)
