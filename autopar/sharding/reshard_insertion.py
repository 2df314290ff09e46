"""Insert reshards: one list in the order of the graph, read by the cost model and by code generation.

A value is resharded once per sharding, before the first op that needs it so; later ops with the same need reuse it. The
results of an op are resharded right after it. Lowered ops list their own messages. Nothing here needs a process group,
so a plan can be priced on any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from autopar.errors import AutoparError
from autopar.ir.graph import NamedGraph
from autopar.ir.precision import Precision
from autopar.ir.values import NamedNode
from autopar.sharding.assignment import Assignment, OpAssignment
from autopar.sharding.level_sums import LevelPhase, LevelSum
from autopar.sharding.lowered_ops import LoweredOpContext, OpMessage, lowered_context
from autopar.sharding.options import Outputs
from autopar.sharding.reshard.reshard import NoSteps, Reshard, Step, StepKind, goes_in_bucket, reshard
from autopar.sharding.sharding import (
    MICRO,
    Atoms,
    Sharding,
    atoms_of,
    place_in_time,
    routing_excess,
    splits_evenly,
    without_time,
)


@dataclass(frozen=True)
class StepCollective:
    """Collective of a step with its tensor, its op and the bytes that it sends."""

    kind: str
    axes: tuple[str, ...]
    direction: str
    tensor: str
    op: str
    bytes: int

    def __str__(self) -> str:
        sent = f"{self.direction} {self.kind} over {'*'.join(self.axes)}"
        return f"{sent}: {self.bytes:,} bytes, {self.tensor} for {self.op}"


# The all-reduces over some axes that run by level, for which buffers.
LevelSumsOver = Callable[[tuple[str, ...]], Iterable[LevelSum]]


def step_collectives(
    inserted: Iterable[InsertedReshard],
    sums: LevelSumsOver,
    sizes: Mapping[str, int],
    in_buckets: Mapping[str, int],
    graph: NamedGraph,
    precision: Precision,
) -> Iterator[StepCollective]:
    """Yield the collectives of reshards, each by itself; an all-reduce by level is several.

    `sizes` are those of the axes; `in_buckets` has the bytes that are summed together with a parameter's gradient.
    """
    for one in inserted:
        for direction, step in one.collectives():
            size = one.bytes_of(step, one.itemsize_in(direction, graph, precision))
            phases = [LevelPhase(step.kind.value, step.axes, 1.0)]
            if step.kind is StepKind.ALL_REDUCE:
                together = in_buckets.get(one.tensor, size)
                found = (way for way in sums(step.axes) if way.takes(together))
                phases = next((list(way.phases(sizes)) for way in found), phases)
            for kind, axes, share in phases:
                yield StepCollective(kind, axes, direction, one.tensor, one.op, ceil(size * share))


def gathered_in_float8(graph: NamedGraph, precision: Precision) -> frozenset[str]:
    """Return the parameters that are gathered in float8."""
    return graph.float8_weights if precision.gathers else frozenset()


@dataclass(frozen=True)
class InsertedReshard:
    """Reshard of one tensor in its place, before or after an op.

    `reshard` has what the ranks do. A reshard into the micro-batches or out of them has other ends, which name time.
    """

    tensor: str
    op: str
    reshard: Reshard
    # Bytes stored for an element: a fraction for routed rows.
    itemsize: float
    differentiable: bool
    in_time: tuple[Sharding, Sharding] | None = None
    # Of a message inside an op, the shares of its work that run beside each hop.
    beside: tuple[float, ...] = ()

    @classmethod
    def of_message(cls, node: NamedNode, message: OpMessage) -> InsertedReshard:
        """Return a message of a lowered op as a reshard of the operand that it sends."""
        name = node.operands[message.operand]
        assert name is not None, node.name
        found = cls(name, node.name, message.reshard, message.itemsize, message.differentiable)
        return replace(found, beside=message.beside)

    @property
    def source(self) -> Sharding:
        return self.reshard.source if self.in_time is None else self.in_time[0]

    @property
    def target(self) -> Sharding:
        return self.reshard.target if self.in_time is None else self.in_time[1]

    def bytes_of(self, step: Step, itemsize: float | None = None) -> int:
        """Return the bytes in the buffer of one of the steps, on the busiest rank."""
        return round(step.numel * (self.itemsize if itemsize is None else itemsize))

    @property
    def _backward(self) -> tuple[Step, ...]:
        return self.reshard.backward if self.differentiable else ()

    @property
    def ways(self) -> tuple[Step, ...]:
        """The steps of both directions, of the forward alone without a gradient."""
        return (*self.reshard.forward, *self._backward)

    def collectives(self) -> Iterator[tuple[str, Step]]:
        """Yield the steps that send, each with its direction."""
        yield from (("forward", step) for step in self.reshard.forward if not step.local)
        if self.differentiable:
            yield from (("backward", step) for step in self.reshard.backward if not step.local)

    def itemsize_in(self, direction: str, graph: NamedGraph, precision: Precision) -> float:
        """Return the bytes of an element that is sent; parameters may be gathered and summed in dtypes of their own."""
        tensor = graph.tensors[self.tensor]
        if tensor.kind != "param":
            return self.itemsize
        if direction == "backward":
            return precision.reduced(tensor.dtype).itemsize
        return 1.0 if self.gathers_in_float8(graph, precision) else self.itemsize

    def gathers_in_float8(self, graph: NamedGraph, precision: Precision) -> bool:
        """Return whether a parameter is gathered in float8."""
        if self.tensor not in gathered_in_float8(graph, precision):
            return False
        # What is in no bucket is gathered as it is used.
        kinds, others = (tuple(step.kind for step in way) for way in (self.reshard.forward, self._backward))
        return StepKind.ALL_GATHER in kinds and goes_in_bucket(kinds, others)


@dataclass(frozen=True)
class OpReshards:
    """Reshards for one op, and the shardings in which it finds its operands (None for an absent one)."""

    operands: tuple[tuple[str, Sharding] | None, ...]
    # Reshards of operands that no earlier op needed in these shardings.
    before: tuple[InsertedReshard, ...]
    # None for an op that needs nothing of other shards.
    split: LoweredOpContext | None
    # The messages of `split`, in their order.
    inside: tuple[InsertedReshard, ...]
    # Reshards of results that consumers find in another sharding than the op produces.
    after: tuple[InsertedReshard, ...]


@dataclass(frozen=True)
class ReshardPlan:
    """All reshards of a graph in their places, also those without steps."""

    # By tensor, from whole inputs; empty where the caller gives shards.
    inputs: Mapping[str, InsertedReshard]
    ops: Mapping[str, OpReshards]
    outputs: tuple[InsertedReshard, ...]
    # Values that the graph returns, in their returned shardings; None for a value that is no tensor.
    results: tuple[tuple[str, Sharding] | None, ...]

    def inserted(self) -> tuple[InsertedReshard, ...]:
        """Return the reshards that have steps, in the order of the graph."""
        every = [*self.inputs.values()]
        for op in self.ops.values():
            every += (*op.before, *op.inside, *op.after)
        return tuple(one for one in (*every, *self.outputs) if one.ways)


def inserted_reshards(
    graph: NamedGraph, assignment: Assignment, outputs: Outputs = "sharded", local_inputs: bool = False
) -> tuple[InsertedReshard, ...]:
    """Return all reshards and messages of an assignment, in the order of the graph."""
    return insert_reshards(graph, assignment, outputs, local_inputs).inserted()


def insert_reshards(
    graph: NamedGraph, assignment: Assignment, outputs: Outputs = "sharded", local_inputs: bool = False
) -> ReshardPlan:
    """Return the reshards of an assignment, each in its place."""
    return _ReshardInserter(graph, assignment, outputs, local_inputs).run()


class _ReshardInserter:
    def __init__(self, graph: NamedGraph, assignment: Assignment, outputs: Outputs, local_inputs: bool) -> None:
        self.graph = graph
        self.assignment = assignment
        self.whole_outputs = outputs == "full"
        self.scalars_alone = outputs == "loss"
        self.local_inputs = local_inputs
        self.mesh = without_time(assignment.axes)
        self.rows = _axes_of_rows(graph, assignment) if MICRO in assignment.axes else ()
        self.shardings: dict[str, Sharding] = {}
        self.converted: set[tuple[str, Sharding]] = set()
        self.found: dict[tuple[Atoms, Sharding, Sharding], Reshard] = {}

    def run(self) -> ReshardPlan:
        inputs: dict[str, InsertedReshard] = {}
        for name, tensor in self.graph.tensors.items():
            if tensor.kind == "activation":
                continue
            stored = self.shardings[name] = self.assignment.stored[name]
            if tensor.kind == "input" and not self.local_inputs:
                inputs[name] = self._convert(name, Sharding.replicated(atoms_of(tensor)), stored, "the inputs")
        ops = {node.name: self._op(node, self.assignment.ops[node.name]) for node in self.graph.nodes}
        handed: list[InsertedReshard] = []
        names: Sequence[str | None] = self.graph.results
        mutated = len(self.graph.exported.mutations)
        if self.scalars_alone:
            scalars = {name for name, tensor in self.graph.tensors.items() if not tensor.shape}
            names = [name if i < mutated or name in scalars else None for i, name in enumerate(names)]
            if not any(names[mutated:]):
                raise AutoparError("outputs='loss': the model returns no scalar\nfix: outputs='sharded'")
        results = tuple(
            None if name is None else self._result(name, i < mutated, handed) for i, name in enumerate(names)
        )
        return ReshardPlan(inputs, ops, tuple(handed), results)

    def _op(self, node: NamedNode, op: OpAssignment) -> OpReshards:
        before: list[InsertedReshard] = []
        operands = tuple(
            None if name is None else (name, self._as(name, sharding, node.name, before))
            for name, sharding in zip(node.operands, op.operands, strict=True)
        )
        split = lowered_context(self.graph, node, op.choice.splits, op.operands, self.assignment.axes)
        after: list[InsertedReshard] = []
        for name, produced, wanted in zip(node.outputs, op.produced, op.results, strict=True):
            if name is None:
                continue
            assert produced is not None, node.name
            assert wanted is not None, node.name
            if produced != wanted:
                after += self._in_steps(name, produced, wanted, node.name)
            self.shardings[name] = wanted
        return OpReshards(operands, tuple(before), split, _messages(split), tuple(after))

    def _result(self, name: str, whole: bool, handed: list[InsertedReshard]) -> tuple[str, Sharding]:
        """Return the sharding of a returned value; scalars and written buffers are whole."""
        tensor = self.graph.tensors[name]
        if whole or self.whole_outputs or not tensor.shape:
            wanted = Sharding.replicated(atoms_of(tensor))
        else:
            # Callers know no partial sums and no broadcasts.
            wanted = Sharding(self.shardings[name].splits).without([MICRO])
        return name, self._as(name, wanted, "the outputs", handed)

    def _as(self, name: str, wanted: Sharding | None, op: str, made: list[InsertedReshard]) -> Sharding:
        """Return the sharding in which a value is used; add a new reshard to `made`."""
        have = self.shardings[name]
        if wanted is None or wanted == have:
            return have
        if (name, wanted) not in self.converted:
            made += self._in_steps(name, have, wanted, op)
        return wanted

    def _in_steps(self, name: str, have: Sharding, wanted: Sharding, op: str) -> Iterator[InsertedReshard]:
        """Yield a reshard; into the micro-batches and out of them by the sharding in which all values go."""
        between = _at_the_edge(have, wanted, self.rows)
        if between is not None and (name, between) not in self.converted:
            self.converted.add((name, between))
            yield self._convert(name, have, between, op)
        self.converted.add((name, wanted))
        yield self._convert(name, have if between is None else between, wanted, op)

    def _convert(self, name: str, have: Sharding, wanted: Sharding, op: str) -> InsertedReshard:
        tensor = self.graph.tensors[name]
        in_time = None if place_in_time(have) == place_in_time(wanted) else (have, wanted)
        ends = (have, wanted) if in_time is None else (have.without([MICRO]), wanted.without([MICRO]))
        key = atoms_of(tensor), *ends
        # Tensors that are cut alike share a search for the steps.
        found = self.found.get(key)
        if found is None:
            try:
                found = self.found[key] = reshard(*key, self.assignment.axes if in_time is None else self.mesh)
            except NoSteps as error:
                raise NoSteps(f"{op} takes {tensor} as {wanted}, not as {have}: {error}") from None
        size = tensor.element_bytes * routing_excess(key[0].roles, have, wanted)
        return InsertedReshard(name, op, found, size, tensor.requires_grad, in_time)


def _edge(have: Sharding, wanted: Sharding) -> tuple[Sharding, Sharding, int] | None:
    """Return the sharding within the micro-batches, that outside of them, and the split atom; None for no such pair."""
    ends = have.atom(MICRO), wanted.atom(MICRO)
    match ends:
        case int(atom), None:
            return have, wanted, atom
        case None, int(atom):
            return wanted, have, atom
    return None


def _at_the_edge(have: Sharding, wanted: Sharding, rows: tuple[str, ...]) -> Sharding | None:
    """Return the sharding in which a value enters or leaves the micro-batches; None if it does so by itself.

    A micro-batch has a part of the rows of each rank, not neighbouring rows of the batch. So its rows are the same in
    all values only if all of them are split alike where they enter.
    """
    edge = _edge(have, wanted)
    if edge is None:
        return None
    inside, _, atom = edge
    if inside.splits[atom] == (MICRO, *rows):
        return None
    bare = inside.without(rows)
    return replace(bare, splits=(*bare.splits[:atom], (MICRO, *rows), *bare.splits[atom + 1 :]))


def _axes_of_rows(graph: NamedGraph, assignment: Assignment) -> tuple[str, ...]:
    """Return the axes that split the batch where values enter the micro-batches or leave them.

    They are the most of any value that split all of them evenly.
    """
    found: set[tuple[str, ...]] = set()
    batches: set[tuple[int, bool]] = set()

    def note(name: str, have: Sharding, wanted: Sharding) -> None:
        edge = _edge(have, wanted)
        if edge is not None:
            inside, outside, atom = edge
            atoms = atoms_of(graph.tensors[name])
            found.update((inside.splits[atom][1:], outside.splits[atom]))
            batches.add((atoms.sizes[atom], atom in atoms.by_share))

    now = dict(assignment.stored)
    for node in graph.nodes:
        op = assignment.ops[node.name]
        for name, wanted in zip(node.operands, op.operands, strict=True):
            if name is not None and wanted is not None:
                note(name, now[name], wanted)
        for name, produced, kept in zip(node.outputs, op.produced, op.results, strict=True):
            if name is not None and produced is not None and kept is not None:
                note(name, produced, kept)
                now[name] = kept
    for name in graph.results:
        if name is not None:
            note(name, now[name], now[name].without([MICRO]))
    axes = assignment.axes
    even = [one for one in found if all(splits_evenly(size // axes[MICRO], one, axes, by) for size, by in batches)]
    return max(sorted(even), key=len, default=())


def _messages(split: LoweredOpContext | None) -> tuple[InsertedReshard, ...]:
    if split is None:
        return ()
    return tuple(InsertedReshard.of_message(split.node, message) for message in split.messages())
