"""The invariants of a generated graph, checked at the end of lowering."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import checkpoint

from autopar.ir.graph import NamedGraph
from autopar.ir.invariants import Invariant, check_invariants
from autopar.lowering.collectives.local_reshard import LocalReshard
from autopar.lowering.collectives.process_groups import Groups
from autopar.lowering.emitted import Emitted
from autopar.lowering.modules.bucket import BucketState
from autopar.lowering.modules.bucket_ends import BucketEnd, BucketStart, RegatherRelease, RegatherWatch
from autopar.lowering.modules.late_weights import LateProduct
from autopar.lowering.modules.micro_loop import MicroBatchLoop, MicroBatchSlice, MicroBatchZeros
from autopar.lowering.modules.pipeline_loop import PipelineLoop
from autopar.lowering.modules.selective_recompute import SelectiveRecompute
from autopar.lowering.modules.shard_ops import LoweredOpModule, ReshardModule
from autopar.lowering.passes.join_small_sums import JoinedSums
from autopar.sharding.assignment import Assignment
from autopar.sharding.reshard.reshard import Step
from autopar.sharding.reshard_insertion import ReshardPlan
from autopar.sharding.sharding import atoms_of

__all__ = ["EMITTED_INVARIANTS", "SHARD", "verify_emitted", "wrong_shapes"]


# -- local shapes ------------------------------------------------------------------------------------------------------


# Metadata of a node from emit: the tensor that it holds a shard of, and the sharding.
SHARD = "shard"

# Shapes that depend on data are taken from the sharding.
_OPEN = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    NotImplementedError,
)


def wrong_shapes(
    graph: NamedGraph,
    assignment: Assignment,
    coordinate: Mapping[str, int],
    reshard_plan: ReshardPlan,
    module: GraphModule,
) -> Iterator[str]:
    """Yield the nodes whose local shape is not that of their sharding on the rank at a coordinate."""
    with FakeTensorMode(), torch.no_grad():
        run = _ShapeRun(graph, assignment, coordinate)
        run.graph_of(module, [run.input_of(node, reshard_plan) for node in module.graph.find_nodes(op="placeholder")])
    yield from run.wrong


class _ShapeRun:
    """The values of a generated graph as fake tensors; None where a value's shape is not known."""

    def __init__(self, graph: NamedGraph, assignment: Assignment, coordinate: Mapping[str, int]) -> None:
        self.graph = graph
        self.assignment = assignment
        self.coordinate = coordinate
        self.by_node = {tensor.node: tensor for tensor in graph.tensors.values()}
        self.known: dict[Any, Any] = {}
        self.wrong: list[str] = []

    def shard(self, name: str, sharding: Any) -> Tensor:
        tensor = self.graph.tensors[name]
        atoms = atoms_of(tensor)
        shape = atoms.fold(sharding.local_sizes(atoms, self.assignment.axes, self.coordinate))
        return torch.empty(shape, dtype=tensor.dtype)

    def input_of(self, node: Node, reshard_plan: ReshardPlan) -> Tensor | None:
        """Return the shard that a placeholder stands for; None for a random key and for early sums."""
        tensor = self.by_node.get(str(node.target))
        if tensor is None:
            return None
        whole = reshard_plan.inputs.get(tensor.name)
        return self.shard(tensor.name, self.assignment.stored[tensor.name] if whole is None else whole.reshard.source)

    def graph_of(self, module: GraphModule, inputs: list[Any]) -> Any:
        """Run a graph or the body of a region, and return its results."""
        values: dict[Node, Any] = {}
        given = iter(inputs)
        for node in module.graph.nodes:
            if node.op == "output":
                return torch.fx.node.map_arg(node.args[0], values.get)
            declared = self.shard(*node.meta[SHARD]) if SHARD in node.meta else None
            found = next(given) if node.op == "placeholder" else self._value(node, module, values)
            if isinstance(found, Tensor) and declared is not None and found.shape != declared.shape:
                name, sharding = node.meta[SHARD]
                shapes = f"has the local shape {list(found.shape)}, expected {list(declared.shape)}"
                self.wrong.append(f"{node.name}, {name} as {sharding}, {shapes}")
                found = declared
            values[node] = declared if found is None else found
        raise AssertionError("a graph ends with its output")

    def _value(self, node: Node, module: GraphModule, values: Mapping[Node, Any]) -> Any:
        if node.op == "call_module":
            return self._module(node, module.get_submodule(str(node.target)), values)
        if node.op != "call_function":
            return None
        if node.target is operator.getitem:
            source, place = node.args
            found = values.get(source)  # type: ignore[arg-type]
            return found[place] if isinstance(found, tuple | list) else None  # type: ignore[index]
        if node.target is checkpoint:
            region, *rest = node.args
            body = module.get_submodule(str(region.target))  # type: ignore[union-attr]
            assert isinstance(body, GraphModule), node
            return self.graph_of(body, [values.get(one) for one in rest])  # type: ignore[arg-type]
        return self._op(node, values)

    def _op(self, node: Node, values: Mapping[Node, Any]) -> Any:
        """Run an op of torch once for each set of shapes."""
        if "device" in node.kwargs or any(values.get(one) is None for one in node.all_input_nodes):
            return None
        args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
        key = node.target, _key(args), _key(kwargs)
        if key not in self.known:
            try:
                self.known[key] = node.target(*args, **kwargs)  # type: ignore[operator]
            except _OPEN:
                self.known[key] = None
            except Exception as error:  # noqa: BLE001  # ops refuse wrong shapes in many ways
                self.known[key] = None
                self.wrong.append(f"{node.name} does not run on its local shapes: {error}")
        return self.known[key]

    def _module(self, node: Node, module: Any, values: Mapping[Node, Any]) -> Any:
        given = _read(node.args, values)
        if isinstance(module, SelectiveRecompute):
            return self.graph_of(module.body, given)
        if isinstance(module, MicroBatchLoop):
            parts = self.graph_of(module.body, [0, *given])
            pairs = zip(module.results, parts, strict=True)
            return [None if part is None else one.join([one.part(part)] * module.count) for one, part in pairs]
        if isinstance(module, PipelineLoop):
            tied = [one for one in module.tied if one.source != module.stages.stage]
            given = [*given, *(torch.empty(one.shape, dtype=one.dtype) for one in tied)]
            for part in module.parts.values():
                received = [torch.empty(one.shape, dtype=one.dtype) for one in part.received]
                self.graph_of(part.body, [0, *(given[place] for place in part.inputs), *received])
            return [torch.empty(one.joined_shape, dtype=one.dtype) for one in module.results]
        if isinstance(module, LateProduct):
            operands = [one for one in given if isinstance(one, Tensor)]
            return module(*given) if len(operands) == len(node.all_input_nodes) else None
        if isinstance(module, MicroBatchSlice | MicroBatchZeros):
            return None if given[1] is None else module(0, given[1])
        if isinstance(module, ReshardModule):
            (found,) = self._reshards(node, (module.conversion,), given)
            return found
        if isinstance(module, JoinedSums):
            return self._reshards(node, module.conversions, given)
        if isinstance(module, BucketStart):
            return given
        if isinstance(module, BucketEnd):
            (parts,) = given
            return self._reshards(node, module.running.bucket.conversions, parts)
        return None

    def _reshards(self, node: Node, reshards: tuple[LocalReshard, ...], given: list[Any]) -> list[Any]:
        found: list[Any] = []
        for one, value in zip(reshards, given, strict=True):
            if value is not None and tuple(value.shape) != one.shape:
                self.wrong.append(f"{node.name} takes the local shape {list(value.shape)}, expected {list(one.shape)}")
            found.append(None if value is None else value.new_empty(one.result_shape))
        return found


