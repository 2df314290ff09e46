"""The two places of a bucket in a step: its start and its end.

At the *start* the tensors are packed and the collective begins. At the *end*, before the first use of a tensor, it is
waited for and unpacked. The backward visits the places in reverse: at the end the gradients are packed and their
collective begins, at the start it is waited for. So a gather overlaps the layers before its own, and a reduction
overlaps the backward of the layers before its own. Gradients come from the starts, so nothing is pending when
`backward()` or `torch.autograd.grad` returns. A bucket without work in the forward has no start if the owner of the
parameters waits for their gradients (`GradientSync.finish`).

Parameters are cast to the compute dtype and gradients to the dtype of their sums. Under `no_sync()` gradients stay
local and are sent with those of the next backward that sends.

A gathered copy may be freed after the forward and gathered again in the backward (`Regathered`).

`torch.compile` orders collectives itself, so both halves run at the end of the bucket. Sums of gradients that need no
further step are left to the owner of the parameters, outside of the compiled graph.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autopar.lowering.collectives.local_reshard import convert
from autopar.lowering.collectives.local_steps import finish
from autopar.lowering.modules.bucket import (
    BucketState,
    Regathered,
    begin_steps,
    is_alone,
    is_view,
    locally,
    sums_begun,
    waited,
)
from autopar.lowering.modules.run_state import RUN_STATE

__all__ = ["BucketEnd", "BucketStart", "RegatherRelease", "RegatherWatch", "with_unsent"]


def start(running: BucketState, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the tensors, followed by the pending pieces that `end` needs."""
    if torch.compiler.is_compiling():
        return tuple(tensors)
    started: tuple[Tensor, ...] = _Start.apply(running, *tensors)  # type: ignore[no-untyped-call]
    return started


@dataclass(eq=False)
class _PreviousEnd:
    """Inputs and results of the previous end of a bucket without work in the forward.

    The bucket does not hold them: their node of autograd holds the bucket, and Python cannot free such a ring.
    """

    started: tuple[Tensor, ...] | None = field(default=None, metadata=RUN_STATE)
    found: tuple[Tensor, ...] = field(default=(), metadata=RUN_STATE)


def end(running: BucketState, started: Sequence[Tensor], previous: _PreviousEnd) -> tuple[Tensor, ...]:
    if running.has_start or not running.bucket.is_idle or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return _ended(running, started)
    # It saves nothing for a backward, so one piece of graph serves all calls with the same tensors.
    if previous.started is not None and all(map(operator.is_, started, previous.started)):
        node = next((x.grad_fn for x in previous.found if x.grad_fn is not None), None)
        if node is not None:
            node._set_sequence_nr(torch._C._autograd._get_sequence_nr())  # type: ignore[attr-defined]  # as if made now
        return previous.found
    previous.started, previous.found = tuple(started), _ended(running, started)
    return previous.found


def _ended(running: BucketState, started: Sequence[Tensor]) -> tuple[Tensor, ...]:
    ended: tuple[Tensor, ...] = _End.apply(running, *started)  # type: ignore[no-untyped-call]
    return ended


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, running: BucketState, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        same = tuple(x.view_as(x) for x in tensors)
        bucket = running.bucket
        if not bucket.forward or (bucket.handling.lasting and running.kept(tensors) is not None):
            return same
        pieces = bucket.begin(tensors)
        ctx.mark_non_differentiable(*pieces)
        return (*same, *pieces)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        given = gradients[: len(ctx.needs_input_grad) - 1]
        if not torch.is_grad_enabled():
            waited(given)
        return (None, *given)


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, running: BucketState, *started: Tensor) -> tuple[Tensor, ...]:
        # Outside of a loop over micro-batches, a parameter may have been cast before.
        ctx.running, ctx.count, ctx.again, ctx.stored = running, len(started), None, started[0].dtype
        ctx.set_materialize_grads(False)
        bucket = running.bucket
        handling, count = bucket.handling, len(bucket.conversions)
        tensors = started[:count]
        compiling = torch.compiler.is_compiling()
        if not bucket.forward:
            if bucket.is_idle and not compiling:
                # No views of the parameters: a write to a parameter would invalidate them.
                return tuple([x.detach() for x in tensors])
            cast = (x.to(handling.used) if handling.used != x.dtype else x.view_as(x) for x in tensors)
            pairs = zip(cast, bucket.conversions, strict=True)
            return tuple(locally(one.forward, x, one.result_shape) for x, one in pairs)
        found = None if compiling or not handling.lasting else running.kept(tensors)
        if found is None:
            pieces = started[count:] or bucket.begin(tensors)
            found = bucket.finished(waited(pieces))
            if handling.lasting and not compiling and not running.synchronisation.enabled:
                running.keep(tensors, found)
        else:
            found = [x.view_as(x) for x in found]
        if handling.again and not compiling:
            found = [x if is_alone(x) else x.clone(memory_format=torch.contiguous_format) for x in found]
            # Without their history, whose nodes hold the bucket.
            stored, whole = ([x.detach() for x in some] for some in (tensors, found))
            running.again = ctx.again = Regathered(running, tuple(stored), whole)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        running: BucketState = ctx.running
        bucket, handling, stored = running.bucket, running.bucket.handling, ctx.stored
        compiling, differentiable = torch.compiler.is_compiling(), torch.is_grad_enabled()
        if ctx.again is not None:
            ctx.again.release()
        if running.synchronisation.enabled and not compiling:
            running.lasting = None  # the optimizer's turn
        found: list[Tensor | None] = [None] * ctx.count
        if handling.deferred and not compiling and not differentiable:
            gradients = with_unsent(running, gradients, running.synchronisation.enabled)
        here = [i for i, gradient in enumerate(gradients) if gradient is not None]
        if bucket.is_sum and not compiling and not differentiable and len(here) == len(gradients):
            return (None, *_sums(running, gradients, stored))  # type: ignore[arg-type]
        given = [gradient.to(handling.reduced) for gradient in gradients if gradient is not None]
        if compiling and bucket.is_sum and given and handling.reduced == stored and not running.has_start:
            sums = iter(sums_begun(given, running))
            return (None, *(None if gradient is None else next(sums) for gradient in gradients))
        ones = [bucket.conversions[i] for i in here]
        if not here or not bucket.backward:
            converted = [locally(one.backward, each, one.shape) for each, one in zip(given, ones, strict=True)]
        elif differentiable and not compiling:
            # For gradients of gradients: one by one, each of them differentiable.
            converted = [convert(each, one, backward=True) for each, one in zip(given, ones, strict=True)]
        else:
            steps = tuple(tuple(step[i] for i in here) for step in bucket.backward)
            pieces = begin_steps(steps, given)
            # A pending tensor may be viewed; for any other step it must have arrived.
            if compiling or handling.reduced != stored or not all(map(is_view, steps[-1])):
                pieces = waited(pieces)
            elif not running.has_start:
                running.synchronisation.later(running, pieces)
            pairs = zip(ones, pieces, strict=True)
            converted = [finish(one.backward[-1], piece).reshape(one.shape) for one, piece in pairs]
        for i, gradient in zip(here, converted, strict=True):
            found[i] = gradient.to(stored)
        return (None, *found)


