"""Helpers of families that write the rule of one call: fresh names, axes, the text of operands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopar.rules.bind_call import fresh_names
from autopar.rules.ops.elementwise import dims_text

__all__ = ["Names", "as_list", "compound", "text", "whole", "wrap"]

Dims = Sequence[str]


class Names:
    """Source of fresh factor names."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._names = iter(fresh_names(200, set(taken)))

    def one(self) -> str:
        return next(self._names)

    def some(self, count: int) -> list[str]:
        return [self.one() for _ in range(count)]

    def whole(self) -> str:
        return whole(self.one())


def whole(name: str) -> str:
    """Return the factor marked as one that cannot be split."""
    return f"{name}!"


def compound(factors: Sequence[str]) -> str:
    """Return one dim made of these factors, major first."""
    return factors[0] if len(factors) == 1 else f"({' '.join(factors)})"


def wrap(dim: int, rank: int) -> int:
    """Return a dim's number, counted from the left; a scalar counts as one dim."""
    return dim % max(rank, 1)


def as_list(value: int | Sequence[int] | None, count: int) -> list[int]:
    """Return a size argument that may be one number for all dims, or none at all."""
    values = [value] if isinstance(value, int) else list(value or ())
    return values * count if len(values) == 1 else values


def text(operands: Sequence[Dims | None], outputs: Sequence[Dims | None], *clauses: str) -> str:
    """Return a rule from the dims of its operands and outputs; None is an absent one."""
    left, right = (", ".join("?" if dims is None else dims_text(dims) for dims in side) for side in (operands, outputs))
    return "; ".join([f"{left} -> {right}", *(clause for clause in clauses if clause)])
