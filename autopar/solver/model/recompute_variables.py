"""Recomputation of layers: the ops to recompute, by the decision on their layer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from types import MappingProxyType

from autopar.ir.graph import NamedGraph
from autopar.sharding.layout.syntax import Recompute
from autopar.sharding.offload import offloaded
from autopar.sharding.options import TrainingOptions
from autopar.sharding.recompute import (
    RecomputeRegion,
    RerunEnds,
    layered,
    reading,
    recompute_regions,
    recomputed_ops,
    rerun_ends,
)

__all__ = ["MODES", "STATES", "RecomputeModes", "last_of", "mode_counts"]

MODES: tuple[Recompute, ...] = ("selective", "full", "offload")
STATES: tuple[Recompute, ...] = ("none", *MODES)


def last_of(graph: NamedGraph, layers: Iterable[str]) -> tuple[str | None, frozenset[str]]:
    """Return the layer that ends last, None if there is none, and the ops behind it."""
    place = {node.name: i for i, node in enumerate(graph.nodes)}
    ends = {path: max(place[op] for op in graph.ops_of_layers[path]) for path in layers}
    last = max(ends, key=ends.__getitem__, default=None)
    return last, frozenset() if last is None else frozenset(node.name for node in graph.nodes[ends[last] + 1 :])


@cache
def mode_counts(layers: int, modes: int) -> list[tuple[int, ...]]:
    """Return numbers of layers in each mode: all with the first three, and each of these with the fourth."""
    if modes == 1:
        return [(layers,)]
    pairs = [(some, full) for some, full in product(range(layers + 1), repeat=2) if some + full <= layers]
    found: list[tuple[int, ...]] = [(layers - some - full, some, full) for some, full in pairs]
    if modes == len(STATES):
        found = [(*counts, 0) for counts in found]
        for other, moved in product(range(modes - 1), range(1, layers + 1)):
            counts = [0] * modes
            counts[other], counts[-1] = layers - moved, moved
            found.append(tuple(counts))
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class RecomputeModes:
    """Recomputation of the ops of a graph: fixed, or by the mode of a layer."""

    # Paths of the layers with an open mode.
    open: tuple[str, ...]
    # Path of the layer of each op with an open mode.
    layers: Mapping[str, str]
    # Region in which an op is recomputed, if any.
    regions: Mapping[str, str]
    # For each op that may be recomputed: if it is, for each mode of its layer; one entry if fixed.
    flagged: Mapping[str, tuple[bool, ...]]
    # For each mode: values that recomputed ops read and that nothing else saves; of layers, within
    # one.
    entering: tuple[frozenset[str], ...] = (frozenset(),)
    # For each value of other ops that a recompute of one layer reads: this layer, and if it reads it in each mode.
    crossing: Mapping[str, tuple[str, tuple[bool, ...]]] = field(default_factory=lambda: MappingProxyType({}))
    # For each op whose saved tensors may go to the host: if they do, for each mode of its layer; one entry if fixed.
    moved: Mapping[str, tuple[bool, ...]] = field(default_factory=lambda: MappingProxyType({}))
    # Modes of open layers.
    modes: tuple[Recompute, ...] = STATES[:1]
    # For each mode: ops that the recompute of their layer does not reach.
    ends: tuple[RerunEnds, ...] = (RerunEnds(frozenset(), frozenset()),)

    @staticmethod
    def of(
        graph: NamedGraph,
        options: TrainingOptions,
        settled: Mapping[str, Recompute],
        layers: Sequence[str],
        trains: bool,
        choices: Sequence[Recompute],
    ) -> RecomputeModes:
        if not trains:
            return RecomputeModes((), {}, {}, {})
        ops = graph.ops_of_layers
        whole = recompute_regions(graph, {**settled, **dict.fromkeys(layers, "full")})
        region_of = {op: region for region in whole for op in region.ops}
        found = tuple(path for path in layers if _stands_alone(ops[path], region_of))
        modes = tuple(choices) if found else STATES[:1]
        every = [recompute_regions(graph, {**settled, **dict.fromkeys(found, mode)}) for mode in modes]
        of_layer = {op: path for path in found for op in ops[path]}
        again = [recomputed_ops(graph, regions) for regions in every]
        readers = [reading(graph, layered(regions), own) for regions, own in zip(every, again, strict=True)]
        flagged: dict[str, tuple[bool, ...]] = dict.fromkeys(again[0], (True,))
        flagged |= {op: tuple(op in ops for ops in again) for op in of_layer}
        return RecomputeModes(
            found,
            of_layer,
            {op: region.name for region in every[-1] for op in region.ops},
            flagged,
            tuple(_entering(graph, read, own, of_layer) for read, own in zip(readers, again, strict=True)),
            _crossing(graph, readers, of_layer),
            dict.fromkeys(offloaded(every[0]), (True,))
            | {op: tuple(mode == "offload" for mode in modes) for op in of_layer},
            modes,
            tuple(rerun_ends(graph, regions, options) for regions in every),
        )

    def flags(self, op: str) -> tuple[bool, ...]:
        """Return whether an op is recomputed, for each mode of its layer; one entry if nothing is open."""
        return self.flagged.get(op, _NOT)

    def runs(self, op: str) -> tuple[bool, ...]:
        """Return whether a recompute runs an op, for each mode of its layer."""
        return self._flags_without(op, [one.idle for one in self.ends])

    def takes(self, op: str) -> tuple[bool, ...]:
        """Return whether a recompute brings an op its operands, for each mode of its layer."""
        return self._flags_without(op, [one.beyond for one in self.ends])

    def _flags_without(self, op: str, left: Sequence[frozenset[str]]) -> tuple[bool, ...]:
        return tuple(flag and op not in ops for flag, ops in zip(self.flags(op), left, strict=False))

    def moves(self, op: str, mode: int) -> bool:
        """Return whether saved tensors of an op go to the host in a mode of its layer."""
        return self.moved.get(op, (False,) * (mode + 1))[mode]

    def shares_region(self, op: str, other: str) -> bool:
        """Return whether two ops are in one layer whose mode is open or not `none`."""
        own = self.regions.get(op)
        return own is not None and own == self.regions.get(other)

    def is_kept_outside(self, maker: str, keepers: Iterable[str]) -> bool:
        """Return whether ops of other regions save a result: it lives then, although its op is recomputed."""
        own = self.regions.get(maker)
        return any(self.regions.get(keeper) != own for keeper in keepers)


_NOT = (False,)


def _entering(
    graph: NamedGraph, readers: frozenset[str], again: frozenset[str], of_layer: Mapping[str, str]
) -> frozenset[str]:
    """Return the values that recomputed ops read from ops that are not: of the same layer, or of fixed regions."""
    makers = {name: node.name for node in graph.nodes for name in node.outputs if name is not None}
    return frozenset(
        name
        for node in graph.nodes
        if node.name in readers
        for name in node.operands
        if name is not None and (maker := makers.get(name)) is not None and maker not in again
        if node.name not in of_layer or of_layer.get(maker) == of_layer[node.name]
    )


def _crossing(
    graph: NamedGraph, readers: Sequence[frozenset[str]], of_layer: Mapping[str, str]
) -> dict[str, tuple[str, tuple[bool, ...]]]:
    """Return the values of other ops that the recompute of a layer reads, by mode; of several layers, of the first."""
    makers = {name: node.name for node in graph.nodes for name in node.outputs if name is not None}
    found: dict[str, tuple[str, tuple[bool, ...]]] = {}
    for mode, reads in enumerate(readers):
        for node in graph.nodes:
            layer = of_layer.get(node.name) if node.name in reads else None
            for name in node.operands if layer is not None else ():
                if name in makers and of_layer.get(makers[name]) != layer:
                    assert layer is not None, "ops outside of layers read nothing here"
                    first, flags = found.get(name, (layer, (False,) * len(readers)))
                    if first == layer:
                        found[name] = layer, (*flags[:mode], True, *flags[mode + 1 :])
    return found


def _stands_alone(ops: Collection[str], region_of: Mapping[str, RecomputeRegion]) -> bool:
    """Return whether no checkpoint of the model joins a layer with other ops."""
    touched = {id(region): region for op in ops if (region := region_of.get(op)) is not None}
    return all(set(ops) >= set(region.ops) for region in touched.values())
