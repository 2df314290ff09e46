"""Short graph: a graph in which each stack of equal layers has a few of its layers.

Layers of a stack run the same ops, so the plans of a few of them tell the plan of all. The first layers and the last
ones stay; the last ones read what the first ones make. What layers that go return, as keys and values, goes with them.
A stack is left whole where ops outside of it read a layer that would go, as those that stack all hidden states.

    whole    embedding, layers 0 to 125, head
    short    embedding, layers 0, 1 and 125, head; layer 1 stands for the layers 2 to 124
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from autopar.ir.analysis.repeated_layers import RepeatedLayers
from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode

__all__ = ["ShortGraph", "shorten"]

# Layers of a stack that stay: its first ones, and its last ones. The second one stands for all that go, as the first
# one may be unlike the others where it reads what stands before the stack.
FIRST, LAST = 2, 1


@dataclass(frozen=True, eq=False)
class ShortGraph:
    """Graph with fewer layers, and what each op and tensor of the whole graph has there."""

    whole: NamedGraph
    graph: NamedGraph
    # By op and by tensor of the whole graph: the one of the short graph that stands for it, itself if it stays.
    ops: Mapping[str, str]
    tensors: Mapping[str, str]
    # By op and by tensor of other layers of the short graph: that of the layer that stands for the middle of its stack.
    twins: Mapping[str, str]
    # By module path of a layer of the whole graph.
    layers: Mapping[str, str]

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """Return the number of layers that each layer of the short graph stands for, by module path."""
        found: dict[str, int] = {}
        for path in self.layers.values():
            found[path] = found.get(path, 0) + 1
        return found


def shorten(graph: NamedGraph) -> ShortGraph | None:
    """Return the short graph; None if no stack of layers can be cut."""
    cuts = [cut for repeat in graph.repeats if (cut := _StackCut(graph, repeat)).is_possible]
    if not cuts:
        return None
    removed = {name: cut for cut in cuts for name in cut.stands_in}
    by_node = {node.node: node for node in graph.nodes}
    renamed: dict[str, str] = {}
    for cut in cuts:
        renamed |= cut.handed_on(by_node)
    nodes = tuple(_reading(node, renamed) for node in graph.nodes if node.node not in removed)
    ops = {node.name: node.name for node in graph.nodes}
    tensors = {name: name for name in graph.tensors}
    for name, cut in removed.items():
        if name not in by_node:
            continue  # a step without a rule, as one result of several
        node, other = by_node[name], by_node[cut.stands_in[name]]
        ops[node.name] = other.name
        for mine, its in zip((*node.operands, *node.outputs), (*other.operands, *other.outputs), strict=True):
            if mine is not None and its is not None and _goes(graph, mine, removed):
                tensors[mine] = its
    twins = {op: its for cut in cuts for op, its in cut.twins(by_node)}
    used = {name for node in nodes for name in (*node.operands, *node.outputs) if name is not None}
    read = {name for node in graph.nodes for name in node.operands if name is not None}
    made = {name for node in graph.nodes for name in node.outputs if name is not None}
    # What no op reads stays.
    kept = {name: one for name, one in graph.tensors.items() if name in used or (name not in read and name not in made)}
    tensors |= {name: name for name in kept}
    outputs = tuple(name for name in graph.outputs if name in kept or graph.tensors[name].node not in removed)
    if any(its not in kept for its in tensors.values()) or not kept.keys() >= set(outputs):
        return None
    short = replace(graph, tensors=MappingProxyType(kept), nodes=nodes, outputs=outputs, repeats=_repeats(graph, cuts))
    # Found by running each op: those of the whole graph hold for its parts.
    short.__dict__["footprints"] = graph.footprints
    layers = {path: graph.layer_of[ops[own[0]]] for path, own in graph.ops_of_layers.items()}
    return ShortGraph(graph, short, ops, tensors, twins, layers)


class _StackCut:
    """Stack of layers whose middle goes."""

    def __init__(self, graph: NamedGraph, repeat: RepeatedLayers) -> None:
        self.graph, self.repeat = graph, repeat
        self.removed = range(FIRST, repeat.count - LAST)
        self.stands_in = {
            name: other
            for layer in self.removed
            for name, other in zip(repeat.layers[layer], repeat.layers[FIRST - 1], strict=True)
        }

    @property
    def is_possible(self) -> bool:
        """True if a layer goes and no op outside of the stack reads what it makes; the caller may be given it."""
        if not self.removed or len(set(self.repeat.module_paths)) < self.repeat.count:
            return False
        inside = {name for layer in self.repeat.layers for name in layer}
        going = {
            name
            for node in self.graph.nodes
            if node.node in self.stands_in
            for name in node.outputs
            if name is not None
        }
        outside = (node for node in self.graph.nodes if node.node not in inside)
        read = {name for node in outside for name in node.operands if name is not None}
        return going.isdisjoint(read)

    def twins(self, by_node: Mapping[str, NamedNode]) -> Iterator[tuple[str, str]]:
        """Yield ops, results and stored tensors of the layers that stay, each with that of the one for the middle."""
        middle = self.repeat.layers[FIRST - 1]
        for layer in (*range(FIRST - 1), *range(self.repeat.count - LAST, self.repeat.count)):
            for name, other in zip(self.repeat.layers[layer], middle, strict=True):
                if name not in by_node or other not in by_node:
                    continue
                node, its = by_node[name], by_node[other]
                yield node.name, its.name
                yield from zip(filter(None, node.outputs), filter(None, its.outputs), strict=True)
                for one, same in zip(node.operands, its.operands, strict=True):
                    if one is not None and same is not None and self.graph.tensors[one].kind != "activation":
                        yield one, same

    def handed_on(self, by_node: Mapping[str, NamedNode]) -> dict[str, str]:
        """Return, for each value that a layer makes, that of the layer as far back as there are removed ones."""
        count = len(self.removed)
        found: dict[str, str] = {}
        for layer in self.removed:
            for name, other in zip(self.repeat.layers[layer], self.repeat.layers[max(0, layer - count)], strict=True):
                if name in by_node and other in by_node:
                    pairs = zip(by_node[name].outputs, by_node[other].outputs, strict=True)
                    found.update((mine, its) for mine, its in pairs if mine is not None and its is not None)
        return found


def _reading(node: NamedNode, renamed: Mapping[str, str]) -> NamedNode:
    if not any(name in renamed for name in node.operands):
        return node
    return replace(node, operands=tuple(None if name is None else renamed.get(name, name) for name in node.operands))


def _goes(graph: NamedGraph, name: str, removed: Mapping[str, _StackCut]) -> bool:
    """Return whether a tensor is a value that goes, or may be stored for layers that go."""
    tensor = graph.tensors[name]
    return tensor.kind != "activation" or tensor.node in removed


def _repeats(graph: NamedGraph, cuts: list[_StackCut]) -> tuple[RepeatedLayers, ...]:
    by_repeat = {id(cut.repeat): cut for cut in cuts}
    found = []
    for repeat in graph.repeats:
        cut = by_repeat.get(id(repeat))
        places = [place for place in range(repeat.count) if cut is None or place not in cut.removed]
        layers = tuple(repeat.layers[place] for place in places)
        found.append(replace(repeat, layers=layers, module_paths=tuple(repeat.module_paths[place] for place in places)))
    return tuple(found)
