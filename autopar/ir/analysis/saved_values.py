"""Values of a graph that ops save for the backward, by the storage that they share."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import prod

from autopar.ir.graph import NamedGraph


@dataclass(frozen=True)
class SavedValues:
    """Saved values, as far as no decision changes them: the ops that save each value. A view saves its root.

    Each value counts where it is produced, or where it is resharded for an op that saves it. The simulation of memory
    follows every storage; the search corrects the difference by its peak.
    """

    # Root of each value: the value whose storage it shares.
    roots: dict[str, str]
    # Ops that save each root, itself or as a view.
    keepers: dict[str, tuple[str, ...]]
    # Op and operand: the resharded operand is saved.
    operands: frozenset[tuple[str, str]]
    # Values that their producers save.
    own: frozenset[str]

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
            if not graph.trains(node):
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
        """Return whether the storage of a result is saved."""
        return self.roots[name] == name and name in self.keepers

    def least_bytes(self, graph: NamedGraph, again: Collection[str]) -> float:
        """Return the bytes alive where the backward begins whatever is split: trained state and saved values.

        `again` are the recomputed ops.
        """
        made = [name for node in graph.nodes if node.name not in again for name in node.outputs if name is not None]
        held = [name for name in made if self.is_kept(name)] + [tensor.name for tensor in graph.parameters]
        return float(sum(prod(graph.tensors[name].shape) * graph.tensors[name].element_bytes for name in held))

    def only_for(self, op: str, name: str) -> bool:
        """Return whether a value is saved for this op alone."""
        return (op, name) in self.operands and len(self.keepers.get(self.roots[name], ())) == 1
