"""Recomputation of repeated layers, where memory is short: as many layers as it takes, and no more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from autopar.cost.costs import Costs
from autopar.decided import Plan
from autopar.layout.holds import Recompute
from autopar.tracing.graph import NamedGraph

__all__ = ["MODES", "layers_of", "thinned"]

MODES: tuple[Recompute, ...] = ("selective", "full")


def layers_of(graph: NamedGraph) -> tuple[str, ...]:
    """The paths of all repeated layers."""
    return tuple(dict.fromkeys(path for repeat in graph.repeats for path in repeat.module_paths))


def thinned(
    graph: NamedGraph,
    plan: Plan,
    mode: Recompute,
    price: Callable[[Plan], Costs],
    limit_bytes: float,
    said: Mapping[str, Recompute],
) -> Plan | None:
    """The plan with the fewest of its layers computed again that fits, the first ones; None where all do not do.

    `said`: what is settled of some layers.
    """
    layers = [layer for layer in layers_of(graph) if layer not in said]

    def with_first(count: int) -> Plan:
        return replace(plan, recompute={**said, **dict.fromkeys(layers[:count], mode)})

    fewest, most = 0, len(layers)
    if not most or price(with_first(most)).memory.peak_bytes > limit_bytes:
        return None
    while most - fewest > 1:
        middle = (fewest + most) // 2
        if price(with_first(middle)).memory.peak_bytes > limit_bytes:
            fewest = middle
        else:
            most = middle
    return with_first(most)
