"""Replace single reshards of parameters by buckets.

The end of a bucket stands at its first use and not at the start of the forward: autograd runs the latest ops first, so
ends made together would all run at the end of the backward. Buckets that gather start one bucket ahead.

Input::

    w1 = all_gather(w1_shard)
    y = linear(x, w1)
    w2 = all_gather(w2_shard)
    z = linear(y, w2)
Output::

    s = bucket_start(w1_shard, w2_shard)
    w1, w2 = bucket_end(s)
    y = linear(x, w1)
    z = linear(y, w2)
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import torch
from torch import nn
from torch.fx import Graph, Node

from autopar.ir.precision import OWN, Precision
from autopar.ir.values import NamedTensor
from autopar.lowering.collectives.local_reshard import LocalReshard
from autopar.lowering.modules.bucket import BucketCollectives, BucketState, GradientSync, ParameterHandling
from autopar.lowering.modules.bucket_ends import BucketEnd, BucketStart, RegatherRelease, RegatherWatch
from autopar.lowering.modules.micro_loop import MicroBatchLoop
from autopar.lowering.modules.pipeline_loop import PipelineLoop
from autopar.lowering.passes.aliases import readers
from autopar.sharding.buckets import BUCKET_BYTES, block_of, gather_limits, in_buckets
from autopar.sharding.reshard.reshard import goes_in_bucket

__all__ = ["BucketedParameters", "CallGate", "in_a_bucket", "loop_with", "put_in_buckets"]


@dataclass(frozen=True)
class _ReshardedParameter:
    """Reshard of one parameter in the graph."""

    node: Node
    conversion: LocalReshard
    handling: ParameterHandling
    note: str
    block: str
    bytes: int
    # Properties that all reshards of a bucket share.
    kind: tuple[Any, ...]


class CallGate(Protocol):
    """Check that a call passes before its first collective."""

    def check(self) -> None: ...


@dataclass(frozen=True)
class BucketedParameters:
    """Handling of the parameters of a call; parameters without an entry are used as stored."""

    handling: Mapping[str, ParameterHandling] = field(default_factory=dict)
    synchronisation: GradientSync = field(default_factory=GradientSync)
    gate: CallGate | None = None
    # True if the owner of the parameters waits for their gradients.
    awaited: bool = False
    # Says which linears multiply in float8.
    precision: Precision = OWN

    def of(self, tensor: NamedTensor) -> ParameterHandling:
        found = self.handling.get(tensor.name)
        return ParameterHandling(tensor.dtype, tensor.dtype, tensor.dtype) if found is None else found


def put_in_buckets(
    graph: Graph,
    modules: dict[str, nn.Module],
    tensors: Mapping[str, NamedTensor],
    parameters: BucketedParameters,
    in_bodies: Collection[str] = (),
    limit_bytes: int = BUCKET_BYTES,
) -> dict[str, int]:
    """Replace single reshards of parameters by buckets, in place; `tensors` are those of the placeholders.

    `in_bodies` has the placeholders that bodies of loops read in buckets of their own. Return the bytes that are summed
    together with the gradient of each parameter.
    """
    sums: dict[str, int] = {}
    found = [one for node in graph.nodes if (one := _reshard_of(node, modules, tensors, parameters)) is not None]
    beginning = next((node for node in graph.nodes if node.op != "placeholder"), None)
    ends: list[Node] = []
    before: BucketState | None = None
    for number, members in enumerate(_in_order(graph, tensors, found, limit_bytes)):
        bucket = BucketCollectives(tuple(member.conversion for member in members), members[0].handling)
        if bucket.is_sum:
            size = sum(prod(one.conversion.shape) for one in members) * bucket.handling.reduced.itemsize
            sums.update((tensors[str(one.node.args[0])].name, size) for one in members)
        again = bucket.handling.again and bool(bucket.forward)  # a whole parameter has no copy to free
        inputs: tuple[Any, ...] = tuple(member.node.args[0] for member in members)
        # Another reader of a parameter has a gradient of its own, which is added after this one arrives.
        has_start = bool(bucket.forward) or not parameters.awaited or any(len(each.users) > 1 for each in inputs)
        running = BucketState(bucket, parameters.synchronisation, has_start, before if again else None)
        before = running if again else before
        # A gather starts one bucket ahead; buckets without a gather start with the forward.
        ahead = ends[-1] if bucket.forward and ends else members[0].node
        assert beginning is not None, "the graph has conversions"
        what = "_".join(dict.fromkeys(moves[0].kind.value for moves in (*bucket.forward, *bucket.backward)))
        name = f"bucket_{number}_{what}"
        notes = tuple(member.note for member in members)
        modules[f"{name}_end"] = BucketEnd(running, () if has_start else notes)
        started: Any = inputs
        if has_start:
            modules[f"{name}_start"] = BucketStart(running, notes)
            with graph.inserting_before(ahead if bucket.forward else beginning):
                started = graph.call_module(f"{name}_start", inputs)
                beginning = beginning if bucket.forward else started.next
        with graph.inserting_before(members[0].node):
            ended = graph.call_module(f"{name}_end", (started,))
            values = [graph.call_function(operator.getitem, (ended, i)) for i in range(len(members))]
        ends.append(ended)
        for member, value in zip(members, values, strict=True):
            value.meta.update(member.node.meta)
            value.meta.pop("origin", None)  # it belongs to no place of the model
            member.node.replace_all_uses_with(value)
            beginning = value if member.node is beginning else beginning
            graph.erase_node(member.node)
            del modules[str(member.node.target)]
        if again:
            frozen = not any(tensors[str(one)].requires_grad for one in inputs)
            _give_up(graph, modules, name, running, values, frozen)
    _cast(graph, modules, tensors, parameters, in_bodies)
    return sums


def _in_order(
    graph: Graph, tensors: Mapping[str, NamedTensor], found: Iterable[_ReshardedParameter], limit_bytes: int
) -> list[list[_ReshardedParameter]]:
    """Return the buckets of single reshards, in the order of their first ops."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    limits = gather_limits((one for one in tensors.values() if one.kind == "param"), limit_bytes)
    return sorted(in_buckets(found, limits, limit_bytes), key=lambda each: places[each[0].node])


