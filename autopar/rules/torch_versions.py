"""Differences between the supported releases of torch, 2.11 to 2.15.

`make matrix` runs the tests on the oldest and the newest. Each call has a line that names the release that changed it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["all_gather_single", "original_apply", "reduce_scatter_single", "without_op_warnings"]

# Renamed in 2.13: before, all_gather_into_tensor and reduce_scatter_tensor.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def original_apply() -> Callable[..., Any]:
    """Return `torch.autograd.Function.apply`, not bound to a class: it takes the class first.

    Written in C since 2.14: a `classmethod_descriptor`, which has no `__func__`.
    """
    descriptor = torch.autograd.function.Function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        return descriptor.__get__(None, cls)(*args, **kwargs)

    return apply


@contextmanager
def without_op_warnings() -> Iterator[None]:
    """Drop the warnings of ops that are only tried, among them deprecated forms and slow strides.

    Since 2.15 an op called through `torch.ops` hands its warnings to Python; before, it wrote them to the log.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
