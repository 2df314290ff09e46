"""Memory of one rank: footprints of its ops, and the storages alive at the current point of a simulated step.

A footprint has saved operands, temporaries, and gradients that are passed on. Most ops have a share of the whole op's
footprint. A lowered op, with collectives inside, runs other ops: its lowering runs on fake tensors to find them.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from math import prod
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node

from autopar.cost.compute.op_time import local_bytes, longest_of, share_of
from autopar.cost.lowered_step import LoweredStep, Version
from autopar.cost.memory.version_uses import last_uses
from autopar.ir.analysis.op_memory import Footprint, fake_input, measure
from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode
from autopar.mesh import SubMesh
from autopar.rules.call import arguments_by_name, takes_tensors
from autopar.rules.ops.documents import DOCUMENT_ATTENTION
from autopar.rules.ops.folded import FOLDED_ATTENTION
from autopar.rules.ops.loss_pieces import LINEAR_CROSS_ENTROPY
from autopar.rules.shard_call.local_call import FactorSlice, LocalCall, call_by_name
from autopar.sharding.assignment import OpAssignment
from autopar.sharding.buckets import Bucket, buffers_of, shape_of
from autopar.sharding.lowered_ops import LoweredOpContext
from autopar.sharding.lowered_ops.base import OpMessage, Send
from autopar.sharding.lowered_ops.ring_attention import RingPass
from autopar.sharding.reshard.reshard import Reshard, Step, StepKind
from autopar.sharding.reshard_insertion import InsertedReshard, OpReshards
from autopar.sharding.sharding import Sharding, atoms_of

# Ops whose memory is no share of that of the whole op: gradients of all keys, logits of some rows.
OF_LOCAL_SHAPES = (str(FOLDED_ATTENTION), str(DOCUMENT_ATTENTION), str(LINEAR_CROSS_ENTROPY))


class LocalFootprints:
    """Footprints of the ops of a plan on one rank; those of equal ops are computed once for all stages."""

    def __init__(self, step: LoweredStep) -> None:
        self.graph, self.plan, self.reshard_plan = step.graph, step.plan, step.reshard_plan
        # By op, and by what equal ops share.
        self.known = step.footprints

    def of(self, node: NamedNode) -> Footprint:
        found = self.known.get(node.name)
        if found is None:
            op_assignment = self.plan.assignment.ops[node.name]
            key = id(self.graph.footprints[node.node]), op_assignment.choice, op_assignment.operands
            found = self.known.get(key)
            if found is None:
                lowered_op = self.reshard_plan.ops[node.name].split
                found = local_footprint(self.graph, node, op_assignment, lowered_op, self.plan.axes)
            self.known[key] = self.known[node.name] = found
        return found


def local_footprint(
    graph: NamedGraph,
    node: NamedNode,
    op_assignment: OpAssignment,
    lowered_op: LoweredOpContext | None,
    axes: SubMesh,
) -> Footprint:
    """Return the footprint of an op on one rank."""
    if lowered_op is not None:
        # Window ops with halos run unchanged, on their shard joined with its neighbours' edges.
        kinds = {step.kind for message in lowered_op.messages() for step in message.reshard.forward}
        lowered_op = None if StepKind.HALO_EXCHANGE in kinds else lowered_op
    if lowered_op is not None or node.op in OF_LOCAL_SHAPES:
        key = _measured_key(graph, node, op_assignment, lowered_op, axes)
        found = graph.local_footprints.get(key)
        if found is None:
            if lowered_op is None:
                found = _local_shapes_footprint(graph, node, op_assignment, axes)
            else:
                found = _lowered_footprint(graph, node, op_assignment, lowered_op, axes)
            graph.local_footprints[key] = found
        return found
    whole = graph.footprints[node.node]
    share = share_of(node, op_assignment.choice, axes)
    return replace(
        whole,
        internal_bytes=round(whole.internal_bytes * share),
        forward_bytes=round(whole.forward_bytes * share),
        backward_bytes=round(whole.backward_bytes * share),
    )


def _measured_key(
    graph: NamedGraph,
    node: NamedNode,
    op_assignment: OpAssignment,
    lowered_op: LoweredOpContext | None,
    axes: SubMesh,
) -> Hashable:
    """Return what a measured footprint depends on: sizes of shards and messages, not the names of axes."""
    shapes = tuple(
        None if name is None else _operand_shape(graph, name, op_assignment, i, axes)
        for i, name in enumerate(node.operands)
    )
    called = id(graph.footprints[node.node]), shapes
    if lowered_op is None:
        return called
    messages = tuple(
        (type(one), one.itemsize, one.differentiable, _sizes_of(one.reshard)) for one in lowered_op.messages()
    )
    splits = tuple((site, tuple(axes[axis] for axis in used)) for site, used in lowered_op.splits)
    factors = tuple((factor, tuple(axes[axis] for axis in used)) for factor, used in lowered_op.factors.items())
    return called, lowered_op.lowering, splits, factors, messages


def _sizes_of(one: Reshard) -> Hashable:
    return tuple(one.atoms.fold(end.largest_sizes(one.atoms, one.axes)) for end in (one.source, one.target))


def _local_shapes_footprint(
    graph: NamedGraph, node: NamedNode, op_assignment: OpAssignment, axes: SubMesh
) -> Footprint:
    """Run an op on fake tensors of one rank and return its footprint."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        operands, target, arguments = _call_on_rank(graph, node, op_assignment, axes, "cpu")
        return measure(operands, lambda: call_by_name(target, arguments))


