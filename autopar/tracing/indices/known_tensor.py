"""Read a tensor whose data is there as a function of its indices: positions, one number, or a band of a matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.tracing.indices.piecewise import (
    Affine,
    Pieces,
    Term,
    UnreadError,
    at_least,
    both,
    constant,
    merged,
    negation,
)

__all__ = ["pieces_of"]


def pieces_of(tensor: Tensor) -> Pieces:
    """The pieces of a constant. Each form is compared with all of the data before it is given."""
    if tensor.is_meta or not tensor.numel() or tensor.is_complex():
        raise UnreadError("depends on a constant without data")
    tensor = tensor.detach().cpu()
    first = tensor.reshape(-1)[0]
    if bool((tensor == first).all()):
        return constant(_term(first))
    found = _positions(tensor) or _band(tensor)
    if found is None:
        raise UnreadError("depends on a constant that is no band")
    return found


def _term(element: Tensor) -> Term:
    number = element.item()
    return Affine(number) if isinstance(number, int) and not isinstance(number, bool) else number


def _positions(tensor: Tensor) -> Pieces | None:
    """`first + step * index` along one dim."""
    longer = [dim for dim, extent in enumerate(tensor.shape) if extent != 1]
    if len(longer) != 1 or tensor.dtype is torch.bool or tensor.is_floating_point():
        return None
    numbers = tensor.reshape(-1)
    start, step = int(numbers[0]), int(numbers[1]) - int(numbers[0])
    if not torch.equal(numbers.long(), start + step * torch.arange(len(numbers), device="cpu")):
        return None
    return constant(Affine.of(start, {longer[0] - tensor.dim(): step}))


def _band(tensor: Tensor) -> Pieces | None:
    """Two numbers, one of them where `low <= column - row <= high`, the same in all matrices."""
    if tensor.dim() < 2:
        return None
    matrix = tensor[(0,) * (tensor.dim() - 2)]
    corner = matrix[0, 0]
    rows, columns = (torch.arange(extent, device="cpu") for extent in matrix.shape)
    apart = columns[None, :] - rows[:, None]
    shape = tuple(tensor.shape)
    for inside in (matrix == corner, matrix != corner):
        low, high = int(apart[inside].min()), int(apart[inside].max())
        fits = torch.equal(inside, (apart >= low) & (apart <= high))
        other = matrix[~inside][0]
        here = matrix[inside][0]
        if fits and bool((tensor == torch.where(inside, here, other)).all()):
            along = Affine.of(0, {-1: int(shape[-1] > 1), -2: -int(shape[-2] > 1)})
            held = both(at_least(along - Affine(low), shape), at_least(Affine(high) - along, shape), shape)
            return merged([(_term(here), held), (_term(other), negation(held, shape))], shape)
    return None