def _give_up(
    graph: Graph, modules: dict[str, nn.Module], name: str, running: BucketState, values: list[Node], frozen: bool
) -> None:
    """Free the gathered copy after its last use, and watch the ops that read it."""
    reading = {node for node in readers(values) if not isinstance(modules.get(str(node.target)), RegatherWatch)}
    if any(reader.op == "output" for reader in reading):
        return
    places = {node: place for place, node in enumerate(graph.nodes)}
    modules[f"{name}_watch"] = RegatherWatch(running)
    modules[f"{name}_release"] = RegatherRelease(running)
    last: Node | None = None
    for reader in sorted(reading, key=places.__getitem__):
        with graph.inserting_after(reader):
            others = _made_operands(reader, {*values, *reading}, modules) if frozen else ()
            last = graph.call_module(f"{name}_watch", (reader, *others))
    if last is not None:
        with graph.inserting_after(last):
            graph.call_module(f"{name}_release")


def _made_operands(reader: Node, known: Collection[Node], modules: Mapping[str, nn.Module]) -> tuple[Node, ...]:
    """Return the operands of an op that are computed anew in each call."""
    source = reader.args[0] if reader.target is operator.getitem else reader
    assert isinstance(source, Node), reader
    parameters = {
        node
        for node in source.all_input_nodes
        if node.target is operator.getitem and isinstance(modules.get(str(node.args[0].target)), BucketEnd)  # type: ignore[union-attr]
    }
    return tuple(
        node
        for node in source.all_input_nodes
        if node.op != "placeholder" and node not in known and node not in parameters
    )