def _read(args: Any, values: Mapping[Node, Any]) -> Any:
    """Return the arguments with the value of each node; a node may stand twice."""
    if isinstance(args, Node):
        return values.get(args)
    return [_read(one, values) for one in args] if isinstance(args, list | tuple) else args


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, Mapping):
        return tuple((name, _key(item)) for name, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    return value.__class__, value


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
    body = called.body if isinstance(called, SelectiveRecompute | MicroBatchLoop) else called
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
        if node.op == "call_module" and not bodies:
            yield _ModuleCall(node, module.get_submodule(str(node.target)))


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
    traced = _placeholders(given.graph.exported.graph_module.graph)
    keys = ["key"] if emitted.draws else []
    early = [f"early_{number}" for number in range(len(emitted.ends.early))]
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
    late = [place for places, _ in given.emitted.ends.late for place in places]
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
    after = [one for _, one in ends.late]
    for name, reshards in (*((call.node.name, call.reshards) for call in given.calls), ("ends", (*ends.early, *after))):
        for one in reshards:
            ways = (one.forward, one.reshard.forward), (one.backward, one.reshard.backward)
            for local, step in (pair for bound, steps in ways for pair in zip(bound, steps, strict=True)):
                if step.local:
                    continue
                group = given.groups.of(step.axes)
                if (local.group, local.ranks) != (group.name, len(group.members)):
                    yield f"{name}: {step} runs in the group {local.group!r} of {local.ranks} ranks"


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
    generated.update(one.reshard for one in (*ends.early, *(one for _, one in ends.late)))
    if ends.before is not None:
        # The graph before may share local reshards with the graph itself.
        moved = Counter(one.reshard for call in _calls(ends.before) for one in call.reshards)
        generated.update({reshard: count for reshard, count in moved.items() if generated[reshard] < planned[reshard]})
    if given.assignment.pipelining is not None:
        # A stage has the reshards of its parts; one that follows from inputs alone stands in several parts.
        yield from (f"{reshard}: not planned, generated" for reshard in generated if reshard not in planned)
        return
    # A result that adds up several sums is sent as one.
    joined = {one.reshard for _, one in ends.late}
    for reshard in {**planned, **generated}:
        fewest = 1 if reshard in joined else planned[reshard]
        if not fewest <= generated[reshard] <= planned[reshard]:
            yield f"{reshard}: planned {planned[reshard]} times, generated {generated[reshard]} times"
    messages = Counter(name for name, op in plan.ops.items() for one in op.inside if one.ways)
    lowered = Counter(
        call.module.split.node.name
        for call in given.calls
        if isinstance(call.module, LoweredOpModule)
        for message in call.module.split.messages()
        if message.reshard.forward or message.reshard.backward
    )
    if messages != lowered:
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
    Invariant("no dead collective", "something reads what a collective gives", _unused_collectives),
    Invariant("reshards", "each planned reshard stands in the graph once, and no other does", _reshards_unlike_plan),
    Invariant("local shapes", "values have the local shapes of their shardings", _shapes_unlike_shardings),
)