def _call_on_rank(
    graph: NamedGraph, node: NamedNode, op_assignment: OpAssignment, axes: SubMesh, device: str
) -> tuple[list[Tensor | None], Any, dict[str, Any]]:
    """Return the operands of an op on one rank, without memory, the op, and its arguments with them."""
    source = next(found for found in graph.exported.graph_module.graph.nodes if found.name == node.node)
    target: Any = source.target
    operands = [
        None if name is None else _operand(graph, name, op_assignment, i, axes, device)
        for i, name in enumerate(node.operands)
    ]
    left = iter(operands)
    arguments = arguments_by_name(target, source.args, source.kwargs)
    for name, is_list in takes_tensors(target).items():
        value = arguments[name]
        if is_list:
            arguments[name] = None if value is None else [_argument(item, next(left)) for item in value]
        else:
            arguments[name] = _argument(value, next(left))
    return operands, target, arguments


def _lowered_footprint(
    graph: NamedGraph, node: NamedNode, op_assignment: OpAssignment, lowered_op: LoweredOpContext, axes: SubMesh
) -> Footprint:
    """Run the lowering of an op on meta tensors of one rank and return its footprint in bytes.

    Its ops save the same on a meta device as on others. Fake tensors take four times as long.
    """
    operands, target, arguments = _call_on_rank(graph, node, op_assignment, axes, "meta")
    # The first rank has the largest slice of each factor.
    lengths = dict(node.sizes)
    for site, used in op_assignment.choice.splits:
        if site[0] in lengths:
            lengths[site[0]] = longest_of(node, site, used, axes, lengths[site[0]])
    slices = {factor: FactorSlice(factor, 0, 0, length, node.sizes[factor]) for factor, length in lengths.items()}
    sizes = {factor: length for factor, length in lengths.items() if factor not in lowered_op.factors}
    local = LocalCall(target, arguments, node.rule, dict(node.sizes), {**node.sizes, **sizes})
    sends = tuple(map(_fake_send, lowered_op.messages()))
    return measure(operands, lambda: lowered_op.lowering.run(lowered_op, local, slices, sends))


def _operand(
    graph: NamedGraph, name: str, op_assignment: OpAssignment, position: int, axes: SubMesh, device: str
) -> Tensor:
    tensor, shape = graph.tensors[name], _operand_shape(graph, name, op_assignment, position, axes)
    return fake_input(shape, tensor.dtype, tensor.requires_grad, device=device)


def _operand_shape(
    graph: NamedGraph, name: str, op_assignment: OpAssignment, position: int, axes: SubMesh
) -> tuple[int, ...]:
    tensor, layout = graph.tensors[name], op_assignment.operands[position]
    atoms = atoms_of(tensor)
    return tensor.shape if layout is None else atoms.fold(layout.largest_sizes(atoms, axes))


def _argument(value: Any, operand: Tensor | None) -> Any:
    return operand if isinstance(value, Node) else value


class _FakeRing:
    """Ring of keys that sends nothing; it holds each message until a hop has ended, as a library does."""

    place = 0
    # The first hop, those in which keys and gradients pass, and the last one.
    most_places = 4

    def __init__(self) -> None:
        # Messages that are sent, by the number of the object that is received.
        self.sent: dict[int, Tensor] = {}

    def begin(self, message: Tensor, received: int) -> Tensor:
        begun = message.new_empty(received)
        self.sent[id(begun)] = message
        return begun

    def end(self, message: Tensor) -> Tensor:
        del self.sent[id(message)]
        return message


def _fake_send(message: OpMessage) -> Send | _FakeRing:
    """Return a function with the shapes of a message, and its gradient, that sends nothing."""
    if isinstance(message, RingPass):
        return _FakeRing()
    found = message.reshard
    shape = found.atoms.fold(found.target.largest_sizes(found.atoms, found.axes))

    def send(x: Tensor) -> Tensor:
        if not message.differentiable:
            return x.detach().new_empty(shape)
        received: Tensor = _Received.apply(x, shape)  # type: ignore[no-untyped-call]
        return received

    return send


