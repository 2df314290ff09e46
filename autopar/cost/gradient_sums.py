"""Sums of the gradients that several ops have for one tensor, in the shardings in which autograd adds them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode
from autopar.sharding.assignment import Assignment
from autopar.sharding.sharding import Sharding

__all__ = ["gradient_sums"]


def gradient_sums(
    graph: NamedGraph, assignment: Assignment, stages: Mapping[str, frozenset[int]]
) -> Mapping[tuple[str, str], Sequence[Sharding]]:
    """Return by op and tensor the shardings in which the op adds its gradients to those of later ops.

    The gradients of a value that was resharded once for several ops are added before the reshard back. Each stage of
    a pipeline, named for each op by `stages`, adds up gradients of its own.
    """
    uses = [
        (node.name, (name, stages[node.name], taken))
        for node in graph.nodes
        for name, taken in _taken(graph, assignment, node)
    ]
    firsts = {use: op for op, use in reversed(uses)}
    found = defaultdict[tuple[str, str], list[Sharding]](list)
    begun: set[tuple[str, frozenset[int], Sharding]] = set()

    def add(op: str, use: tuple[str, frozenset[int], Sharding]) -> None:
        name, _, sharding = use
        if use in begun:
            found[op, name].append(sharding)
        begun.add(use)

    # The backward runs in reverse: the last use has the first gradient, all others add to it.
    for op, use in reversed(uses):
        add(op, use)
        name, own_stages, taken = use
        kept = assignment.values[name]
        if taken != kept and firsts[use] == op:  # the reshard back
            add(op, (name, own_stages, kept))
    return found


def _taken(graph: NamedGraph, assignment: Assignment, node: NamedNode) -> Iterator[tuple[str, Sharding]]:
    """Yield the tensors with a gradient that an op takes, in each sharding; a parameter as most ops take it."""
    wants: dict[tuple[str, Sharding], None] = {}
    for name, wanted in zip(node.operands, assignment.ops[node.name].operands, strict=True):
        if name is not None and graph.tensors[name].requires_grad:
            kept = assignment.values[name]
            wants[name, kept if wanted is None or graph.tensors[name].kind == "param" else wanted] = None
    yield from wants
