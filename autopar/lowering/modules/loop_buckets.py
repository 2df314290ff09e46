"""Buckets of parameters that a loop over micro-batches gathers and reduces itself, beside its compute.

The gathers of all buckets begin before the first micro-batch; each is waited for before the first op that reads it. The
reduction of a bucket begins when the last backward that reads it has ended. Within that backward it begins once the
gradients of its parameters are there. Where the chunks of a pipeline interleave, it waits until the first stage is as
far (`reductions_after`). It is waited for after all micro-batches.

The backwards run with gradients that are expected, up to a common factor. A sum over ranks times a factor is the sum of
the products, so a reduction needs no factor. Reductions wait for the backward of the module where this does not hold:
each rank has a factor of its own (results of each rank alone), numbers are too small or too large without it (float16),
or gradients of earlier backwards are added (`no_sync`).

All members of a process group begin the same collectives in one order. They run one stage, so they have the same tasks
in the same order, and the same buckets. Reductions begin in the order of `closing`: by task, then by bucket. A bucket
does not overtake another one within a backward, whatever order autograd takes there. It begins after the backward if
the graph of the task sends over the same axes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from autopar.lowering.collectives.level_groups import LevelChain
from autopar.lowering.collectives.local_steps import finish
from autopar.lowering.modules.bucket import BucketState, begin_steps, locally, waited
from autopar.lowering.modules.bucket_ends import with_unsent
from autopar.lowering.modules.float8_weights import CastWeights
from autopar.lowering.modules.run_state import RUN_STATE
from autopar.sharding.options import sum_dtype
from autopar.sharding.schedules import StageTask

__all__ = ["BucketPass", "ClosingBucket", "LoopBucket", "LoopBuckets", "with_arrivals"]

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _untraced(method: _Method) -> _Method:
    """Exclude a method from tracing: a compiler takes the bodies of the loop, and nothing that sends around them.

    Collectives that begin in one of its graphs and end in another, or work in place, would give values too early.
    """
    return torch.compiler.disable(method)  # type: ignore[no-untyped-call, no-any-return]


@dataclass(eq=False)
class LoopBucket:
    """Bucket that one loop alone reads, which takes its parameters as they are stored."""

    state: BucketState
    # Places of its parameters among the inputs of the loop.
    places: tuple[int, ...]
    notes: tuple[str, ...] = ()
    # Leaves without a value yet, their stored tensors, the pieces that are on their way, and who learns of the values.
    _coming: tuple[list[Tensor], Sequence[Tensor], Sequence[Tensor], CastWeights] | None = field(
        default=None, metadata=RUN_STATE
    )

    @property
    def gathers(self) -> bool:
        return bool(self.state.bucket.forward)

    @property
    def axes(self) -> set[frozenset[str]]:
        """Axes of its reductions."""
        conversions = self.state.bucket.conversions
        return {frozenset(step.axes) for one in conversions for step in one.reshard.backward if not step.local}

    @_untraced
    def leaves(self, stored: Sequence[Tensor], casts: CastWeights) -> list[Tensor]:
        """Begin to gather the parameters; return leaves, which have their values after `arrive`."""
        bucket, handling = self.state.bucket, self.state.bucket.handling
        self._coming, pieces = None, None
        found = self.state.kept(stored) if handling.lasting else None
        with torch.no_grad():
            if found is None and bucket.forward:
                pieces = bucket.begin(stored)
                # All elements of a leaf are one until it has a value.
                empty = stored[0].new_empty((), dtype=handling.used)
                found = [empty.expand(one.result_shape) for one in bucket.conversions]
            elif found is None:
                pairs = zip(stored, bucket.conversions, strict=True)
                found = [locally(one.forward, x.to(handling.used), one.result_shape) for x, one in pairs]
            leaves = [x.detach() for x in found]
        if pieces is None:
            casts.add(leaves)
        else:
            self._coming = leaves, stored, pieces, casts
        return [leaf.requires_grad_(x.requires_grad) for leaf, x in zip(leaves, stored, strict=True)]

    @_untraced
    def arrive(self) -> None:
        """Wait for the parameters, once."""
        if self._coming is None:
            return
        (leaves, stored, pieces, casts), self._coming = self._coming, None
        with torch.no_grad():
            found = self.state.bucket.finished(waited(pieces))
        for leaf, value in zip(leaves, found, strict=True):
            leaf.data = value
        casts.add(leaves)
        if self.state.bucket.handling.lasting and not self.state.synchronisation.enabled:
            self.state.keep(stored, found)


class _Arrival(nn.Module):
    """Wait for the parameters of a bucket."""

    def __init__(self, bucket: LoopBucket) -> None:
        super().__init__()
        self.bucket = bucket

    def forward(self) -> None:
        self.bucket.arrive()


def with_arrivals(body: GraphModule, reads: Mapping[LoopBucket, Sequence[int]]) -> GraphModule:
    """Return a body for the first micro-batch, which waits for each bucket before the first op that reads it.

    `reads` has the places of the parameters among the placeholders of the body.
    """
    gathered = {bucket: places for bucket, places in reads.items() if bucket.gathers and places}
    if not gathered:
        return body
    graph = Graph()
    graph.output(graph.graph_copy(body.graph, {}))
    placeholders = graph.find_nodes(op="placeholder")
    modules: dict[str, Any] = {}
    for node in graph.nodes:
        if node.op in ("call_module", "get_attr"):
            modules[str(node.target)] = _named(body, str(node.target))
    order: dict[Node, int] = {node: place for place, node in enumerate(graph.nodes)}
    for number, (bucket, places) in enumerate(gathered.items()):
        users = [user for place in places for user in placeholders[place].users]
        modules[f"arrival_{number}"] = _Arrival(bucket)
        with graph.inserting_before(min(users, key=order.__getitem__)):
            graph.call_module(f"arrival_{number}")
    return GraphModule(modules, graph)


def _named(module: nn.Module, path: str) -> Any:
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name)
    return found


# -- reductions --------------------------------------------------------------------------------------------------------


class _Reduction:
    """Reduction of the gradients of a bucket that has begun; None stands for no gradient."""

    @_untraced
    def __init__(self, state: BucketState, gradients: Sequence[Tensor | None]) -> None:
        bucket, handling = state.bucket, state.bucket.handling
        self.count, self.stored = len(gradients), handling.stored
        self.here = [i for i, gradient in enumerate(gradients) if gradient is not None]
        given = [gradient for gradient in gradients if gradient is not None]
        self.ones = [bucket.conversions[i] for i in self.here]
        self.is_sum = bucket.is_sum and len(given) == self.count
        self.sends = bool(bucket.backward) and bool(given)
        self.synchronisation = state.synchronisation
        self.chain: LevelChain | None = None
        # What is on its way, then the gradients.
        self.values: list[Tensor]
        self.pieces: Sequence[Tensor] = ()
        if self.is_sum:
            flat = None if state.buffer is None else _joined(given, state.buffer)
            if flat is None:
                flat = torch.cat([x.reshape(-1) for x in given], out=state.free_buffer(given[0], handling.reduced))
            move = bucket.backward[0][0]
            level = None if flat.is_complex() else move.level_of(flat.nbytes)
            if level is None:
                torch.ops._c10d_functional.all_reduce_(flat.detach(), "sum", move.group)
            else:
                self.chain = state.synchronisation.begin_by_level(flat, level)
            # Views: other tensors of this memory keep the buffer in use.
            self.values = list(torch._C._nn.unflatten_dense_tensors(flat, given))
            self.pieces = (flat,)
        elif self.sends:
            steps = tuple(tuple(step[i] for i in self.here) for step in bucket.backward)
            self.pieces = begin_steps(steps, [x.to(handling.reduced) for x in given])
        else:
            pairs = zip(self.ones, given, strict=True)
            self.values = [locally(one.backward, x.to(handling.reduced), one.shape) for one, x in pairs]

    @_untraced
    def wait(self) -> None:
        """Wait for the gradients, once."""
        pieces, self.pieces = self.pieces, ()
        if not pieces:
            return
        if self.chain is not None:
            self.synchronisation.complete(self.chain)
        waited(pieces)
        if not self.is_sum:
            pairs = zip(self.ones, pieces, strict=True)
            self.values = [finish(one.backward[-1], piece).reshape(one.shape) for one, piece in pairs]

    @_untraced
    def gradients(self, factor: Tensor | None = None) -> list[Tensor | None]:
        """Return the gradients times a factor, once: their memory goes to the caller."""
        self.wait()
        found: list[Tensor | None] = [None] * self.count
        # Reading the factor would make another device wait.
        if factor is not None and factor.is_cpu and factor == 1:
            factor = None
        for i, value in zip(self.here, self.values, strict=True):
            if factor is not None:
                wide = value.to(torch.promote_types(value.dtype, self.stored))
                value = wide.mul_(factor.to(wide.dtype))
            found[i] = value.to(self.stored)
        self.values = []
        return found


def _joined(gradients: Sequence[Tensor], buffer: Tensor) -> Tensor | None:
    """Return a buffer if it consists of these gradients, in their order; None if it does not."""
    end, memory = 0, buffer.untyped_storage()._cdata
    for x in gradients:
        if x.untyped_storage()._cdata != memory or x.storage_offset() != end or not x.is_contiguous():
            return None
        end += x.numel()
    return buffer if end == buffer.numel() else None


class LeafSums(Protocol):
    """Sums of the gradients of leaves over micro-batches, by place."""

    def use(self, place: int, target: Tensor) -> None:
        """Add up the gradients of one leaf in given memory."""
        ...

    def pop(self, place: int) -> Tensor | None:
        """Return the sum for one leaf, and forget it."""
        ...


@dataclass(frozen=True)
class ClosingBucket:
    """Bucket whose gradients are complete after a task."""

    bucket: LoopBucket
    # Places whose gradients come within the backward of the task; none if the reduction begins after it.
    within: frozenset[int] = frozenset()


@dataclass(frozen=True)
class LoopBuckets:
    """All buckets of a loop, in the order of their first use."""

    every: tuple[LoopBucket, ...] = ()
    # Buckets that are complete after a task, in the order in which their reductions begin.
    closing: Mapping[StageTask, tuple[ClosingBucket, ...]] = field(default_factory=dict)
    # True if all ranks multiply their gradients by one factor.
    is_common: bool = True

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(note for bucket in self.every for note in bucket.notes)


class BucketPass:
    """Parameters of one pass over the micro-batches: their leaves, and the reductions of their gradients."""

    @_untraced
    def __init__(self, buckets: LoopBuckets, inputs: Sequence[Tensor], is_synchronised: bool | None = None) -> None:
        self.buckets = buckets
        # Decided at the forward, also for reductions that begin in the backward.
        self.is_synchronised = (
            all(bucket.state.synchronisation.enabled for bucket in buckets.every)
            if is_synchronised is None
            else is_synchronised
        )
        # The inputs, with leaves for the parameters of buckets.
        self.inputs: list[Tensor] = list(inputs)
        self.own: set[int] = set()
        self.casts = CastWeights()
        for bucket in buckets.every:
            leaves = bucket.leaves([inputs[place] for place in bucket.places], self.casts)
            self.own.update(bucket.places)
            for place, leaf in zip(bucket.places, leaves, strict=True):
                self.inputs[place] = leaf
        self.casts.add(x for place, x in enumerate(self.inputs) if place not in self.own)
        self.sums: LeafSums | None = None
        self.early: set[LoopBucket] = set()
        self.reductions: dict[LoopBucket, _Reduction] = {}
        # In the last backward of some buckets: those, and the places without their gradients.
        self._waiting: list[ClosingBucket] = []
        self._missing: set[int] = set()

    @_untraced
    def leaves(self) -> list[Tensor]:
        """Return all inputs as leaves of the graphs of the micro-batches."""
        pairs = enumerate(self.inputs)
        return [x if place in self.own else x.detach().requires_grad_(x.requires_grad) for place, x in pairs]

    @_untraced
    def arrive(self, place: int | None = None) -> None:
        """Wait for all parameters, or for that of one place and its bucket."""
        for bucket in self.buckets.every:
            if place is None or place in bucket.places:
                bucket.arrive()

    # -- reductions

    @_untraced
    def reduce(self, sums: LeafSums, is_float16: bool = False, is_final: bool = False) -> None:
        """Take gradients from these sums as soon as they are complete; `is_final`: no factor comes after."""
        self.sums, self.reductions = sums, {}
        self.early = {one for one in self.buckets.every if is_final or self._is_early(one, is_float16)}
        closing = {one.bucket for ones in self.buckets.closing.values() for one in ones}
        for bucket in self.early & closing:
            if bucket.state.bucket.is_sum:
                self._sum_in_buffer(bucket, sums)

    def _sum_in_buffer(self, bucket: LoopBucket, sums: LeafSums) -> None:
        """Let the gradients of a bucket add up in the buffer that is reduced."""
        leaves, reduced = [self.inputs[place] for place in bucket.places], bucket.state.bucket.handling.reduced
        if all(x.requires_grad and sum_dtype(x.dtype) == reduced for x in leaves):
            # Of the shapes of the leaves, which may have no values yet.
            parts = torch._C._nn.unflatten_dense_tensors(bucket.state.free_buffer(leaves[0], reduced), leaves)
            for place, part in zip(bucket.places, parts, strict=True):
                sums.use(place, part)

    def _is_early(self, bucket: LoopBucket, is_float16: bool) -> bool:
        handling = bucket.state.bucket.handling
        waits = handling.deferred and (not self.is_synchronised or bool(bucket.state.unsent))
        return self.buckets.is_common and not waits and not is_float16 and handling.reduced != torch.float16

    @contextmanager
    def closing(self, task: StageTask) -> Iterator[None]:
        """Begin the reductions of buckets that a task completes, each as soon as its gradients are there."""
        self._waiting = [one for one in self.buckets.closing.get(task, ()) if one.bucket in self.early]
        if not self._waiting:
            yield
            return
        self._missing = {place for one in self._waiting for place in one.within if self.inputs[place].requires_grad}
        handles = [
            self.inputs[place].register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _, place=place: self.added(place)
            )
            for place in self._missing
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        for one in self._waiting:
            self._begin(one.bucket)
        self._waiting = []

    @_untraced
    def added(self, place: int) -> None:
        """Note that the last gradient of a parameter is there; begin the reductions that waited for it."""
        if place not in self._missing:
            return
        self._missing.discard(place)
        while self._waiting and self._waiting[0].within and self._missing.isdisjoint(self._waiting[0].within):
            self._begin(self._waiting.pop(0).bucket)

    @_untraced
    def _begin(self, bucket: LoopBucket) -> None:
        assert self.sums is not None, "it records gradients"
        gradients: Sequence[Tensor | None] = [self.sums.pop(place) for place in bucket.places]
        if bucket.state.bucket.handling.deferred:
            gradients = with_unsent(bucket.state, gradients, self.is_synchronised)
        self.reductions[bucket] = _Reduction(bucket.state, gradients)

    @_untraced
    def finish(self) -> None:
        """Begin the reductions that no task has begun, and wait for all."""
        for bucket in self._order():
            if bucket in self.early and bucket not in self.reductions:
                self._begin(bucket)
        for reduction in self.reductions.values():
            reduction.wait()
        self.casts = CastWeights()

    def _order(self) -> Iterable[LoopBucket]:
        """Return all buckets in the order of the backward."""
        return reversed(self.buckets.every)

    @_untraced
    def handed(self, found: list[Tensor | None], factor: Tensor | None = None) -> list[Tensor | None]:
        """Return the gradients of all inputs, given those of leaves, which have the factor already."""
        late: dict[LoopBucket, _Reduction] = {}
        for bucket in self._order():
            state = bucket.state
            gradients: Sequence[Tensor | None] = [found[place] for place in bucket.places]
            if state.bucket.handling.deferred and (bucket not in self.reductions or self.is_synchronised):
                gradients = with_unsent(state, gradients, self.is_synchronised)
            if bucket not in self.reductions or any(one is not None for one in gradients):
                late[bucket] = _Reduction(state, gradients)
            if self.is_synchronised:
                state.lasting = None  # the optimizer's turn
        for bucket in self.buckets.every:
            parts = [self.reductions[bucket].gradients(factor)] if bucket in self.reductions else []
            parts += [late[bucket].gradients()] if bucket in late else []
            for place, values in zip(bucket.places, zip(*parts, strict=True), strict=True):
                found[place] = _total(values)
        self.reductions = {}
        return found


def _total(values: Iterable[Tensor | None]) -> Tensor | None:
    """Return the sum of gradients, of which some may be missing."""
    total: Tensor | None = None
    for value in values:
        total = value if total is None else total if value is None else total + value
    return total
