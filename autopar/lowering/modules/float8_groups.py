"""Products of rows by group in float8: each row, and each column of a group's matrix, has a scale of its own.

All operands are e4m3, under either preset: the kernel takes no other dtype, and no scale of a whole tensor. Gradients
of the matrices sum over the rows of a group, so their scales are those of a column within a group. Where there is no
kernel, the rounded numbers are multiplied in bfloat16, which has all of them exactly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.lowering.modules.float8 import E4M3, MULTIPLE, right_operand, scale_of, scaled
from autopar.lowering.modules.float8_weights import cast_weight
from autopar.rules.shard_call.sparse_rows import counts_of, ends_of, multiply_groups, sum_groups, with_bias

__all__ = ["float8_grouped"]

# The kernel is for one generation of GPUs.
CAPABILITY = (9, 0)
# Multiplies where there is no kernel.
OTHERWISE = "aten._grouped_mm.default"

_LIBRARY: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("float8_groups(Tensor rows, Tensor matrices, Tensor ends) -> Tensor")
_LIBRARY.define("float8_groups_gradient(Tensor rows, Tensor gradients, Tensor ends) -> Tensor")


def float8_grouped(rows: Tensor, matrices: Tensor, bias: Tensor | None, ends: Tensor | None = None) -> Tensor:
    """Multiply the rows of each group by its matrix, and add its bias; without ends all groups have as many rows."""
    if ends is None:
        groups = matrices.shape[0]
        ends = torch.arange(1, groups + 1, dtype=torch.int32, device=rows.device) * (rows.shape[0] // groups)
    return with_bias(torch.ops.autopar.float8_groups.default(rows, matrices, ends), bias, ends)


def _multiply(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    left, left_scale = scaled(rows, E4M3, 1)
    right, right_inverse = cast_weight(matrices, 1, right_operand)
    left_inverse = left_scale.reciprocal()
    if _has_kernel(rows, matrices):
        return grouped_kernel(left, right, (left_inverse.squeeze(1), right_inverse.squeeze(1)), ends)
    dtype = rows.dtype
    left, right = left.to(dtype) * left_inverse.to(dtype), right.to(dtype) * right_inverse.to(dtype)
    return multiply_groups(left, right, ends, OTHERWISE)


def _gradient(rows: Tensor, gradients: Tensor, ends: Tensor) -> Tensor:
    counts = counts_of(ends)
    groups = torch.arange(counts.shape[0], device=counts.device)
    group = groups.repeat_interleave(counts, output_size=rows.shape[0])
    (left, left_scale), (right, right_scale) = (
        _scaled_by_group(side, group, counts.shape[0]) for side in (rows, gradients)
    )
    inverses = left_scale.reciprocal(), right_scale.reciprocal()
    if _has_kernel(rows, gradients):
        left, right = in_multiples(left, group, counts), in_multiples(right, group, counts)
        return summing_kernel(left, right, inverses, counts)
    dtype = rows.dtype
    left = left.to(dtype) * inverses[0].to(dtype)[group]
    right = right.to(dtype) * inverses[1].to(dtype)[group]
    return sum_groups(left, right, ends, OTHERWISE)


def _scaled_by_group(x: Tensor, group: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Return rows in float8, and the scale of each column of each group."""
    largest = x.new_zeros(groups, x.shape[1]).scatter_reduce_(0, group.unsqueeze(1).expand_as(x), x.abs(), "amax")
    scale = scale_of(largest)
    return (x * scale.to(x.dtype)[group]).to(E4M3), scale


# -- kernels of GPUs ---------------------------------------------------------------------------------------------------


def _has_kernel(rows: Tensor, other: Tensor) -> bool:
    sizes = (rows.shape[1], *other.shape[1:])
    if not rows.is_cuda or not rows.shape[0] or any(size % MULTIPLE for size in sizes):
        return False
    return torch.cuda.get_device_capability(rows.device) == CAPABILITY


def grouped_kernel(left: Tensor, right: Tensor, inverses: tuple[Tensor, Tensor], ends: Tensor) -> Tensor:
    """Return rows times the matrices of their groups, which are stored by columns."""
    found: Tensor = torch._scaled_grouped_mm(left.contiguous(), right, *inverses, offs=ends, out_dtype=torch.bfloat16)
    return found


def summing_kernel(left: Tensor, right: Tensor, inverses: tuple[Tensor, Tensor], counts: Tensor) -> Tensor:
    """Return the product of the transposed rows of each group by its other rows; groups begin at multiples of 16."""
    ends = ends_of(_round_up(counts))
    left, right = left.t().contiguous(), right.t().contiguous().t()
    scales = inverses[0].reshape(-1), inverses[1].reshape(-1)
    found: Tensor = torch._scaled_grouped_mm(left, right, *scales, offs=ends, out_dtype=torch.bfloat16)
    return found


def in_multiples(x: Tensor, group: Tensor, counts: Tensor) -> Tensor:
    """Return rows with zeros after each group, so that groups begin at multiples of 16; the host reads no count."""
    padded = _round_up(counts)
    shift = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)
    places = torch.arange(x.shape[0], device=x.device) + shift[group]
    most = x.shape[0] + counts.shape[0] * (MULTIPLE - 1)
    found = x.new_zeros(most + -most % MULTIPLE, x.shape[1])
    # As bytes: not every device copies float8 by index.
    found.view(torch.uint8).index_copy_(0, places, x.view(torch.uint8))
    return found


def _round_up(counts: Tensor) -> Tensor:
    return (counts + MULTIPLE - 1) // MULTIPLE * MULTIPLE


# -- registration ------------------------------------------------------------------------------------------------------


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, matrices, ends = inputs
    needed = ctx.needs_input_grad
    # Each operand is saved for the gradient of the other one.
    ctx.save_for_backward(rows if needed[1] else None, matrices if needed[0] else None, ends)
    # In the order of memory of the matrices: a weight that is used transposed would copy its gradient.
    ctx.turned = matrices.stride(1) < matrices.stride(2)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, matrices, ends = ctx.saved_tensors
    ops = torch.ops.autopar
    of_rows = of_matrices = None
    if matrices is not None:
        of_rows = ops.float8_groups.default(gradient, matrices.transpose(1, 2), ends)
    if rows is not None:
        pair = (gradient, rows) if ctx.turned else (rows, gradient)
        found = ops.float8_groups_gradient.default(*pair, ends)
        of_matrices = found.transpose(1, 2) if ctx.turned else found
    return of_rows, of_matrices, None


_LIBRARY.impl("float8_groups", _multiply, "CompositeExplicitAutograd")
_LIBRARY.impl("float8_groups_gradient", _gradient, "CompositeExplicitAutograd")
torch.library.register_fake(
    "autopar::float8_groups",
    lambda rows, matrices, ends: rows.new_empty(rows.shape[0], matrices.shape[2]),
    lib=_LIBRARY,
)
torch.library.register_fake(
    "autopar::float8_groups_gradient",
    lambda rows, gradients, ends: rows.new_empty(ends.shape[0], rows.shape[1], gradients.shape[1]),
    lib=_LIBRARY,
)
torch.library.register_autograd("autopar::float8_groups", _backward, setup_context=_setup, lib=_LIBRARY)
