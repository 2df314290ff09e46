"""What a trace depends on besides its inputs: train or eval, grad mode, autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

__all__ = ["Autocast", "autocast_state", "entered"]

_DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps")


@dataclass(frozen=True)
class Autocast:
    device_type: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"autocast({self.device_type!r}, {self.dtype})"


def autocast_state() -> tuple[Autocast, ...]:
    """The autocast regions this call stands in; empty when there are none."""
    return tuple(
        Autocast(kind, torch.get_autocast_dtype(kind)) for kind in _DEVICE_TYPES if torch.is_autocast_enabled(kind)
    )


@contextmanager
def entered(autocast: tuple[Autocast, ...], *, enabled: bool = True) -> Iterator[None]:
    """Stand in these autocast regions, or (`enabled=False`) in none of them."""
    with ExitStack() as stack:
        for region in autocast:
            stack.enter_context(torch.autocast(region.device_type, region.dtype, enabled, cache_enabled=False))
        yield