class _Received(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        ctx.shape = x.shape
        return x.new_empty(shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.new_empty(ctx.shape), None


# -- live state --------------------------------------------------------------------------------------------------------


class Storages:
    """Bytes of storages with reference counts, now and at the peak; a storage dies with its last reference."""

    def __init__(self) -> None:
        self.sizes: list[float] = []
        self.references: list[int] = []
        self.live = 0.0
        self.peak = 0.0
        self.peak_at = ""
        # Name of the current moment, and the most bytes alive in each moment so far.
        self.now = ""
        self.moments: dict[str, float] = {}

    def new(self, size: float) -> int:
        """Return a storage with one reference."""
        self.sizes.append(size)
        self.references.append(1)
        self.live += size
        self.touch()
        return len(self.sizes) - 1

    def touch(self, more: float = 0.0) -> None:
        """Record the bytes alive now, with `more` for temporaries that die at once."""
        total = self.live + more
        self.moments[self.now] = max(total, self.moments.get(self.now, 0.0))
        if total > self.peak:
            self.peak, self.peak_at = total, self.now

    def take(self, storage: int) -> int:
        """Add a reference to a storage and return the storage."""
        assert self.references[storage] > 0, f"storage {storage} is freed ({self.now})"
        self.references[storage] += 1
        return storage

    def drop(self, storage: int) -> None:
        """Remove a reference."""
        assert self.references[storage] > 0, f"storage {storage} is freed ({self.now})"
        self.references[storage] -= 1
        if not self.references[storage]:
            self.live -= self.sizes[storage]

    def alone(self, storage: int) -> bool:
        """Return True for a storage with one reference."""
        return self.references[storage] == 1


class LiveState:
    """Storages of one micro-batch: values, gradients, saved tensors and buffers of buckets."""

    def __init__(self, step: LoweredStep) -> None:
        self.graph, self.plan, self.reshard_plan = step.graph, step.plan, step.reshard_plan
        self.call = step.call
        # What other stages of a pipeline have takes no memory here.
        self.has = step.has
        self.received = () if step.stage is None else step.received
        self.nodes, self.runs = step.nodes_here, step.ops_here
        # Values of other stages and for them: a stage keeps them until their gradients have gone or come.
        self.crossing = (
            frozenset() if step.stage is None else step.tensors_here.intersection(map(itemgetter(0), step.crossing))
        )
        self.recomputed = step.recomputed
        self.precision = self.plan.options.precision
        # True where gradients are added to those of earlier micro-batches.
        self.accumulates = self.plan.options.micro_batches > 1
        self.footprints = LocalFootprints(step)
        self.elsewhere = self._elsewhere(step)
        own = [node for node in self.nodes if node.name in self.runs]
        self.last = last_uses(own, self.reshard_plan, self.elsewhere)
        # Versions by the op that uses them last.
        self.ends: dict[str, list[Version]] = {}
        self.last.update(((name, self.plan.assignment.values[name]), "") for name in self.crossing)
        for version, op in self.last.items():
            self.ends.setdefault(op, []).append(version)
        self.layers = step.layers if step.recomputed else {}
        # Layers under a checkpoint, which keeps its inputs until the backward has left it.
        self.whole = {layer for layer, mode in self.layers.values() if mode == "full"}
        # Recomputed ops whose operands must be kept for the recompute.
        self.reading = step.reading
        self.schedule = step.schedule
        # Versions that come out of buckets or from other stages.
        self.given = {one.version for one in self.received}.union(self.schedule.versions)
        self.sizes: dict[Version, float] = {}
        self.storages = Storages()
        self.values: dict[Version, int] = {}
        self.gradients: dict[Version, int] = {}
        # Inputs, parameters and buffers of the module.
        self.inputs: dict[Version, int] = {}
        # Copies of parameters, and parts of gradient buffers, that live for the whole step.
        self.copied: dict[str, int] = {}
        self.sums: dict[str, int] = {}
        # Buffers of buckets whose gather has started.
        self.flat: dict[Bucket, int] = {}
        # Results of a call with micro-batches, which last until its end.
        self.results_bytes = 0.0
        self.saved: dict[str, list[int]] = {}
        # By layer: the op and the storage of saved tensors that the recompute makes again.
        self.lost: dict[int, list[tuple[str, int]]] = {}
        # By layer: storages kept as its inputs, and storages made by its recomputed ops.
        self.entering: dict[int, set[int]] = {}
        self.made: dict[int, set[int]] = {}
        # By layer: parameters that it regathers itself, by bucket.
        self.gathered: dict[int, list[list[int]]] = {}

    def _elsewhere(self, step: LoweredStep) -> dict[str, list[InsertedReshard]]:
        """Return the reshards that the graph has before ops of other stages, by the first op here that needs them."""
        left: dict[Version, InsertedReshard] = {}
        for name in () if step.stage is None else step.tensors_here.union(tied.version[0] for tied in step.received):
            others = (one for op, one in step.resharded.get(name, ()) if op not in self.runs)
            left.update(((one.tensor, one.target), one) for one in others if self.has((one.tensor, one.target)))
        found: dict[str, list[InsertedReshard]] = {}
        for node in self.nodes if left else ():
            for version in self.reshard_plan.ops[node.name].operands if node.name in self.runs else ():
                if version in left:
                    found.setdefault(node.name, []).append(left.pop(version))
        return found

    def _bytes(self, version: Version) -> float:
        found = self.sizes.get(version)
        if found is None:
            size = local_bytes(self.graph, *version, self.plan.axes) if self.has(version) else 0.0
            found = self.sizes[version] = float(size)
        return found

    def _bytes_in(self, version: Version, dtype: torch.dtype) -> float:
        """Return the bytes of a version in another dtype than that of the compute."""
        return self._bytes(version) / self.graph.tensors[version[0]].dtype.itemsize * dtype.itemsize

    def _before(self, node: NamedNode) -> list[InsertedReshard]:
        """Return the reshards before an op that no bucket joins, also those that an op of another stage needs first.

        A received value was resharded on the stage that sent it.
        """
        every = (*self.elsewhere.get(node.name, ()), *self.reshard_plan.ops[node.name].before)
        return [one for one in every if (one.tensor, one.target) not in self.given]

    def _halo_copies(self, reshards: OpReshards) -> dict[int, int]:
        """Return the copy of the first operand with its neighbours' edges, where the op exchanges halos."""
        kinds = {step.kind for one in reshards.inside for step in one.reshard.forward}
        place = reshards.operands[0] if reshards.operands else None
        if StepKind.HALO_EXCHANGE not in kinds or place is None:
            return {}
        edges = sum(step.numel * one.itemsize for one in reshards.inside for step in one.reshard.forward)
        return {0: self.storages.new(self._bytes(place) + edges)}

    def _times(self, name: str) -> int:
        """Return how many parts of a tensor a call has: a caller gives and takes those of all micro-batches."""
        if self.call is None:
            return 1
        return max(1, prod(self.call.tensors[name].shape) // max(1, prod(self.graph.tensors[name].shape)))

    def _trains(self, node: NamedNode) -> bool:
        return self.graph.trains(node) and self.graph.exported.grad_enabled

    def _layer(self, node: NamedNode) -> int:
        return self.layers.get(node.name, (0, "none"))[0]

    def _keep_entering(self, node: NamedNode, reshards: OpReshards) -> None:
        """Keep the operands that the recomputation of a layer begins from, also for ops that train nothing."""
        if node.name not in self.reading:
            return
        layer = self._layer(node)
        inside, entering = self.made.get(layer, set()), self.entering.setdefault(layer, set())
        for version in reshards.operands:
            # Of gathered parameters, only a checkpoint keeps a reference, and not to regathered ones.
            gathered = version in self.schedule.versions
            if version is None or (gathered and (layer not in self.whole or version[0] in self.plan.regather)):
                continue
            storage = self.values[version]
            if storage not in inside and storage not in entering:
                entering.add(self.storages.take(storage))

    def _defers_reduction(self, name: str) -> bool:
        """Return True for a gradient that is reduced in the last micro-batch only."""
        return self.plan.options.micro_batches > 1 and name in self.plan.defer_reduction

    def _steps(self, source: int, steps: tuple[Step, ...], one: InsertedReshard) -> int:
        """Return the result of reshard steps; the caller keeps its reference to the source."""
        now = self.storages.take(source)
        share = float(self.has((one.tensor, one.target)))
        for step in steps:
            after = self.storages.new(share * prod(shape_of(one, step.after)) * one.itemsize)
            self.storages.touch(share * buffers_of(step, one))
            self.storages.drop(now)
            now = after
        return now

    def _sent_bytes(self, one: InsertedReshard, sharding: Sharding) -> float:
        """Return the bytes of a parameter in the dtype in which it is gathered."""
        share = one.itemsize_in("forward", self.graph, self.precision) / one.itemsize
        return share * self._bytes((one.tensor, sharding))

    def _start_gather(self, bucket: Bucket) -> int:
        """Return the buffer of a bucket; the shards are copied into one piece for the gather."""
        flat = self.storages.new(sum(self._sent_bytes(one, one.target) for one in bucket.members))
        self.storages.touch(sum(self._sent_bytes(one, one.source) for one in bucket.members))
        return flat
