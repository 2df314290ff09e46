"""Recomputation of repeated layers: which ops are computed again, by what is decided of their layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.cost.layers import layered, reading
from autopar.layout.holds import Recompute
from autopar.recompute import Region, computed_again, regions_of
from autopar.tracing.graph import NamedGraph

__all__ = ["MODES", "STATES", "Again", "layers_of"]

MODES: tuple[Recompute, ...] = ("selective", "full")
STATES: tuple[Recompute, ...] = ("none", *MODES)


def layers_of(graph: NamedGraph) -> tuple[str, ...]:
    """The paths of all repeated layers."""
    return tuple(dict.fromkeys(path for repeat in graph.repeats for path in repeat.module_paths))


@dataclass(frozen=True)
class Again:
    """What of a graph is computed again: settled, or by the mode of a layer."""

    open: tuple[str, ...]
    """The paths of the layers of which it is decided."""
    layers: Mapping[str, str]
    """By op of such a layer: its path."""
    regions: Mapping[str, str]
    """By op: where it is computed again, if it is."""
    ops: tuple[frozenset[str], ...]
    """The ops that are computed again, if all open layers are in one mode; for each."""
    entering: tuple[frozenset[str], ...] = (frozenset(),)
    """What these ops read and what is not kept for any other reason; of layers, within one."""

    @staticmethod
    def of(graph: NamedGraph, settled: Mapping[str, Recompute], layers: Sequence[str], trains: bool) -> Again:
        if not trains:
            return Again((), {}, {}, (frozenset(),))
        ops = {path: dict.fromkeys(op for each in _layers(graph, path) for op in each) for path in layers}
        whole = regions_of(graph, {**settled, **dict.fromkeys(layers, "full")})
        found = tuple(path for path in layers if _stands_alone(ops[path], whole))
        modes = STATES if found else STATES[:1]
        every = [regions_of(graph, {**settled, **dict.fromkeys(found, mode)}) for mode in modes]
        of_layer = {op: path for path in found for op in ops[path]}
        again = tuple(computed_again(graph, regions) for regions in every)
        return Again(
            found,
            of_layer,
            {op: region.name for region in every[-1] for op in region.ops},
            again,
            tuple(_entering(graph, regions, own, of_layer) for regions, own in zip(every, again, strict=True)),
        )

    def flags(self, op: str) -> tuple[bool, ...]:
        """For each mode of the layer of an op, whether it is computed again; one where there is nothing to decide."""
        return tuple(op in ops for ops in (self.ops if op in self.layers else self.ops[:1]))

    def is_kept_outside(self, maker: str, keepers: Iterable[str]) -> bool:
        """Whether ops of other regions keep what an op makes: it is there then, though the op is computed again."""
        own = self.regions.get(maker)
        return any(self.regions.get(keeper) != own for keeper in keepers)


def _entering(
    graph: NamedGraph, regions: Sequence[Region], again: frozenset[str], of_layer: Mapping[str, str]
) -> frozenset[str]:
    """What ops that are computed again need for it, and others have made: of the same layer, or for settled regions."""
    readers = reading(graph, layered(regions), again)
    makers = {name: node.name for node in graph.nodes for name in node.outputs if name is not None}
    return frozenset(
        name
        for node in graph.nodes
        if node.name in readers
        for name in node.operands
        if name is not None and (maker := makers.get(name)) is not None and maker not in again
        if node.name not in of_layer or of_layer.get(maker) == of_layer[node.name]
    )


def _layers(graph: NamedGraph, path: str) -> list[list[str]]:
    by_node = {node.node: node.name for node in graph.nodes}
    return [
        [by_node[name] for name in layer if name in by_node]
        for repeat in graph.repeats
        for own, layer in zip(repeat.module_paths, repeat.layers, strict=True)
        if own == path
    ]


def _stands_alone(ops: Mapping[str, None], regions: Sequence[Region]) -> bool:
    """Whether no checkpoint of the model joins a layer with something else."""
    return all(ops.keys().isdisjoint(region.ops) or ops.keys() >= set(region.ops) for region in regions)