def loop_with(value: Node, modules: Mapping[str, nn.Module]) -> Node | None:
    """Return the loop over micro-batches that can gather a parameter itself: the only reader, which reads it once."""
    loop = next(iter(value.users)) if len(value.users) == 1 else None
    module = None if loop is None or loop.op != "call_module" else modules.get(str(loop.target))
    if loop is None or not isinstance(module, MicroBatchLoop | PipelineLoop) or loop.args.count(value) != 1:
        return None
    # Gradients of shared parameters first add up over the stages.
    is_shared = isinstance(module, PipelineLoop) and loop.args.index(value) in module.shared
    return None if is_shared else loop


def _cast(
    graph: Graph,
    modules: Mapping[str, nn.Module],
    tensors: Mapping[str, NamedTensor],
    parameters: BucketedParameters,
    in_bodies: Collection[str],
) -> None:
    """Cast parameters that are in no bucket before their first use."""
    for node in [node for node in graph.nodes if node.op == "placeholder" and node.name in tensors]:
        tensor = tensors[node.name]
        handling = parameters.of(tensor)
        users = [user for user in node.users if not _casts(user, node, modules, in_bodies)]
        if tensor.kind != "param" or handling.stored == handling.used or not users:
            continue
        with graph.inserting_before(next(each for each in graph.nodes if each in users)):
            cast = graph.call_function(torch.ops.aten.to.dtype, (node, handling.used))
        node.replace_all_uses_with(cast, delete_user_cb=lambda user, users=users: user in users)


def in_a_bucket(graph: Graph, modules: Mapping[str, nn.Module]) -> set[str]:
    """Return the parameters that a graph reads in buckets, which cast them."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    return {node.name for node in placeholders if any(_is_bucket(user, modules) for user in node.users)}


def _is_bucket(node: Node, modules: Mapping[str, nn.Module]) -> bool:
    return isinstance(modules.get(str(node.target)), BucketStart | BucketEnd)


def _casts(user: Node, parameter: Node, modules: Mapping[str, nn.Module], in_bodies: Collection[str]) -> bool:
    """Return whether a reader of a stored parameter casts it: a bucket, or a loop with a bucket in its body."""
    module = modules.get(str(user.target))
    if isinstance(module, PipelineLoop):
        # Other stages get it, or a part of its gradient, in the dtype of its use.
        common = (*module.shared, *(one.place for one in module.tied))
        return parameter.name in in_bodies and user.args.index(parameter) not in common
    if isinstance(module, MicroBatchLoop):
        return parameter.name in in_bodies
    return _is_bucket(user, modules)


def _reshard_of(
    node: Node, modules: Mapping[str, nn.Module], tensors: Mapping[str, NamedTensor], parameters: BucketedParameters
) -> _ReshardedParameter | None:
    conversion = getattr(modules.get(str(node.target)), "conversion", None) if node.op == "call_module" else None
    if not isinstance(conversion, LocalReshard):
        return None
    source = node.args[0]
    tensor = tensors.get(source.name) if isinstance(source, Node) and source.op == "placeholder" else None
    ways = conversion.forward, conversion.backward
    kinds = tuple(tuple(move.kind for move in way) for way in ways)
    if tensor is None or tensor.kind != "param" or not goes_in_bucket(*kinds):
        return None
    # All ranks must build the same buckets, and shards may be uneven: the shards of the first rank decide.
    reshard = conversion.reshard
    axes = reshard.axes
    first = dict.fromkeys(axes, 0)
    largest = [prod(s.before.local_sizes(reshard.atoms, axes, first)) for s in (*reshard.forward, *reshard.backward)]
    if 0 in reshard.atoms.sizes:
        return None
    steps = tuple(tuple((move.kind, move.group, move.ranks) for move in way) for way in ways)
    handling = parameters.of(tensor)
    # A loop over micro-batches takes whole buckets.
    loop = loop_with(node, modules)
    kind = steps, handling, tensor.requires_grad, None if loop is None else loop.name
    size = max(largest) * tensor.dtype.itemsize
    (note,) = modules[str(node.target)].notes  # type: ignore[misc]
    return _ReshardedParameter(node, conversion, handling, note, block_of(tensor.name), size, kind)
