"""What a plan converts and sends, in the order of the graph: one list, which the prices and the generated graph read.

Wherever a value is wanted in another layout than it has, it is converted: once per value and layout, before the first
op that wants it so. Results of an op are brought into their layouts right after it. Ops that run on shards with
messages of their own list these too. Nothing here needs a process group, so a plan can be priced anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode
from autopar.sharding.assignment import Assignment, OpAssignment
from autopar.sharding.atoms import Atoms, atoms_of
from autopar.sharding.lowered_ops import LoweredOpContext, split_of
from autopar.sharding.options import Outputs
from autopar.sharding.reshard.reshard import Reshard, Step, reshard
from autopar.sharding.sharding import Sharding


@dataclass(frozen=True)
class StepCollective:
    """One collective that a step runs: of which tensor, for which op, what it sends."""

    kind: str
    axes: tuple[str, ...]
    direction: str
    tensor: str
    op: str
    bytes: int

    def __str__(self) -> str:
        sent = f"{self.direction} {self.kind} over {'*'.join(self.axes)}"
        return f"{sent}: {self.bytes:,} bytes, {self.tensor} for {self.op}"


@dataclass(frozen=True)
class InsertedReshard:
    """One conversion in the generated graph: of which tensor, before which op, and what it sends in each direction."""

    tensor: str
    op: str
    reshard: Reshard
    itemsize: int
    differentiable: bool

    @property
    def ways(self) -> tuple[Step, ...]:
        """The steps of the directions that are taken; none where a value serves as it is."""
        return (*self.reshard.forward, *(self.reshard.backward if self.differentiable else ()))

    def collectives(self) -> Iterator[tuple[str, Step]]:
        """The steps that send something, with their direction."""
        yield from (("forward", step) for step in self.reshard.forward if not step.local)
        if self.differentiable:
            yield from (("backward", step) for step in self.reshard.backward if not step.local)


@dataclass(frozen=True)
class OpReshards:
    """What is converted for one op, and in which layouts it finds its operands (None where one is absent)."""

    operands: tuple[tuple[str, Sharding] | None, ...]
    before: tuple[InsertedReshard, ...]
    """Operands that no earlier op wanted in this layout."""
    split: LoweredOpContext | None
    """What it needs of the other shards, where it does."""
    inside: tuple[InsertedReshard, ...]
    """The messages of `split`, in their order."""
    after: tuple[InsertedReshard, ...]
    """Results that are brought into another layout than the op gives them."""


@dataclass(frozen=True)
class ReshardPlan:
    """Every conversion in its place. Those without steps are listed too: a value then serves as it is."""

    inputs: Mapping[str, InsertedReshard]
    """Whole inputs brought into their layouts, by tensor."""
    ops: Mapping[str, OpReshards]
    outputs: tuple[InsertedReshard, ...]
    results: tuple[tuple[str, Sharding] | None, ...]
    """Every value that the graph hands out, as it is handed out; None for one that is no tensor."""

    def inserted(self) -> tuple[InsertedReshard, ...]:
        """All that do something, in the order of the graph."""
        every = [*self.inputs.values()]
        for op in self.ops.values():
            every += (*op.before, *op.inside, *op.after)
        return tuple(one for one in (*every, *self.outputs) if one.ways)


def conversions(
    graph: NamedGraph, assignment: Assignment, outputs: Outputs = "sharded", local_inputs: bool = False
) -> tuple[InsertedReshard, ...]:
    """All that a plan converts and sends, in the order of the graph."""
    return insert_reshards(graph, assignment, outputs, local_inputs).inserted()


def insert_reshards(
    graph: NamedGraph, assignment: Assignment, outputs: Outputs = "sharded", local_inputs: bool = False
) -> ReshardPlan:
    """Where which conversion stands."""
    return _ReshardInserter(graph, assignment, outputs, local_inputs).run()


class _ReshardInserter:
    def __init__(self, graph: NamedGraph, assignment: Assignment, outputs: Outputs, local_inputs: bool) -> None:
        self.graph = graph
        self.assignment = assignment
        self.whole_outputs = outputs == "full"
        self.local_inputs = local_inputs
        self.layouts: dict[str, Sharding] = {}
        self.converted: set[tuple[str, Sharding]] = set()
        self.found: dict[tuple[Atoms, Sharding, Sharding], Reshard] = {}

    def run(self) -> ReshardPlan:
        inputs: dict[str, InsertedReshard] = {}
        for name, tensor in self.graph.tensors.items():
            if tensor.kind == "activation":
                continue
            stored = self.layouts[name] = self.assignment.stored[name]
            if tensor.kind == "input" and not self.local_inputs:
                inputs[name] = self._convert(name, Sharding.replicated(atoms_of(tensor)), stored, "the inputs")
        ops = {node.name: self._op(node, self.assignment.ops[node.name]) for node in self.graph.nodes}
        handed: list[InsertedReshard] = []
        exported = self.graph.exported
        flat: Any = exported.graph_module.graph.output_node().args[0]
        assert isinstance(flat, tuple), "the graph returns a flat tuple"
        by_node = {tensor.node: tensor.name for tensor in self.graph.tensors.values()}
        names = [by_node[result.name] if isinstance(result, Node) else None for result in flat]
        mutated = len(exported.mutations)
        results = tuple(
            None if name is None else self._result(name, i < mutated, handed) for i, name in enumerate(names)
        )
        return ReshardPlan(inputs, ops, tuple(handed), results)

    def _op(self, node: NamedNode, op_assignment: OpAssignment) -> OpReshards:
        before: list[InsertedReshard] = []
        operands = tuple(
            None if name is None else (name, self._as(name, layout, node.name, before))
            for name, layout in zip(node.operands, op_assignment.operands, strict=True)
        )
        split = split_of(self.graph, node, op_assignment.choice.splits, op_assignment.operands, self.assignment.axes)
        after: list[InsertedReshard] = []
        for name, produced, wanted in zip(node.outputs, op_assignment.produced, op_assignment.results, strict=True):
            if name is None:
                continue
            assert produced is not None, node.name
            assert wanted is not None, node.name
            if produced != wanted:
                after.append(self._convert(name, produced, wanted, node.name))
            self.layouts[name] = wanted
        return OpReshards(operands, tuple(before), split, _messages(split), tuple(after))

    def _result(self, name: str, whole: bool, handed: list[InsertedReshard]) -> tuple[str, Sharding]:
        """A result of the graph as it is handed out: scalars and what is written back as a whole."""
        tensor = self.graph.tensors[name]
        if whole or self.whole_outputs or not tensor.shape:
            wanted = Sharding.replicated(atoms_of(tensor))
        else:
            wanted = Sharding(
                self.layouts[name].splits
            )  # sums are made, and broadcasts end, where values are handed out
        return name, self._as(name, wanted, "the outputs", handed)

    def _as(self, name: str, wanted: Sharding | None, op: str, made: list[InsertedReshard]) -> Sharding:
        """The layout in which a value is used; the conversion to it is made where it is the first of its kind."""
        have = self.layouts[name]
        if wanted is None or wanted == have:
            return have
        if (name, wanted) not in self.converted:
            self.converted.add((name, wanted))
            made.append(self._convert(name, have, wanted, op))
        return wanted

    def _convert(self, name: str, have: Sharding, wanted: Sharding, op: str) -> InsertedReshard:
        tensor = self.graph.tensors[name]
        key = atoms_of(tensor), have, wanted
        found = self.found.get(key)
        if found is None:
            found = self.found[key] = reshard(*key, self.assignment.axes)
        return InsertedReshard(name, op, found, tensor.dtype.itemsize, tensor.requires_grad)


def _messages(split: LoweredOpContext | None) -> tuple[InsertedReshard, ...]:
    if split is None:
        return ()
    name = split.node.operands[0]
    assert name is not None, split.node.name
    return tuple(
        InsertedReshard(name, split.node.name, message.reshard, message.itemsize, message.differentiable)
        for message in split.messages()
    )
