"""Models of one process whose linears multiply in float8."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from autopar.lowering.modules.float8 import float8_linear

__all__ = ["linears_in_float8"]


@contextmanager
def linears_in_float8(model: nn.Module, rows: bool) -> Iterator[None]:
    """Replace the linears of a model: float8 operands, computed in bfloat16 around them."""
    kept: list[tuple[nn.Linear, Callable[..., Tensor]]] = []
    for one in model.modules():
        if isinstance(one, nn.Linear):
            kept.append((one, one.forward))
            one.forward = lambda x, one=one: float8_linear(x, one.weight, one.bias, rows)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for one, forward in kept:
            one.forward = forward  # type: ignore[method-assign]
