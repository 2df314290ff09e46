"""The invariants of a generated graph, checked at the end of lowering."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule, Node

from autopar.ir.graph import NamedGraph
from autopar.ir.invariants import Invariant, check_invariants
from autopar.lowering.collectives.key_ring import LocalKeyRing
from autopar.lowering.collectives.local_reshard import LocalReshard
from autopar.lowering.collectives.process_groups import Groups
from autopar.lowering.emitted import Emitted
from autopar.lowering.modules.bucket import BucketState
from autopar.lowering.modules.bucket_ends import BucketEnd, BucketStart, RegatherRelease, RegatherWatch
from autopar.lowering.modules.host_copies import OffloadedOps
from autopar.lowering.modules.micro_loop import MicroBatchLoop
from autopar.lowering.modules.pipeline_loop import PipelineLoop
from autopar.lowering.modules.selective_recompute import SelectiveRecompute
from autopar.lowering.modules.shard_ops import LoweredOpModule, ReshardModule
from autopar.lowering.passes.hoist_small_sums import SLICED
from autopar.lowering.passes.join_small_sums import JoinedSums
from autopar.lowering.verify_shapes import wrong_shapes
from autopar.sharding.assignment import Assignment
from autopar.sharding.reshard.reshard import Step
from autopar.sharding.reshard_insertion import ReshardPlan

__all__ = ["EMITTED_INVARIANTS", "order_of_messages", "verify_emitted"]


@dataclass(frozen=True)
class _ModuleCall:
    """One call of a module in the generated graph or in a region of it."""

    node: Node
    module: nn.Module

    @property
    def reshards(self) -> tuple[LocalReshard, ...]:
        """The reshards that the module runs; those of a bucket stand at its end."""
        if isinstance(self.module, ReshardModule):
            return (self.module.conversion,)
        if isinstance(self.module, JoinedSums):
            return self.module.conversions
        if isinstance(self.module, MicroBatchLoop | PipelineLoop):
            buckets = self.module.buckets.every
            return tuple(one for bucket in buckets for one in bucket.state.bucket.conversions)
        return self.module.running.bucket.conversions if isinstance(self.module, BucketEnd) else ()

    @property
    def sent(self) -> tuple[Step, ...]:
        """The collectives of the forward; those of a bucket run where they start."""
        module = self.module
        if isinstance(module, LoweredOpModule):
            steps = [step for message in module.split.messages() for step in message.reshard.forward]
        elif isinstance(module, BucketStart | BucketEnd):
            is_first = isinstance(module, BucketStart) or not module.running.has_start
            conversions = module.running.bucket.conversions
            steps = list(conversions[0].reshard.forward) if is_first and conversions else []
        elif isinstance(module, JoinedSums):
            steps = list(module.conversions[0].reshard.forward)
        else:
            steps = [step for one in self.reshards for step in one.reshard.forward]
        return tuple(step for step in steps if not step.local)


@dataclass(frozen=True)
class _Lowered:
    """A generated graph with what it was made from."""

    graph: NamedGraph
    assignment: Assignment
    groups: Groups
    reshard_plan: ReshardPlan
    emitted: Emitted

    @cached_property
    def graphs(self) -> tuple[GraphModule, ...]:
        """The generated graph and the bodies of its regions."""
        return tuple(_nested(self.emitted.graph_module))

    @cached_property
    def calls(self) -> tuple[_ModuleCall, ...]:
        """The calls of modules in the order in which they run."""
        return tuple(_calls(self.emitted.graph_module))


def _nested(module: GraphModule) -> Iterator[GraphModule]:
    yield module
    for node in module.graph.nodes:
        for body in _bodies(module, node):
            yield from _nested(body)


def _bodies(module: GraphModule, node: Node) -> tuple[GraphModule, ...]:
    """Return the body of a region where a node calls it, or the parts of a pipeline."""
    called = _named(module, str(node.target)) if node.op in ("call_module", "get_attr") else None
    if isinstance(called, PipelineLoop):
        return tuple(part.body for part in called.parts.values())
    body = called.body if isinstance(called, SelectiveRecompute | OffloadedOps | MicroBatchLoop) else called
    return (body,) if isinstance(body, GraphModule) else ()


def _named(module: nn.Module, path: str) -> Any:
    """Return the submodule or constant of that name; None if there is none."""
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _calls(module: GraphModule) -> Iterator[_ModuleCall]:
    for node in module.graph.nodes:
        bodies = _bodies(module, node)
        for body in bodies:
            yield from _calls(body)
        if node.op == "call_module":
            called = module.get_submodule(str(node.target))
            if not bodies or isinstance(called, MicroBatchLoop | PipelineLoop):  # loops have buckets of their own
                yield _ModuleCall(node, called)


def order_of_messages(module: GraphModule) -> str:
    """Return the reshards and messages of a generated graph in the order in which they run, a line each.

    Ranks that run the same ops must send in one order, also where messages are of one kind and size.
    """
    lines = []
    for call in _calls(module):
        back = [step for one in call.reshards for step in one.reshard.backward if not step.local]
        kinds = [f"{step.kind.value} {step.axes}" for step in (*call.sent, *back)]
        if kinds:
            lines.append(f"{call.node.target}: {', '.join(kinds)}")
    return "\n".join(lines)


def verify_emitted(
    graph: NamedGraph, assignment: Assignment, groups: Groups, reshard_plan: ReshardPlan, emitted: Emitted
) -> None:
    """Raise `InvariantError` if the generated graph of a rank breaks one of `EMITTED_INVARIANTS`."""
    lowered = _Lowered(graph, assignment, groups, reshard_plan, emitted)
    check_invariants("the generated graph", EMITTED_INVARIANTS, lowered)


def _disorder(given: _Lowered) -> Iterator[str]:
    for module in given.graphs:
        seen: set[Node] = set()
        names = Counter(node.name for node in module.graph.nodes)
        yield from (f"two nodes are named {name}" for name, count in names.items() if count > 1)
        for node in module.graph.nodes:
            yield from (f"{node.name} reads {one.name}" for one in node.all_input_nodes if one not in seen)
            seen.add(node)
        if [node.op for node in seen].count("output") != 1 or next(iter(reversed(module.graph.nodes))).op != "output":
            yield "the graph does not end with its one output"


def _missing_modules(given: _Lowered) -> Iterator[str]:
    for module in given.graphs:
        for node in module.graph.nodes:
            if node.op in ("call_module", "get_attr") and _named(module, str(node.target)) is None:
                yield f"{node.name} calls {node.target}, which is no module of the graph"


def _wrong_inputs(given: _Lowered) -> Iterator[str]:
    emitted = given.emitted
    # A short graph takes no parameters of the layers that it lacks.
    known = {tensor.node for tensor in given.graph.tensors.values()}
    traced = [name for name in _placeholders(given.graph.exported.graph_module.graph) if name in known]
    keys = ["key"] if emitted.draws else []
    early = [f"early_{number}" for number in emitted.ends.taken]
    found = _placeholders(emitted.graph_module.graph)
    if found != [*traced, *keys, *early]:
        yield f"the graph takes {found}, expected {[*traced, *keys, *early]}"
    if any(place >= len(traced) for place in emitted.ends.places):
        yield f"the sums before the graph read the inputs {emitted.ends.places} of {len(traced)}"


def _placeholders(graph: Graph) -> list[str]:
    return [str(node.target) for node in graph.find_nodes(op="placeholder")]


def _wrong_outputs(given: _Lowered) -> Iterator[str]:
    flat, traced = (
        module.graph.output_node().args[0] for module in (given.emitted.graph_module, given.graph.exported.graph_module)
    )
    assert isinstance(flat, tuple), "emit writes a tuple"
    assert isinstance(traced, tuple), "the graph returns a flat tuple"
    # A tensor that nobody asked for has no place among the results.
    asked = (isinstance(one, Node) for one in traced)
    places = [one and place is not None for one, place in zip(asked, given.reshard_plan.results, strict=True)]
    if [isinstance(one, Node) for one in flat] != places:
        yield f"the graph returns {flat}, traced as {traced}"
    mutated = len(given.graph.exported.mutations)
    if given.emitted.results != given.reshard_plan.results[mutated:]:
        yield f"the results are {given.emitted.results}, expected {given.reshard_plan.results[mutated:]}"
    late = [place for one in given.emitted.ends.late for place in one.places]
    if any(place >= len(flat) for place in late) or len(set(late)) < len(late):
        yield f"the sums after the graph are of the results {late}"


def _wrong_buckets(given: _Lowered) -> Iterator[str]:
    starts: dict[BucketState, Node] = {}
    ends: dict[BucketState, Node] = {}
    for call in given.calls:
        module = call.module
        if isinstance(module, BucketStart):
            if module.running in starts:
                yield f"{call.node.name} starts the bucket of {starts[module.running].name} again"
            starts[module.running] = call.node
        elif isinstance(module, BucketEnd):
            start = starts.get(module.running)
            if module.running in ends:
                yield f"{call.node.name} ends the bucket of {ends[module.running].name} again"
            if (start is not None) != module.running.has_start:
                yield f"{call.node.name} ends a bucket that {'was not started' if start is None else 'has no start'}"
            if start is not None and call.node.args != (start,):
                yield f"{call.node.name} ends {call.node.args}, expected {start.name}"
            ends[module.running] = call.node
        elif isinstance(module, RegatherWatch | RegatherRelease) and module.running not in ends:
            yield f"{call.node.name} stands before the end of its bucket"
    yield from (f"the bucket of {node.name} does not end" for one, node in starts.items() if one not in ends)


def _unknown_groups(given: _Lowered) -> Iterator[str]:
    ends = given.emitted.ends
    after = [one.conversion for one in ends.late]
    for name, reshards in (*((call.node.name, call.reshards) for call in given.calls), ("ends", (*ends.early, *after))):
        for one in reshards:
            ways = (one.forward, one.reshard.forward), (one.backward, one.reshard.backward)
            for local, step in (pair for bound, steps in ways for pair in zip(bound, steps, strict=True)):
                if step.local:
                    continue
                group = given.groups.of(step.axes)
                if (local.group, local.ranks) != (group.name, len(group.members)):
                    yield f"{name}: {step} runs in the group {local.group!r} of {local.ranks} ranks"


def _wrong_rings(given: _Lowered) -> Iterator[str]:
    for call in given.calls:
        rings = call.module.sends if isinstance(call.module, LoweredOpModule) else ()
        for ring in (one for one in rings if isinstance(one, LocalKeyRing)):
            group = given.groups.of(ring.message.axes)
            places = [ring.message.place({**given.groups.coordinate, **one}) for one in group.members]
            found = [ring.members.index(number) for number in range(len(ring.members))]
            if ring.group != group.name or found != places:
                yield f"{call.node.name} passes keys along {found} of the group {ring.group!r}, expected {places}"
            if ring.place != ring.message.place(given.groups.coordinate):
                yield f"{call.node.name} passes keys from place {ring.place}"


def _unused_collectives(given: _Lowered) -> Iterator[str]:
    for call in given.calls:
        if call.sent and not call.node.users:
            yield f"nothing reads {call.node.name}, which sends {', '.join(map(str, call.sent))}"


def _reshards_unlike_plan(given: _Lowered) -> Iterator[str]:
    ends, plan = given.emitted.ends, given.reshard_plan
    planned = Counter(
        one.reshard
        for group in (plan.inputs.values(), *((*op.before, *op.after) for op in plan.ops.values()), plan.outputs)
        for one in group
        if one.ways
    )
    generated = Counter(one.reshard for call in given.calls for one in call.reshards)
    generated.update(one.reshard for one in (*ends.early, *(one.conversion for one in ends.late)))
    if ends.before is not None:
        # The graph before may share local reshards with the graph itself.
        moved = Counter(one.reshard for call in _calls(ends.before) for one in call.reshards)
        moved.update(node.meta[SLICED] for node in ends.before.graph.nodes if SLICED in node.meta)
        generated.update({reshard: count for reshard, count in moved.items() if generated[reshard] < planned[reshard]})
    if given.assignment.pipelining is not None:
        # A stage has the reshards of its parts; one that follows from inputs alone stands in several parts.
        yield from (f"{reshard}: not planned, generated" for reshard in generated if reshard not in planned)
        return
    # A result that adds up several sums is sent as one.
    joined = {one.conversion.reshard for one in ends.late}
    # Loops over micro-batches that read the same value each compute it.
    loops = sum(isinstance(call.module, MicroBatchLoop) for call in given.calls)
    halves = 2 if given.assignment.halves else 1
    for reshard in {**planned, **generated}:
        fewest = 1 if reshard in joined else planned[reshard]
        if not fewest <= generated[reshard] <= planned[reshard] * halves * max(1, loops):
            yield f"{reshard}: planned {planned[reshard]} times, generated {generated[reshard]} times"
    messages = Counter(name for name, op in plan.ops.items() for one in op.inside if one.ways)
    lowered = Counter(
        call.module.split.node.name
        for call in given.calls
        if isinstance(call.module, LoweredOpModule)
        for message in call.module.split.messages()
        if message.reshard.forward or message.reshard.backward
    )
    # What both halves share stands once.
    if any(not messages[name] <= lowered[name] <= messages[name] * halves for name in {**messages, **lowered}):
        yield f"messages of ops: planned {dict(messages)}, generated {dict(lowered)}"


def _shapes_unlike_shardings(given: _Lowered) -> Iterator[str]:
    yield from wrong_shapes(
        given.graph, given.assignment, given.groups.coordinate, given.reshard_plan, given.emitted.graph_module
    )


EMITTED_INVARIANTS: tuple[Invariant[_Lowered], ...] = (
    Invariant("modules", "every module that a node calls exists", _missing_modules),
    Invariant("one producer", "each name is given once, before it is read; the output comes last", _disorder),
    Invariant("inputs", "the graph takes the traced inputs, then the random key, then early sums", _wrong_inputs),
    Invariant("outputs", "the graph returns a tensor where the traced graph does", _wrong_outputs),
    Invariant("buckets", "a bucket starts at most once, then ends once", _wrong_buckets),
    Invariant("groups", "each collective runs in the group of its axes", _unknown_groups),
    Invariant("rings", "keys pass along the ranks of an axis in their order", _wrong_rings),
    Invariant("no dead collective", "something reads what a collective gives", _unused_collectives),
    Invariant(
        "reshards",
        "each planned reshard stands in the graph once, or once in each loop or half, and no other does",
        _reshards_unlike_plan,
    ),
    Invariant("local shapes", "values have the local shapes of their shardings", _shapes_unlike_shardings),
)
