"""Cross-entropy of the result of a linear layer, over pieces of the rows of one shard.

Logits are large: one number for each row and class. Here those of one piece of the rows live at a time. For each row
the logarithm of the sum of the exponentials and the logit of the target are kept. The backward computes the logits of
each piece again. So it multiplies the rows by the weight twice. Gradients of the weight are added in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from autopar.rules.shard_call.attention import check_first_derivative, in_sum_dtype

__all__ = ["NONE", "SUM", "Classes", "LogitsForm", "losses_of_rows", "piece_sizes"]

# Values of `reduction` in ATen; a mean is a sum over a count by then.
NONE, SUM = 0, 2

_Send = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LogitsForm:
    """Ops between the product and the loss: a factor, a soft cap `cap * tanh(x / cap)`, a cast to 32 bits or more.

    A cap of 0 is none.
    """

    scale: float = 1.0
    softcap: float = 0.0
    dtype: torch.dtype | None = None

    def of(self, product: Tensor) -> Tensor:
        """Return the logits before the cast."""
        scaled = product if self.scale == 1.0 else product * self.scale
        return torch.tanh(scaled / self.softcap) * self.softcap if self.softcap else scaled

    def wide(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype to sum in."""
        own = self.dtype or dtype
        return torch.float32 if own in (torch.float16, torch.bfloat16) else own

    def of_product(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """Return the gradient of the product, of one of the logits after the cast."""
        found = gradient.to(logits.dtype)
        if self.softcap:
            found = found * (1 - (logits / self.softcap).square())
        return found if self.scale == 1.0 else found * self.scale


@dataclass(frozen=True)
class Classes:
    """Classes of a shard: their first one and how many the model has; functions that add up over the shards."""

    start: int
    total: int
    largest: _Send | None = None
    added: _Send | None = None


def piece_sizes(rows: int, pieces: int) -> Iterator[tuple[int, int]]:
    """Yield the first row and the number of rows of each piece."""
    size = max(1, -(-rows // pieces))
    for first in range(0, rows, size):
        yield first, min(size, rows - first)


def losses_of_rows(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    classes: Classes,
    form: LogitsForm,
    *,
    reduction: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    pieces: int = 1,
) -> Tensor:
    """Return the cross-entropy of each row, or the sum; `rows` is `rows k`, `weight` has the classes of a shard."""
    counted = target != ignore_index
    known = (target >= 0) & (target < classes.total)
    torch._assert_async((known | ~counted).all(), f"cross_entropy: a target is not one of {classes.total} classes")
    index = torch.where(counted, target, 0) - classes.start
    share = label_smoothing / classes.total
    sums, chosen = _RowStatistics.apply(  # type: ignore[no-untyped-call]
        rows, weight, bias, index, form, pieces, 1 - label_smoothing, share
    )
    if classes.largest is not None and classes.added is not None:
        top = classes.largest(sums.detach())
        top = torch.where(top.isinf(), 0, top)
        spread, chosen = classes.added(torch.stack([(sums - top).exp(), chosen])).unbind()
        sums = top + spread.log()
    losses: Tensor = torch.where(counted, sums - chosen, 0)
    losses = losses if reduction == NONE else losses.sum()
    return losses.to(rows.dtype if form.dtype is None else form.dtype)


class _RowStatistics(torch.autograd.Function):
    """Logarithm of the sum of the exponentials of each row, and the logit of its target, mixed with those of all.

    Minus infinity and zero where the shard has no class, or not the target.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        index: Tensor,
        form: LogitsForm,
        pieces: int,
        own: float,
        share: float,
    ) -> tuple[Tensor, Tensor]:
        wide = form.wide(rows.dtype)
        sums = rows.new_full(rows.shape[:1], float("-inf"), dtype=wide)
        chosen = sums.new_zeros(sums.shape)
        for first, size in piece_sizes(rows.shape[0], pieces) if weight.shape[0] else ():
            logits = form.of(functional.linear(rows.narrow(0, first, size), weight, bias))
            place, inside = _places(index.narrow(0, first, size), weight.shape[0])
            found = torch.where(inside, logits.gather(1, place.unsqueeze(1)).squeeze(1), 0).to(wide)
            mixed = own * found + share * logits.sum(1, dtype=wide) if share else found
            chosen.narrow(0, first, size).copy_(mixed)
            # The largest logarithm is minus that of the sum, relative to the largest logit. Kernels fuse the softmax.
            top = logits.amax(1).to(wide)
            least = torch.log_softmax(logits, 1, dtype=wide).amax(1)
            sums.narrow(0, first, size).copy_(torch.where(top.isinf(), top, top - least))
        ctx.save_for_backward(rows, weight, bias, index, sums)
        ctx.call = form, pieces, own, share
        return sums, chosen

    @staticmethod
    def backward(ctx: Any, of_sums: Tensor, of_chosen: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative("a loss in pieces")
        rows, weight, bias, index, sums = ctx.saved_tensors
        form, pieces, own, share = ctx.call
        of_rows = torch.zeros_like(rows) if ctx.needs_input_grad[0] else None
        of_weight = torch.zeros_like(in_sum_dtype(weight)) if ctx.needs_input_grad[1] else None
        of_bias = torch.zeros_like(in_sum_dtype(bias)) if ctx.needs_input_grad[2] else None
        for first, size in piece_sizes(rows.shape[0], pieces) if weight.shape[0] else ():
            taken = rows.narrow(0, first, size)
            logits = form.of(functional.linear(taken, weight, bias))
            given = of_chosen.narrow(0, first, size)
            of_logits = torch.softmax(logits, 1, dtype=sums.dtype).mul_(of_sums.narrow(0, first, size).unsqueeze(1))
            if bias is not None:  # it may exclude all classes of a shard
                of_logits.masked_fill_(sums.narrow(0, first, size).isinf().unsqueeze(1), 0)
            if share:
                of_logits.add_((given * share).unsqueeze(1))
            place, inside = _places(index.narrow(0, first, size), weight.shape[0])
            of_logits.scatter_add_(1, place.unsqueeze(1), torch.where(inside, given * own, 0).unsqueeze(1))
            of_product = form.of_product(of_logits, logits)
            del of_logits, logits
            if of_rows is not None:
                of_rows.narrow(0, first, size).copy_(of_product @ weight)
            if of_weight is not None:
                _add_product(of_weight, of_product, taken)
            if of_bias is not None:
                of_bias.add_(of_product.sum(0, dtype=of_bias.dtype))
        of_weight = None if of_weight is None else of_weight.to(weight.dtype)
        of_bias = None if of_bias is None else of_bias.to(bias.dtype)
        return of_rows, of_weight, of_bias, None, None, None, None, None


def _places(index: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return the place of each target among the classes of a shard, 0 where it has not, and where it has."""
    inside = (index >= 0) & (index < classes)
    return torch.where(inside, index, 0), inside


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the product of transposed `left` and `right` to a total, which may have a wider dtype."""
    if total.dtype == left.dtype:
        torch.addmm(total, left.t(), right, out=total)
    else:
        total.add_(left.t() @ right)
