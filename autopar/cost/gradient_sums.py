"""Sums of the gradients that several ops have for one tensor, in the shardings in which autograd adds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode
from autopar.sharding.assignment import Assignment
from autopar.sharding.sharding import Sharding

__all__ = ["gradient_sums"]


def gradient_sums(
    graph: NamedGraph, assignment: Assignment, stages: Mapping[str, frozenset[int]]
) -> dict[str, list[tuple[str, Sharding]]]:
    """Return for each op the tensors whose gradients it adds to those of later ops, each with its sharding.

    The gradients of a value that was resharded once for several ops are added before the reshard back. Each stage of
    a pipeline, named for each op by `stages`, adds up gradients of its own.
    """
    found: dict[str, list[tuple[str, Sharding]]] = {node.name: [] for node in graph.nodes}
    firsts: dict[tuple[str, frozenset[int], Sharding], str] = {}
    for node in graph.nodes:
        for name, taken in _taken(graph, assignment, node):
            firsts.setdefault((name, stages[node.name], taken), node.name)
    begun: set[tuple[str, frozenset[int], Sharding]] = set()
    # The backward runs in reverse: the last use has the first gradient, all others add to it.
    for node in reversed(graph.nodes):
        for name, taken in _taken(graph, assignment, node):
            kept = assignment.values[name]
            own = name, stages[node.name], taken
            if taken != kept:
                if own in begun:
                    found[node.name].append((name, taken))
                begun.add(own)
                if firsts[own] != node.name:
                    continue
                own = name, stages[node.name], kept
            if own in begun:
                found[node.name].append((name, kept))
            begun.add(own)
    return found


def _taken(graph: NamedGraph, assignment: Assignment, node: NamedNode) -> Iterator[tuple[str, Sharding]]:
    """Yield the tensors with a gradient that an op takes, in each sharding; a parameter as most ops take it."""
    wants: dict[tuple[str, Sharding], None] = {}
    for name, wanted in zip(node.operands, assignment.ops[node.name].operands, strict=True):
        if name is not None and graph.tensors[name].requires_grad:
            kept = assignment.values[name]
            wants[name, kept if wanted is None or graph.tensors[name].kind == "param" else wanted] = None
    yield from wants
