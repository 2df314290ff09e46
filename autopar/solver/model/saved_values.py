"""What lives until the backward, as far as it does not depend on what is decided: which ops keep which of their values.

A view keeps what some op keeps of it. `memory` follows every storage; here each value is counted where it is made, or
where it is converted for an op that keeps it. The search corrects what that misses by what `memory` says.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import prod

from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode

__all__ = ["SavedValues"]


@dataclass(frozen=True)
class SavedValues:
    roots: dict[str, str]
    """By value: the one whose memory it shares."""
    keepers: dict[str, tuple[str, ...]]
    """By root: the ops that keep it, itself or as a view."""
    operands: frozenset[tuple[str, str]]
    """Ops and operands: what is kept of it if it is converted for the op."""
    own: frozenset[str]
    """Values that their producers keep."""

    @staticmethod
    def of(graph: NamedGraph) -> SavedValues:
        roots = {name: name for name in graph.tensors}
        for node in graph.nodes:
            footprint = graph.footprints[node.node]
            for name, alias in zip(node.outputs, footprint.aliases, strict=False):
                source = None if alias is None else node.operands[alias]
                if name is not None and source is not None:
                    roots[name] = roots[source]
        keepers: dict[str, tuple[str, ...]] = {}
        kept: set[str] = set()
        operands: set[tuple[str, str]] = set()
        own: set[str] = set()
        for node in reversed(graph.nodes if graph.exported.grad_enabled else ()):
            footprint = graph.footprints[node.node]
            for name, alias in zip(node.outputs, footprint.aliases, strict=False):
                source = None if alias is None else node.operands[alias]
                if name in kept and source is not None:
                    kept.add(source)
                    operands.add((node.name, source))
            if not _trains(graph, node):
                continue
            for i in footprint.keeps:
                name = node.operands[i]
                if name is not None:
                    kept.add(name)
                    operands.add((node.name, name))
            for name in dict.fromkeys(node.operands[i] for i in footprint.keeps):
                if name is not None:
                    keepers[roots[name]] = (*keepers.get(roots[name], ()), node.name)
            for i in footprint.keeps_outputs:
                name = node.outputs[i]
                if name is not None:
                    own.add(name)
                    keepers[roots[name]] = (*keepers.get(roots[name], ()), node.name)
        return SavedValues(roots, keepers, frozenset(operands), frozenset(own))

    def is_kept(self, name: str) -> bool:
        """Whether the memory of a value that an op makes lives on."""
        return self.roots[name] == name and name in self.keepers

    def least_bytes(self, graph: NamedGraph, again: Collection[str]) -> float:
        """What lives where the backward begins, of what is trained and what is kept, whatever is split; `again` are the
        ops that are computed again."""
        made = [name for node in graph.nodes if node.name not in again for name in node.outputs if name is not None]
        held = [name for name in made if self.is_kept(name)] + [tensor.name for tensor in graph.parameters]
        return float(sum(prod(graph.tensors[name].shape) * graph.tensors[name].dtype.itemsize for name in held))

    def only_for(self, op: str, name: str) -> bool:
        """Whether a value lives on for this op alone."""
        return (op, name) in self.operands and len(self.keepers.get(self.roots[name], ())) == 1


def _trains(graph: NamedGraph, node: NamedNode) -> bool:
    return any(name is not None and graph.tensors[name].requires_grad for name in node.outputs)
