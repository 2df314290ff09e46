"""Let the halves of a micro-batch run side by side: while one half computes, what the other sends is on its way.

Each op of the body that varies between micro-batches stands in it twice, all others once. A reshard that sends is begun
by one call and ended by another. The halves take turns, the second one turn behind the first. A turn ends where the
half would wait for what it has begun to send, and between the products before that. So messages of both directions have
products of the other half beside them, also in Megatron's layers, whose forward sends after the products of each part
and whose backward sends before them. A region with recomputation and a part of a pipeline end for both halves at
once.

Input::

    x0 = micro_slice(number, x)
    y = all_reduce(linear(x0, w))
    total = sum(y)
Output::

    x0, x1 = micro_slice(2 * number, x), micro_slice(2 * number + 1, x)
    b0 = begin(linear(x0, w))
    b1 = begin(linear(x1, w))
    t0 = sum(end(b0))
    t1 = sum(end(b1))
    total = t0 + t1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, zip_longest

import torch
from torch import nn
from torch.fx import Graph, Node

from autopar.ir.analysis.contractions import ATTENTIONS, RECURRENT, multiplied
from autopar.ir.graph import NamedGraph
from autopar.lowering.modules.halves import HalfNumber, HalvesResult, ReshardBegin, ReshardEnd
from autopar.lowering.modules.micro_loop import LoopResult
from autopar.lowering.modules.shard_ops import ReshardModule
from autopar.lowering.passes.micro_batches import Double
from autopar.lowering.passes.pipeline_parts import OP, VALUE
from autopar.lowering.passes.recompute_regions import REGION
from autopar.sharding.assignment import Assignment

__all__ = ["halves_of"]

END = "reshard_end"


def halves_of(graph: NamedGraph, assignment: Assignment) -> Double | None:
    """Return the function that makes the body of a micro-batch from that of a half; None where there are no halves."""
    if not assignment.halves:
        return None
    whole = (*ATTENTIONS, *RECURRENT)
    products = frozenset(node.name for node in graph.nodes if node.op in whole or multiplied(node) is not None)
    parts = {} if assignment.pipelining is None else assignment.pipelining.parts

    def double(
        body: Graph, modules: dict[str, nn.Module], joins: Sequence[LoopResult]
    ) -> tuple[Graph, tuple[LoopResult, ...]]:
        return _Halves(body, modules, products, parts).run(joins)

    return double


@dataclass(eq=False)
class _Half:
    """Copies of the nodes for one half."""

    number: int
    copies: dict[Node, Node] = field(default_factory=dict)
    # Reshards that have begun, by their node.
    begun: dict[Node, Node] = field(default_factory=dict)


class _Halves:
    def __init__(
        self, graph: Graph, modules: dict[str, nn.Module], products: frozenset[str], parts: Mapping[str, int]
    ) -> None:
        self.graph = graph
        self.modules = modules
        self.products = products
        # Part of a pipeline of each op.
        self.parts = parts
        self.out = Graph()
        self.halves = _Half(0), _Half(1)
        self.number, *self.inputs = graph.find_nodes(op="placeholder")
        self.varying = {self.number}
        self.divided: set[Node] = set()

    def run(self, joins: Sequence[LoopResult]) -> tuple[Graph, tuple[LoopResult, ...]]:
        count = self.out.node_copy(self.number)
        for one in self.inputs:
            self._share(one)
        for half in self.halves:
            self.modules[f"half_{half.number}"] = HalfNumber(half.number)
            half.copies[self.number] = self.out.call_module(f"half_{half.number}", (count,))
        nodes = [node for node in self.graph.nodes if node.op not in ("placeholder", "output")]
        for node in nodes:
            if not self.varying.isdisjoint(node.all_input_nodes):
                self.varying.add(node)
                if self._may_overlap(node):
                    self.divided.add(node)
        # What both halves share stands before its first reader.
        varying = [node for node in nodes if node in self.varying]
        for _, region in groupby(varying, key=lambda node: (node.meta.get(REGION), self._part_of(node))):
            self._take_turns(list(region))
        results = self.graph.output_node().args[0]
        assert isinstance(results, tuple), "a body returns a tuple"
        joined = []
        every = tuple(map(_of_both, joins))
        for place, (result, join, both) in enumerate(zip(results, joins, every, strict=True)):
            self.modules[f"halves_{place}"] = HalvesResult(join)
            parts = tuple(self._read(result, half) for half in self.halves)
            joined.append(self.out.call_module(f"halves_{place}", parts))
            shape = both.sizes if both.kind == "concat" else result.meta["local_shape"]
            joined[-1].meta.update({"local_shape": shape, VALUE: result.meta[VALUE]})
        self.out.output(tuple(joined))
        for node in self.divided:
            self.modules.pop(str(node.target), None)
        return self.out, every

    def _part_of(self, node: Node) -> int | None:
        return self.parts.get(node.meta.get(OP, ""))

    def _module(self, node: Node) -> nn.Module | None:
        return self.modules.get(str(node.target)) if node.op == "call_module" else None

    def _may_overlap(self, node: Node) -> bool:
        """Return whether a node is a reshard that sends, in one direction or both."""
        module = self._module(node)
        if not isinstance(module, ReshardModule):
            return False
        return any(not step.local for step in (*module.conversion.forward, *module.conversion.backward))

    def _is_product(self, node: Node) -> bool:
        calls = node.op == "call_module" or isinstance(node.target, torch._ops.OpOverload)
        return calls and node.meta.get(OP) in self.products and not isinstance(self._module(node), ReshardModule)

    # -- turns

    def _take_turns(self, nodes: Sequence[Node]) -> None:
        """Copy the nodes of a region for both halves, the second one turn behind; what begins in it ends in it."""
        turns = self._turns(nodes)
        first, second = self.halves
        for mine, other in zip_longest(turns, [[], *turns], fillvalue=()):
            for half, turn in ((first, mine), (second, other)):
                for node in turn:
                    self._copy(node, half)
        for half in self.halves:
            for node in list(half.begun):
                self._read(node, half)

    def _turns(self, nodes: Sequence[Node]) -> list[list[Node]]:
        """Return the nodes of each turn of a half."""
        spans: list[list[Node]] = [[]]
        begun: set[Node] = set()
        for node in nodes:
            if not begun.isdisjoint(node.all_input_nodes):
                spans.append([])
                begun.clear()
            spans[-1].append(node)
            if node in self.divided:
                begun.add(node)
        return [turn for span in spans for turn in self._parts(span)]

    def _parts(self, span: list[Node]) -> list[list[Node]]:
        """Return the nodes between two waits in two parts, if both have products."""
        # By op: a rank without elements of it has one call, others have calls of slices too. All cut at the same op.
        products = dict[str, int]()
        for place, node in enumerate(span):
            if self._is_product(node):
                products.setdefault(node.meta[OP], place)
        if len(products) < 2:
            return [span]
        cut = list(products.values())[len(products) // 2]
        return [span[:cut], span[cut:]]

    def _copy(self, node: Node, half: _Half) -> None:
        for source in node.all_input_nodes:
            self._bring(source)
        copy = self.out.node_copy(node, lambda one: self._read(one, half))
        if node not in self.divided:
            half.copies[node] = copy
            return
        copy.target = f"{node.target}_begin"
        whole = self.modules[str(node.target)]
        assert isinstance(whole, ReshardModule), node
        self.modules.setdefault(copy.target, ReshardBegin(whole))
        half.begun[node] = copy

    def _read(self, node: Node, half: _Half) -> Node:
        """Return the copy of a node for a half; where it is a reshard on its way, end it."""
        if node in half.begun:
            begun = half.begun.pop(node)
            self.modules.setdefault(END, ReshardEnd())
            ended = half.copies[node] = self.out.call_module(END, (begun,))
            ended.meta.update(begun.meta)
        return half.copies[node]

    # -- what both halves share

    def _bring(self, node: Node) -> None:
        """Copy a node that both halves share, after all that it reads."""
        left = [node]
        while left:
            one = left.pop()
            if one in self.varying or one in self.halves[0].copies:
                continue
            missing = [source for source in one.all_input_nodes if source not in self.halves[0].copies]
            if missing:
                left += [one, *missing]
            else:
                self._share(one)

    def _share(self, node: Node) -> None:
        copy = self.out.node_copy(node, self.halves[0].copies.__getitem__)
        for half in self.halves:
            half.copies[node] = copy


def _of_both(join: LoopResult) -> LoopResult:
    """Return how micro-batches join, from how their halves do."""
    if join.kind == "sum":
        return join
    sizes = tuple(2 * size if atom == join.atom else size for atom, size in enumerate(join.sizes))
    return replace(join, sizes=sizes)
