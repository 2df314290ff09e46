"""Ops to recompute in the backward: layers that a plan names, and checkpoint regions of the model.

`full`: all ops of a layer. `selective`: those that are cheap beside the memory of their results. Expensive are products
with a parameter, fused attention, recurrences, and ops from other libraries, whose cost is unknown: their results are
saved. A product of two values is attention that is written out. Its scores take more memory than all else and little
time (Korthikanti et al., 2022), so it is recomputed, like all ops bound by memory traffic. `offload`: no op, as saved
tensors go to the host (`autopar/sharding/offload.py`). A list names the ops to keep, or those to recompute: by a word
of the op, `linear`, by one of the kinds `product` (with a parameter) and `attention` (fused), or by a name pattern.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.ir.analysis.contractions import ATTENTIONS, RECURRENT, multiplied
from autopar.ir.analysis.float8_products import in_float8
from autopar.ir.graph import NamedGraph
from autopar.ir.precision import Precision
from autopar.ir.values import NamedNode
from autopar.sharding.layout.matching import glob_matches
from autopar.sharding.layout.recompute_ops import OpItem, RecomputeList
from autopar.sharding.layout.syntax import Recompute
from autopar.sharding.options import TrainingOptions


@dataclass(frozen=True)
class RecomputeRegion:
    """Ops whose results, all or some, are freed after the forward and recomputed together."""

    name: str
    mode: Recompute
    ops: tuple[str, ...]


def recompute_regions(graph: NamedGraph, recompute: Mapping[str, Recompute]) -> tuple[RecomputeRegion, ...]:
    """Return the regions of a graph; `recompute` is by the module path of a layer.

    A checkpoint region of the model that shares ops with such a layer is joined with it.
    """
    found = [
        RecomputeRegion(layer.path, recompute[layer.path], layer.ops)
        for layer in graph.layers
        if recompute.get(layer.path, "none") != "none"
    ]
    own: dict[int, list[str]] = {}
    for node in graph.nodes:
        if node.origin.checkpoint is not None:
            own.setdefault(node.origin.checkpoint, []).append(node.name)
    for number, ops in own.items():
        found = _joined(found, RecomputeRegion(f"checkpoint {number}", "full", tuple(ops)))
    order = {node.name: place for place, node in enumerate(graph.nodes)}
    return tuple(sorted(found, key=lambda region: min(order[op] for op in region.ops)))


def _joined(regions: Iterable[RecomputeRegion], own: RecomputeRegion) -> list[RecomputeRegion]:
    """Return the regions with a checkpoint region added, or joined where ops overlap."""
    apart: list[RecomputeRegion] = []
    touched: list[RecomputeRegion] = []
    for region in regions:
        (apart if set(region.ops).isdisjoint(own.ops) else touched).append(region)
    if not touched:
        return [*apart, own]
    # The model asks for a full checkpoint, but the plan's mode for a layer that it covers is more specific.
    modes = {region.mode for region in touched}
    ops = dict.fromkeys(op for region in (*touched, own) for op in region.ops)
    return [*apart, RecomputeRegion(touched[0].name, modes.pop() if len(modes) == 1 else "full", tuple(ops))]


def recomputed_ops(graph: NamedGraph, regions: Iterable[RecomputeRegion]) -> frozenset[str]:
    """Return the ops of regions that are recomputed: all, those that are cheap, or those of a list."""
    regions = tuple(region for region in regions if region.mode != "offload")
    if all(region.mode == "full" for region in regions):
        return frozenset(op for region in regions for op in region.ops)
    weights, nodes = _weights(graph), {node.name: node for node in graph.nodes}
    return frozenset(op for region in regions for op in _recomputed(region, nodes, weights))


def _recomputed(region: RecomputeRegion, nodes: Mapping[str, NamedNode], weights: Collection[str]) -> Collection[str]:
    if isinstance(region.mode, RecomputeList):
        named = {op for item in region.mode.items for op in _ops_of(item, region.ops, nodes, weights)}
        return named if region.mode.action == "only" else [op for op in region.ops if op not in named]
    return [op for op in region.ops if region.mode == "full" or not _is_expensive(nodes[op], weights)]


def _ops_of(
    item: OpItem, ops: Sequence[str], nodes: Mapping[str, NamedNode], weights: Collection[str]
) -> Sequence[str]:
    if item.is_glob:
        found = [op for op in ops if glob_matches(item.pattern, op)]
    else:
        found = [op for op in ops if item.pattern in _words(nodes[op], weights)]
    return found[:: item.every]


def words_of_layers(graph: NamedGraph) -> frozenset[str]:
    """Return the words for ops of layers in lists of what to recompute."""
    weights, nodes = _weights(graph), {node.name: node for node in graph.nodes}
    return frozenset(word for ops in graph.ops_of_layers.values() for op in ops for word in _words(nodes[op], weights))


def _words(node: NamedNode, weights: Collection[str]) -> tuple[str, ...]:
    kinds = {"attention": node.op in ATTENTIONS, "product": _is_product(node, weights)}
    return (node.op.split(".")[1], *(kind for kind, has in kinds.items() if has))


def _weights(graph: NamedGraph) -> set[str]:
    """Return the parameters, and the tensors made of nothing else: a product with a cast one is as expensive."""
    weights = {tensor.name for tensor in graph.tensors.values() if tensor.kind == "param"}
    for node in graph.nodes:
        operands = [name for name in node.operands if name is not None]
        if operands and weights.issuperset(operands):
            weights.update(name for name in node.outputs if name is not None)
    return weights


def _is_expensive(node: NamedNode, weights: Collection[str]) -> bool:
    # Ops of other libraries have a cost that only their authors know.
    if not node.op.startswith(("aten.", "prims.")) or node.op in (*ATTENTIONS, *RECURRENT):
        return True
    return _is_product(node, weights)


def _is_product(node: NamedNode, weights: Collection[str]) -> bool:
    pair = multiplied(node)
    return pair is not None and any(node.operands[i] in weights for i in pair)


class RerunEnds(NamedTuple):
    """Last ops of fully recomputed regions: torch stops a recompute as soon as all saved tensors are back."""

    # Ops that are not executed again.
    idle: frozenset[str]
    # Of these, ops whose operands are not resharded again either: they come after the last saved tensor.
    beyond: frozenset[str]


def rerun_ends(graph: NamedGraph, regions: Iterable[RecomputeRegion], options: TrainingOptions) -> RerunEnds:
    """Return the ops at the ends of fully recomputed regions that their recompute does not reach."""
    nodes = {node.name: node for node in graph.nodes}
    beyond: list[str] = []
    last: list[str] = []
    for region in () if options.recompute_to_end else regions:
        for op in reversed(region.ops if region.mode == "full" else ()):
            footprint = graph.footprints[nodes[op].node]
            if graph.trains(nodes[op]) and (footprint.keeps or footprint.keeps_outputs or footprint.internal_bytes):
                if _saves_first(nodes[op], graph, options.precision):
                    last.append(op)
                break
            beyond.append(op)
    return RerunEnds(frozenset((*beyond, *last)), frozenset(beyond))


def _saves_first(node: NamedNode, graph: NamedGraph, precision: Precision) -> bool:
    """Return whether an op saves its operands before it runs, and nothing else: torch's products do."""
    return node.op in _PRODUCTS and not in_float8(node, graph.tensors, precision)


