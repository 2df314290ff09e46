"""`named` and `constrain`: say inside a model what the dims of a tensor are called, and where they go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch

__all__ = ["constrain", "constrain_op", "named", "named_op", "tracing"]

_tracing: ContextVar[bool] = ContextVar("autopar_tracing", default=False)


def named(x: torch.Tensor, dims: str) -> torch.Tensor:
    """`x` itself; a trace remembers the names of its dims: `named(x, "batch seq d_model")`."""
    if not _tracing.get():
        return x
    result: torch.Tensor = named_op()(x, dims)
    return result


def constrain(x: torch.Tensor, layout: str) -> torch.Tensor:
    """`x` itself; a layout is made to say this about it: `constrain(x, "batch -> dp, seq -> tp")`."""
    if not _tracing.get():
        return x
    result: torch.Tensor = constrain_op()(x, layout)
    return result


@contextmanager
def tracing() -> Iterator[None]:
    """While this stands, `named` and `constrain` leave a mark in the graph."""
    token = _tracing.set(True)
    try:
        yield
    finally:
        _tracing.reset(token)


@cache
def named_op() -> Any:
    """The operator behind `named`, defined at its first use."""
    return _mark("named")


@cache
def constrain_op() -> Any:
    """The operator behind `constrain`, defined at its first use."""
    return _mark("constrain")


def _mark(name: str) -> Any:
    def copied(x: torch.Tensor, text: str) -> torch.Tensor:
        return x.clone()  # an operator must not return what it was given

    op = torch.library.custom_op(f"autopar::{name}", copied, mutates_args=())
    op.register_fake(lambda x, text: torch.empty_like(x))
    return getattr(torch.ops.autopar, name).default
