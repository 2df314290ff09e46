"""Graphs of examples, traced once in a process: plans and prices leave a graph as it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from autopar.ir.graph import NamedGraph
from autopar.tracing.trace import trace

__all__ = ["traced"]


def traced(make: Callable[..., Any], *given: Any, **sizes: Any) -> NamedGraph:
    """The graph of `make(*given, **sizes)`; equal requests share it."""
    return _traced(make, given, tuple(sorted(sizes.items())))


@cache
def _traced(make: Callable[..., Any], given: tuple[Any, ...], sizes: tuple[tuple[str, Any], ...]) -> NamedGraph:
    return trace(*make(*given, **dict(sizes)))
