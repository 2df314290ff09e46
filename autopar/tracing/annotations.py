"""Annotations inside a model: `named` names the dims of a tensor, `constrain` pins its sharding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch

_tracing: ContextVar[bool] = ContextVar("autopar_tracing", default=False)


def named(x: torch.Tensor, dims: str) -> torch.Tensor:
    """Name the dims of a tensor for a trace.

    Parameters:
        x: a tensor in the forward of a model.
        dims: one name for each dim, `_` for a dim without one: `"batch seq d_model"`, `"batch seq (heads head_dim)"`.

    Returns:
        `x` itself; during a trace an op that returns it.

    >>> import autopar, torch
    >>> autopar.named(torch.ones(2, 3), "batch d_model").shape
    torch.Size([2, 3])
    """
    if not _tracing.get():
        return x
    result: torch.Tensor = named_op()(x, dims)
    return result


def constrain(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Pin the sharding of a tensor, as a line of a layout would.

    Parameters:
        x: a tensor in the forward of a model.
        layout: splits by dim name: `"batch -> dp, seq -> tp"`.

    Returns:
        `x` itself; during a trace an op that returns it.

    >>> import autopar, torch
    >>> autopar.constrain(torch.ones(2, 3), "batch -> dp").shape
    torch.Size([2, 3])
    """
    if not _tracing.get():
        return x
    result: torch.Tensor = constrain_op()(x, layout)
    return result


@contextmanager
def tracing() -> Iterator[None]:
    """Record `named` and `constrain` as ops of the graph."""
    token = _tracing.set(True)
    try:
        yield
    finally:
        _tracing.reset(token)


@cache
def named_op() -> Any:
    """Return the operator behind `named`, defined at its first use."""
    return _annotation_op("named")


@cache
def constrain_op() -> Any:
    """Return the operator behind `constrain`, defined at its first use."""
    return _annotation_op("constrain")


def _annotation_op(name: str) -> Any:
    def clone(x: torch.Tensor, text: str) -> torch.Tensor:
        # A custom op must not return its input.
        return x.clone()

    op = torch.library.custom_op(f"autopar::{name}", clone, mutates_args=())
    op.register_fake(lambda x, text: torch.empty_like(x))
    return getattr(torch.ops.autopar, name).default
