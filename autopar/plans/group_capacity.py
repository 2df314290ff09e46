"""The capacity of experts that a layout states. It changes results, so no search chooses it."""

from __future__ import annotations

from autopar.ir.graph import NamedGraph
from autopar.sharding.layout.capacity_statement import CapacityStatement
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.source import layout_error
from autopar.tracing.group_capacity import NoCapacity, with_capacity

__all__ = ["capacity_statement", "in_slots"]


def in_slots(graph: NamedGraph, layout: Layout) -> NamedGraph:
    """Return the graph with the capacity that a layout states."""
    said = layout.capacity
    if said is None or said.factor is None:
        return graph
    try:
        return with_capacity(graph, said.factor)
    except NoCapacity as error:
        raise layout_error("E4", error.what, error.fix, said.span) from None


def capacity_statement(graph: NamedGraph) -> tuple[CapacityStatement, ...]:
    """Return the statement of the capacity of a graph; none for routed rows."""
    return () if graph.capacity is None else (CapacityStatement(graph.capacity),)