def with_unsent(running: BucketState, gradients: Sequence[Tensor | None], is_sent: bool) -> tuple[Tensor | None, ...]:
    """Return the gradients plus those kept from earlier backwards; nothing if these are kept too."""
    total = list(gradients)
    if running.unsent:
        pairs = zip(running.unsent, gradients, strict=True)
        total = [new if old is None else old if new is None else old.add_(new) for old, new in pairs]
    if is_sent:
        running.unsent = []
        return tuple(total)
    # Copies in the dtype of the sums: autograd's gradients may share memory with another tensor.
    reduced = running.bucket.handling.reduced
    ours = running.unsent or [None] * len(total)
    running.unsent = [
        new if new is None or new is old else new.detach().to(reduced, copy=True)
        for new, old in zip(total, ours, strict=True)
    ]
    return (None,) * len(total)


def _sums(running: BucketState, gradients: Sequence[Tensor], stored: torch.dtype) -> list[Tensor]:
    """Return pending sums of whole gradients: the most frequent case, in the fewest calls."""
    handling, first = running.bucket.handling, running.bucket.backward[0][0]
    flat = torch.cat([x.reshape(-1) for x in gradients], out=running.free_buffer(gradients[0], handling.reduced))
    arrived = handling.reduced != stored
    level = None if flat.is_complex() else first.level_of(flat.nbytes)
    if level is not None:
        chain = running.synchronisation.begin_by_level(flat, level)
        if arrived or running.has_start:
            running.synchronisation.complete(chain)
    else:
        # A second tensor of the same memory keeps the buffer in use until it is sent, also if a backward fails.
        torch.ops._c10d_functional.all_reduce_(flat.detach(), "sum", first.group)
    if arrived:
        flat = torch.ops._c10d_functional.wait_tensor(flat).to(stored)
    elif not running.has_start:
        running.synchronisation.later(running, (flat,))
    return torch._C._nn.unflatten_dense_tensors(flat, list(gradients))


# -- as steps of the generated graph -----------------------------------------------------------------------------------


class BucketStart(nn.Module):
    def __init__(self, running: BucketState, notes: tuple[str, ...]) -> None:
        super().__init__()
        self.running = running
        self.notes = notes

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return start(self.running, tensors)

    def extra_repr(self) -> str:
        return "\n".join(str(conversion.reshard) for conversion in self.running.bucket.conversions)


class BucketEnd(nn.Module):
    def __init__(self, running: BucketState, notes: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.running = running
        self.notes = notes
        self.previous = _PreviousEnd()

    def forward(self, started: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return end(self.running, started, self.previous)


class RegatherWatch(nn.Module):
    """Fill regathered memory before the backward of an op that reads it.

    The end of a bucket frees the memory in its backward, which a bucket of frozen parameters does not have. There the
    op comes with its other operands: the gradient of the first one is complete when the backward has read the bucket.
    """

    def __init__(self, running: BucketState) -> None:
        super().__init__()
        self.running = running

    def forward(self, result: Tensor, *operands: Tensor) -> None:
        again = self.running.again
        if torch.compiler.is_compiling() or again is None:
            return
        if result.grad_fn is not None:
            again.watched = True
            result.grad_fn.register_prehook(lambda _: again.fill())
        first = None if again.ends else next((x for x in operands if x.grad_fn is not None), None)
        if first is not None:
            again.ends = True
            first.register_hook(lambda _: again.end())  # type: ignore[no-untyped-call]


class RegatherRelease(nn.Module):
    """Free gathered memory after the last op of the forward that reads a bucket."""

    def __init__(self, running: BucketState) -> None:
        super().__init__()
        self.running = running

    def forward(self) -> None:
        again = self.running.again
        if torch.compiler.is_compiling() or again is None:
            return
        if again.watched:
            again.release()
        else:
            self.running.again = None  # no backward will come to it
