"""Dims that a layout leaves whole, as its axes do not divide them and its rule allows `none`."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, prod

from autopar.ir.graph import NamedGraph
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.matching import matches
from autopar.sharding.layout.syntax import DimRule, NotSplit, SplitTerm
from autopar.submesh import SubMesh

__all__ = ["left_whole"]


def left_whole(graph: NamedGraph, layout: Layout, axes: SubMesh, owner: str = "the layout") -> Iterator[str]:
    """Yield a sentence for each dim of the model that no split of its rule divides, with the fix."""
    strategy = layout.strategy
    owner = owner if strategy is None else f"strategy {strategy.name}"
    seen: set[str] = set()
    for rule in (one for one in layout.statements if isinstance(one, DimRule)):
        found = [name for pattern in rule.dims for name in graph.dims if matches(pattern, name) and name not in seen]
        # An earlier rule for a dim holds, also one for its name beside one for a pattern.
        seen |= {name for name in found if not any("*" in pattern for pattern in rule.dims)}
        splits = [term for term in rule.place.terms if isinstance(term, SplitTerm)]
        if not any(isinstance(term, NotSplit) for term in rule.place.terms):
            continue
        if any(term.pad or term.by or term.extends for term in splits):
            continue
        counts = [(term.axes, prod(axes[axis] for axis in term.axes)) for term in splits]
        for name in found:
            if not all(counts) or any(count == 1 or _divides(graph, name, count) for _, count in counts):
                continue
            yield from (_sentence(owner, name, max(graph.dims[name].sizes), over, count) for over, count in counts[:1])


def _divides(graph: NamedGraph, name: str, count: int) -> bool:
    """Return whether equal parts of a dim of this name exist in any tensor, with whole inner parts."""
    dim = graph.dims[name]
    outer = [graph.dims[part] for part in dim.parts[:1] if part in graph.dims]
    # A compound dim is split by its outermost part.
    return any(size % count == 0 for one in outer or [dim] for size in one.sizes)


def _sentence(owner: str, name: str, size: int, over: tuple[str, ...], count: int) -> str:
    axis = "*".join(over)
    fits = gcd(size, count)
    other = f"{axis} = {fits}" if fits > 1 else f"another size of {axis}"
    why = f"{axis} = {count} does not divide it"
    return f"{owner} leaves {name} ({size}) whole, so each rank of {axis} computes all of it: {why}; fix: {other}"