_PRODUCTS = frozenset(f"aten.{name}.default" for name in ("linear", "mm", "addmm", "bmm", "matmul"))


def layered(regions: Iterable[RecomputeRegion]) -> dict[str, tuple[int, Recompute]]:
    """Return, by op, the number of its region, from 1, and its mode."""
    return {op: (number, region.mode) for number, region in enumerate(regions, start=1) for op in region.ops}


def reading(graph: NamedGraph, layers: Mapping[str, tuple[int, Recompute]], again: frozenset[str]) -> frozenset[str]:
    """Return the recomputed ops whose operands are read for it.

    All ops of a fully recomputed layer; of others, those on the way to a tensor that autograd saves.
    """
    # With the layer: a value that leaves a layer is not recomputed for the saved tensors of other layers.
    needed: set[tuple[int, str | None]] = set()
    found: set[str] = set()
    for node in reversed(graph.nodes if again else ()):
        footprint = graph.footprints[node.node]
        layer, mode = layers.get(node.name, (0, "none"))
        kept = {(layer, node.operands[i]) for i in footprint.keeps} if graph.trains(node) else set()
        if node.name not in again:
            needed |= kept
        elif (
            mode == "full"
            or kept
            or footprint.keeps_outputs
            or not needed.isdisjoint((layer, name) for name in node.outputs)
        ):
            found.add(node.name)
            needed |= {(layer, name) for name in node.operands if name is not None}
    return frozenset(found)
