"""Sums of gradients over the micro-batches of a call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from weakref import ref

import torch
from torch import Tensor

from autopar.sharding.options import sum_dtype

__all__ = ["GradientSums", "leaves_of"]

_HALF = (torch.float16, torch.bfloat16)


def leaves_of(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the inputs as leaves of the graph of each micro-batch."""
    return [x.detach().requires_grad_(x.requires_grad) for x in inputs]


def _take(sums: ref[GradientSums], place: int, leaf: Tensor) -> None:
    """Move the gradient of one micro-batch from `.grad` of a leaf to where its sum is, or begins."""
    found = sums()
    if found is not None and leaf.grad is not None and found.takes(place):
        gradient, leaf.grad = leaf.grad, None
        found.put(place, gradient)


class GradientSums:
    """Sums of the gradients of leaves over micro-batches; half precision adds up in float32."""

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self.leaves = leaves
        self.wanted = [place for place, leaf in enumerate(leaves) if leaf.requires_grad]
        self.is_half = any(leaves[place].dtype in _HALF for place in self.wanted)
        # Without half precision autograd adds to `.grad` of the leaves, in place, until somebody asks.
        self._totals: dict[int, Tensor] = {}
        # Memory for sums that have not begun.
        self._targets: dict[int, Tensor] = {}
        self.is_used = False
        for place in self.wanted if self.is_half else ():
            # At once: at the end of a backward the gradients of all leaves would be there twice.
            self._take_at_once(place)

    def _take_at_once(self, place: int) -> None:
        # A leaf that referred to the sums would live as long as they, and they as long as it.
        hook = partial(_take, ref(self), place)
        self.leaves[place].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def takes(self, place: int) -> bool:
        """Return whether a gradient is moved as soon as it is there; autograd adds to one that is in place."""
        return self.is_half or place in self._targets

    def use(self, place: int, target: Tensor) -> None:
        """Add up the gradients of one leaf in given memory, in the dtype of the sum."""
        if not self.is_half:
            self._take_at_once(place)
        self._targets[place] = target

    def add(
        self,
        parts: Sequence[Tensor],
        gradients: Sequence[Tensor],
        retain: bool = False,
        others: Sequence[Tensor] = (),
    ) -> list[Tensor | None]:
        """Add the gradients of one micro-batch, given those of its parts; return the gradients of other leaves."""
        # The graph has no leaves but these. Their list as an argument would cost a look-up for each of its nodes.
        torch.autograd.backward(parts, gradients, retain_graph=retain)
        taken = [leaf.grad for leaf in others]
        for leaf in others:
            leaf.grad = None
        return taken

    def _widen(self, place: int, gradient: Tensor) -> None:
        total = self._totals.get(place)
        if total is not None:
            total += gradient
            return
        target = self._targets.pop(place, None)
        if target is None:
            # A copy: the gradient may share memory with another one.
            target = gradient.to(sum_dtype(gradient.dtype), copy=True)
        else:
            target.copy_(gradient)
        self._totals[place] = target

    def put(self, place: int, gradient: Tensor) -> None:
        """Add a gradient of one leaf, in memory of its own."""
        leaf = self.leaves[place]
        if self.is_half:
            self._widen(place, gradient)
        elif (total := leaf.grad) is not None:
            total += gradient
        elif place in self._totals:
            self._totals[place] += gradient
        else:
            target = self._targets.pop(place, None)
            leaf.grad = gradient if target is None else target.copy_(gradient)

    def put_product(self, place: int, left: Tensor, right: Tensor) -> None:
        """Add a gradient of one leaf that is a product of two matrices."""
        total = self.leaves[place].grad
        if total is None:
            total = self._totals.get(place)
        if total is None or total.dtype != left.dtype:
            self.put(place, left.mm(right))
        else:
            total.addmm_(left, right)

    def _moved(self, place: int) -> Tensor | None:
        """Return the sum for one leaf, which is not in its `.grad` any more; None if there is no gradient."""
        leaf = self.leaves[place]
        if leaf.grad is not None:
            self._totals[place], leaf.grad = leaf.grad, None
        return self._totals.get(place)

    def total(self, place: int) -> Tensor:
        """Return the sum for one leaf, which may be zero."""
        found, leaf = self._moved(place), self.leaves[place]
        return torch.zeros_like(leaf, dtype=sum_dtype(leaf.dtype)) if found is None else found

    def take(self, place: int) -> Tensor:
        """Return the sum for one leaf, and forget it."""
        found = self.total(place)
        self._totals.pop(place, None)
        return found

    def pop(self, place: int) -> Tensor | None:
        """Return the sum for one leaf, and forget it; None if it has no gradient."""
        self._moved(place)
        return self._totals.pop(place, None)

    def replace(self, place: int, total: Tensor) -> None:
        """Set the sum for one leaf, in memory of its own."""
        self._moved(place)
        self._totals[place] = total

    def are_finite(self) -> bool:
        totals = map(self._moved, self.wanted)
        return all(bool(torch.isfinite(total).all()) for total in totals if total is not None)

    def found(self, factor: Tensor | None = None) -> list[Tensor | None]:
        """Return the sums times a factor, once: their memory goes to the caller."""
        self.is_used = True
        totals = {place: total for place in self.wanted if (total := self._moved(place)) is not None}
        # Reading the factor would make another device wait.
        if factor is not None and not (factor.is_cpu and factor == 1):
            by_dtype: dict[torch.dtype, list[Tensor]] = {}
            for total in totals.values():
                by_dtype.setdefault(total.dtype, []).append(total)
            for dtype, same in by_dtype.items():
                torch._foreach_mul_(same, factor.to(dtype))
        found: list[Tensor | None] = [None] * len(self.leaves)
        for place, total in totals.items():
            found[place] = total.to(self.leaves[place].dtype)
        self._totals = {}
        return found
