"""Wrap recomputed layers and the model's checkpoints into regions that the backward runs again.

Collectives inside a region run again too. Parameters are resharded outside: a bucket that starts or ends inside moves
before the region. A regathered bucket moves into the region if nothing else reads it; then the region gathers it once
more, and nothing holds it in between. If others read it too, its memory is filled again before the region runs.

Input::

    a = linear(x, w1)    # region 0
    b = gelu(a)          # region 0
    c = linear(b, w2)
Output::

    b = checkpoint(region_0, x, w1)
    c = linear(b, w2)
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from autopar.ir.analysis.saved_values import SavedValues
from autopar.ir.fx_graphs import body_of, boundary, call_checkpoint, put_call
from autopar.ir.graph import NamedGraph
from autopar.lowering.modules.bucket import BucketState, Regathered
from autopar.lowering.modules.bucket_ends import BucketEnd, BucketStart, RegatherRelease, RegatherWatch
from autopar.lowering.modules.host_copies import HostCopies, OffloadedOps
from autopar.lowering.modules.micro_loop import MicroBatchLoop
from autopar.lowering.modules.pipeline_loop import PipelineLoop
from autopar.lowering.modules.selective_recompute import SelectiveRecompute
from autopar.sharding.layout.recompute_ops import RecomputeList
from autopar.sharding.layout.syntax import Recompute
from autopar.sharding.offload import moved_inputs
from autopar.sharding.recompute import RecomputeRegion
from autopar.sharding.sharding import Sharding

__all__ = ["KEPT", "MOVABLE", "REGION", "mark_movable", "with_regions"]

# Metadata of a node: the number of its region, and whether its result is saved there.
REGION, KEPT = "region", "kept"
# The regions that may move the storage of a node to the host.
MOVABLE = "movable"


class RegatherBeforeRecompute(nn.Module):
    """Gather parameters again before a recomputed region reads their freed memory."""

    def __init__(self, running: BucketState) -> None:
        super().__init__()
        self.running = running
        self.known: weakref.WeakValueDictionary[int, Regathered] = weakref.WeakValueDictionary()
        """Keyed by their memory, which identifies the forward that gathered them."""

    def forward(self, *values: Tensor) -> None:
        if torch.compiler.is_compiling():
            return
        memory = values[0].untyped_storage()._cdata
        again = self.known.get(memory)
        if again is not None and any(one.untyped_storage()._cdata == memory for one in again.whole):
            again.fill()
        elif self.running.again is not None:
            self.known[memory] = self.running.again


def mark_movable(
    graph: NamedGraph, regions: Sequence[RecomputeRegion], held: Mapping[tuple[str, Sharding], Node]
) -> None:
    """Record which nodes offloaded regions may move that read them; `held` has the node of each value."""
    if any(region.mode == "offload" for region in regions):
        saved = SavedValues.of(graph)
        moved = moved_inputs(graph, regions, saved)
        for (name, _), node in held.items():
            root = saved.roots[name]
            node.meta[MOVABLE] = frozenset(number for number, names in moved.items() if root in names)


def with_regions(graph: Graph, modules: dict[str, nn.Module], regions: Sequence[RecomputeRegion]) -> GraphModule:
    """Return the module of a graph with all its buckets and regions; the graph is changed."""
    modes: dict[int, Recompute] = {number: region.mode for number, region in enumerate(regions)}
    for node in graph.nodes:
        if isinstance(_module(node, modules), RegatherWatch):  # stands with the op that it watches
            reader = node.all_input_nodes[0]  # the others are its operands
            node.meta.update({key: reader.meta[key] for key in (REGION, KEPT) if key in reader.meta})
        elif node.target is operator.getitem and isinstance(_module(node.args[0], modules), BucketEnd):
            for key in (REGION, KEPT):  # of the first op that reads it
                node.meta.pop(key, None)
    _drop_around_loops(graph, modules)
    offloaded = [number for number, mode in modes.items() if mode == "offload"]
    modes = {number: mode for number, mode in modes.items() if mode != "offload"}
    for number in modes:
        if _members(graph, number):
            _bring_parameters(graph, modules, number)
            _close(graph, modules, number, modes)
    _wrap_offloaded(graph, modules, offloaded)
    numbers = [number for number in modes if _members(graph, number)]
    for place, number in enumerate(numbers):
        nodes, name = _members(graph, number), f"computed_again_{place}"
        inputs, results = boundary(nodes)
        body = body_of(nodes, inputs, results, modules)
        with graph.inserting_before(nodes[-1].next):
            if modes[number] == "full":
                modules[name] = body
                call = call_checkpoint(graph, name, inputs)
            else:
                kept = frozenset(node.name for node in nodes if node.meta.get(KEPT))
                modules[name] = SelectiveRecompute(body, kept, isinstance(modes[number], RecomputeList))
                call = graph.call_module(name, tuple(inputs))
        put_call(graph, nodes, results, call)
    return GraphModule(modules, graph)


def _members(graph: Graph, number: int) -> list[Node]:
    return [node for node in graph.nodes if node.meta.get(REGION) == number]


def _module(node: Any, modules: Mapping[str, nn.Module]) -> nn.Module | None:
    return modules.get(str(node.target)) if isinstance(node, Node) and node.op == "call_module" else None


def _drop_around_loops(graph: Graph, modules: Mapping[str, nn.Module]) -> None:
    """Recompute no ops of a layer that stand before and behind a loop over micro-batches.

    As one region they would enclose the loop, which computes its gradients in the forward and must not run again.
    """
    for loop in [node for node in graph.nodes if isinstance(_module(node, modules), MicroBatchLoop | PipelineLoop)]:
        before, behind = {loop}, {loop}
        for node in graph.nodes:
            if not behind.isdisjoint(node.all_input_nodes):
                behind.add(node)
        for node in reversed(graph.nodes):
            if not before.isdisjoint(node.users):
                before.add(node)
        around = {node.meta.get(REGION) for node in before} & {node.meta.get(REGION) for node in behind} - {None}
        for node in before | behind:
            if node.meta.get(REGION) in around:
                for key in (REGION, KEPT):
                    node.meta.pop(key, None)


# -- offloaded layers -------------------------------------------------------------------------------------------------


def _wrap_offloaded(graph: Graph, modules: dict[str, nn.Module], numbers: Iterable[int]) -> None:
    """Wrap the ops of offloaded regions, stretch by stretch: all nodes stay at their place."""
    copies = HostCopies()
    for number in numbers:
        stretches = _stretches(graph, number)
        inside = {node for nodes in stretches for node in nodes}
        for place, nodes in enumerate(stretches):
            inputs, results = boundary(nodes)
            stays = [node not in inside and number not in node.meta.get(MOVABLE, ()) for node in inputs]
            name, ends = f"offloaded_{number}_{place}", (place == 0, place == len(stretches) - 1)
            modules[name] = OffloadedOps(body_of(nodes, inputs, results, modules), stays, copies, *ends)
            with graph.inserting_before(nodes[-1].next):
                call = graph.call_module(name, tuple(inputs))
            put_call(graph, nodes, results, call)
            items = [node for node in call.users if node.target is operator.getitem]
            inside.update(items)
            for result, item in zip(results, items, strict=True):
                item.meta[MOVABLE] = result.meta.get(MOVABLE, frozenset())


def _stretches(graph: Graph, number: int) -> list[list[Node]]:
    """Return the runs of consecutive nodes of a region."""
    found: list[list[Node]] = []
    previous: Node | None = None
    for node in graph.nodes:
        if node.meta.get(REGION) == number:
            if previous is None or previous.meta.get(REGION) != number:
                found.append([])
            found[-1].append(node)
        previous = node
    return found


# -- parameters -------------------------------------------------------------------------------------------------------


def _bring_parameters(graph: Graph, modules: dict[str, nn.Module], number: int) -> None:
    """Move regathered buckets of this region alone into it; fill the others before it."""
    for running, readers in _gathered_again(graph, modules).items():
        inside = [reader for reader in readers if reader.meta.get(REGION) == number]
        if not inside:
            continue
        head = _members(graph, number)[0]
        machinery = _machinery(graph, modules, running)
        if len(inside) == len(readers):
            once = BucketState(
                replace(running.bucket, handling=replace(running.bucket.handling, again=False)),
                running.synchronisation,
            )
            for node in machinery:
                module = _module(node, modules)
                if isinstance(module, BucketStart | BucketEnd):
                    module.running = once
                node.meta[REGION] = number
            _move(machinery, head)
            for node in [
                node for node in graph.nodes if isinstance(_module(node, modules), RegatherWatch | RegatherRelease)
            ]:
                if _module(node, modules).running is running:  # type: ignore[union-attr]
                    graph.erase_node(node)
        else:
            name = f"refill_{len(modules)}"
            modules[name] = RegatherBeforeRecompute(running)
            with graph.inserting_before(head):
                values = tuple(node for node in machinery if node.target is operator.getitem)
                graph.call_module(name, values).meta[REGION] = number


def _gathered_again(graph: Graph, modules: Mapping[str, nn.Module]) -> dict[BucketState, list[Node]]:
    """Return the regathered buckets, and all their readers."""
    found: dict[BucketState, list[Node]] = {}
    for node in graph.nodes:
        module = _module(node, modules)
        if isinstance(module, RegatherWatch):
            found.setdefault(module.running, []).append(node.all_input_nodes[0])
    return found


def _machinery(graph: Graph, modules: Mapping[str, nn.Module], running: BucketState) -> list[Node]:
    """Return the start and the end of a bucket, and the tensors taken out of it."""
    ends = [
        node
        for node in graph.nodes
        if isinstance(module := _module(node, modules), BucketStart | BucketEnd) and module.running is running
    ]
    taken = [node for node in graph.nodes if node.target is operator.getitem and node.args[0] in ends]
    return [*ends, *taken]


def _move(nodes: Iterable[Node], before: Node) -> None:
    for node in nodes:
        if node is not before:
            before.prepend(node)


# -- a region is one stretch of the graph -----------------------------------------------------------------------------


def _close(graph: Graph, modules: Mapping[str, nn.Module], number: int, modes: dict[int, Recompute]) -> None:
    """Make the nodes of a region contiguous: nodes between them move before or after it.

    A node that depends on the region and leads back into it joins it; so does an enclosing region.
    """
    while True:
        members = set(_members(graph, number))
        span = _span(graph, members)
        after: set[Node] = set()
        for node in span:
            if node not in members and not members.union(after).isdisjoint(node.all_input_nodes):
                after.add(node)
        leading: set[Node] = set()
        for node in reversed(span):
            if node not in members and not members.union(leading).isdisjoint(node.users):
                leading.add(node)
        between = after & leading
        if not between:
            break
        for node in between:
            other = node.meta.get(REGION)
            if other is not None:
                modes[number] = modes[number] if modes[other] == modes[number] else "full"
                for one in _members(graph, other):
                    one.meta[REGION] = number
            node.meta[REGION] = number
    after |= {node for node in span if node not in members and isinstance(_module(node, modules), RegatherRelease)}
    _move([node for node in span if node not in members and node not in after], span[0])
    last = span[-1]
    for node in reversed([node for node in span if node in after]):
        last.append(node)


def _span(graph: Graph, members: set[Node]) -> list[Node]:
    nodes = list(graph.nodes)
    places = [place for place, node in enumerate(nodes) if node in members]
    return nodes[places[0] : places[-1] + 1]
