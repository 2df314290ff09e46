"""Parameters converted together: one collective for many of them, in the forward as in the backward.

A bucket has two places in a step. Where it *starts*, its tensors are laid into one buffer and the collective is begun;
where it *ends*, just before the first of them is used, the collective is waited for and each tensor is taken out. The
backward runs the same places in reverse: where the bucket ends, the gradients are laid into one buffer and their
collective is begun; where it starts, it is waited for. So a gather runs beside the layers before its own, and a
reduction beside the backward of the layers before its own; and since the starts are what the gradients come from,
nothing is unfinished when `backward()` or `torch.autograd.grad` returns. A bucket that has nothing to begin in the
forward has no start if whoever gives the parameters waits for their gradients (`Synchronisation.finish`).

On the way parameters are cast to the type that the forward works in, and gradients to the type that they are added up
in. Under `no_sync()` gradients are kept as they are, and go with those of the next backward that sends.

What was gathered may be given up after the forward and gathered again when the backward comes to it (`Again`).

`torch.compile` orders collectives by itself: there both halves are done at the end of the bucket, always; but sums of
gradients that nothing is done to are left to whoever gives the parameters to wait for, outside of what is compiled.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from autopar.reshard import StepKind
from autopar.rewrite.functions import Conversion, convert, send
from autopar.rewrite.moves import Move, finish, keep_local, prepare

__all__ = ["Bucket", "BucketEnd", "BucketStart", "Handling", "Release", "Running", "Synchronisation", "Watch"]


@dataclass
class Synchronisation:
    """Whether gradients are sent in the backward, and what of them is still to come.

    `ParallelModule.no_sync()` switches it off for a while.
    """

    enabled: bool = True
    unfinished: dict[Running, Tensor] = field(default_factory=dict)

    def finish(self) -> None:
        """Wait for all that has been sent."""
        while self.unfinished:
            torch.ops._c10d_functional.wait_tensor(self.unfinished.popitem()[1])

    def later(self, running: Running, buffer: Tensor) -> None:
        """Leave gradients to `finish`; those of a second forward are added to the first's, so both must have come."""
        is_second = running in self.unfinished
        if is_second:
            self.finish()
        self.unfinished[running] = buffer
        if is_second:
            self.finish()

    @contextmanager
    def off(self) -> Iterator[None]:
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before


@dataclass(frozen=True)
class Handling:
    """How a parameter comes into the forward, and its gradient out of the backward."""

    stored: torch.dtype
    used: torch.dtype
    reduced: torch.dtype
    """The type in which gradients are added up."""
    deferred: bool = False
    """Without synchronisation the whole gradient is kept on each rank; else every backward sends it."""
    again: bool = False
    """Gathered again for the backward."""
    lasting: bool = False
    """While gradients are accumulated without being sent, what is gathered serves all forwards."""


@dataclass(frozen=True)
class Bucket:
    """Conversions that take the same steps over the same groups, done as one."""

    conversions: tuple[Conversion, ...]
    handling: Handling
    forward: tuple[tuple[Move, ...], ...] = field(init=False)
    """For each step, what it is for each tensor; none where nothing is sent that way."""
    backward: tuple[tuple[Move, ...], ...] = field(init=False)
    is_sum: bool = field(init=False)
    """Whether all that is done with gradients is to add them up."""
    is_idle: bool = field(init=False)
    """Whether nothing is done with the parameters."""

    def __post_init__(self) -> None:
        forward, backward = [one.forward for one in self.conversions], [one.backward for one in self.conversions]
        kinds = [[move.kind for move in one.backward] for one in self.conversions]
        is_sum = all(each == [StepKind.ALL_REDUCE] for each in kinds) and all(prod(x.shape) for x in self.conversions)
        # Fields, and no cached properties, which torch.compile cannot read.
        object.__setattr__(self, "forward", _sending(forward))
        object.__setattr__(self, "backward", _sending(backward))
        object.__setattr__(self, "is_sum", is_sum)
        object.__setattr__(self, "is_idle", not any(forward) and self.handling.used == self.handling.stored)
        _sums_op()  # not later: a compiled function cannot define it

    def begin(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Cast the stored tensors and begin to convert them; the pieces of each, which may be still to come."""
        used = self.handling.used
        cast = [x.to(used) for x in tensors]
        return _begin(self.forward, cast) if self.forward else tuple(cast)

    def finished(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """The converted tensors, made of pieces that have come."""
        if not self.forward:
            return list(pieces)
        pairs = zip(self.conversions, pieces, strict=True)
        return [finish(one.forward[-1], piece).reshape(one.result_shape) for one, piece in pairs]


@dataclass(eq=False)
class Running:
    """A bucket and what it remembers from one place of a step to the next."""

    bucket: Bucket
    synchronisation: Synchronisation
    has_start: bool = True
    before: Running | None = None
    """The bucket that the backward comes to next, if it too gathers again."""
    unsent: list[Tensor | None] = field(default_factory=list)
    buffer: Tensor | None = None
    """Where gradients are added up; the gradients that come of it are views of it."""
    lasting: tuple[tuple[int, ...], list[Tensor]] | None = None
    """The versions of the stored tensors, and what was gathered of them."""
    again: Again | None = None
    ended: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None = None
    """What came in and went out at the end of a bucket that does nothing in the forward, in the call before."""

    def free_buffer(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """The buffer of the step before, unless somebody still holds a gradient of it."""
        if self.buffer is None or _holders(self.buffer) > 1:
            numel = sum(prod(conversion.shape) for conversion in self.bucket.conversions)
            self.buffer = like.new_empty(numel, dtype=dtype)
        return self.buffer

    def kept(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        """What was gathered before, if the stored tensors are still the same."""
        if self.lasting is not None and self.lasting[0] != _versions(tensors):
            self.lasting = None
        return None if self.lasting is None else self.lasting[1]


def _holders(tensor: Tensor) -> int:
    """How many tensors share the memory of one."""
    held: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return held - 1  # the storage object that was asked


def _is_alone(tensor: Tensor) -> bool:
    """Whether a tensor fills the memory that it lies in: it may be given up and filled again without harm to others."""
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _versions(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    return tuple(x._version for x in tensors)


# -- the two places ---------------------------------------------------------------------------------------------------


def start(running: Running, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors, and after them what of their collective `end` wants."""
    if torch.compiler.is_compiling():
        return tuple(tensors)
    started: tuple[Tensor, ...] = _Start.apply(running, *tensors)  # type: ignore[no-untyped-call]
    return started


def end(running: Running, started: Sequence[Tensor]) -> tuple[Tensor, ...]:
    if running.has_start or not running.bucket.is_idle or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return _ended(running, started)
    # It keeps nothing for a backward, so that one piece of graph does for all calls with the same tensors.
    if running.ended is not None and all(map(operator.is_, started, running.ended[0])):
        found = running.ended[1]
        node = next((x.grad_fn for x in found if x.grad_fn is not None), None)
        if node is not None:
            node._set_sequence_nr(torch._C._autograd._get_sequence_nr())  # type: ignore[attr-defined]  # as if made now
        return found
    running.ended = tuple(started), _ended(running, started)
    return running.ended[1]


def _ended(running: Running, started: Sequence[Tensor]) -> tuple[Tensor, ...]:
    ended: tuple[Tensor, ...] = _End.apply(running, *started)  # type: ignore[no-untyped-call]
    return ended


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, running: Running, *tensors: Tensor) -> tuple[Tensor, ...]:
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
            _wait(given)
        return (None, *given)


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, running: Running, *started: Tensor) -> tuple[Tensor, ...]:
        ctx.running, ctx.count, ctx.again = running, len(started), None
        ctx.set_materialize_grads(False)
        bucket = running.bucket
        handling, count = bucket.handling, len(bucket.conversions)
        tensors = started[:count]
        compiling = torch.compiler.is_compiling()
        if not bucket.forward:
            if bucket.is_idle and not compiling:
                return tensors  # autograd makes views of them
            cast = (x.to(handling.used) if handling.used != x.dtype else x.view_as(x) for x in tensors)
            pairs = zip(cast, bucket.conversions, strict=True)
            return tuple(_locally(one.forward, x, one.result_shape) for x, one in pairs)
        found = None if compiling or not handling.lasting else running.kept(tensors)
        if found is None:
            pieces = started[count:] or bucket.begin(tensors)
            found = bucket.finished(_wait(pieces))
            if handling.lasting and not compiling and not running.synchronisation.enabled:
                running.lasting = _versions(tensors), [x.detach() for x in found]
        else:
            found = [x.view_as(x) for x in found]
        if handling.again and not compiling:
            found = [x if _is_alone(x) else x.clone(memory_format=torch.contiguous_format) for x in found]
            running.again = ctx.again = Again(running, tensors, [x.detach() for x in found])
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        running: Running = ctx.running
        bucket, handling = running.bucket, running.bucket.handling
        compiling, differentiable = torch.compiler.is_compiling(), torch.is_grad_enabled()
        if ctx.again is not None:
            ctx.again.release()
        if running.synchronisation.enabled and not compiling:
            running.lasting = None  # the optimizer's turn
        found: list[Tensor | None] = [None] * ctx.count
        if handling.deferred and not compiling and not differentiable:
            gradients = _with_unsent(running, gradients)
        here = [i for i, gradient in enumerate(gradients) if gradient is not None]
        if bucket.is_sum and not compiling and not differentiable and len(here) == len(gradients):
            return (None, *_sums(running, gradients))  # type: ignore[arg-type]
        given = [gradient.to(handling.reduced) for gradient in gradients if gradient is not None]
        if compiling and bucket.is_sum and given and handling.reduced == handling.stored and not running.has_start:
            sums = iter(torch.ops.autopar.sums_begun.default(given, bucket.backward[0][0].group))
            return (None, *(None if gradient is None else next(sums) for gradient in gradients))
        ones = [bucket.conversions[i] for i in here]
        if not here or not bucket.backward:
            converted = [_locally(one.backward, each, one.shape) for each, one in zip(given, ones, strict=True)]
        elif differentiable and not compiling:
            # For gradients of gradients: one by one, each of them differentiable.
            converted = [convert(each, one, backward=True) for each, one in zip(given, ones, strict=True)]
        else:
            steps = tuple(tuple(step[i] for i in here) for step in bucket.backward)
            pieces = _begin(steps, given)
            # Views may be made of what is not there yet; where more is to be done to it, it must have come.
            if compiling or handling.reduced != handling.stored or not all(map(_is_view, steps[-1])):
                pieces = _wait(pieces)
            elif not running.has_start:
                running.synchronisation.later(running, pieces[0])
            pairs = zip(ones, pieces, strict=True)
            converted = [finish(one.backward[-1], piece).reshape(one.shape) for one, piece in pairs]
        for i, gradient in zip(here, converted, strict=True):
            found[i] = gradient.to(handling.stored)
        return (None, *found)


def _with_unsent(running: Running, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients with those that were not sent before; none, where these are not sent either."""
    total = list(gradients)
    if running.unsent:
        pairs = zip(running.unsent, gradients, strict=True)
        total = [new if old is None else old if new is None else old.add_(new) for old, new in pairs]
    if running.synchronisation.enabled:
        running.unsent = []
        return tuple(total)
    # Copies, in the type of the sums: what autograd gives may be another tensor's memory.
    reduced = running.bucket.handling.reduced
    ours = running.unsent or [None] * len(total)
    running.unsent = [
        new if new is None or new is old else new.detach().to(reduced, copy=True)
        for new, old in zip(total, ours, strict=True)
    ]
    return (None,) * len(total)


# -- on tensors -------------------------------------------------------------------------------------------------------


def _sums(running: Running, gradients: Sequence[Tensor]) -> list[Tensor]:
    """The sums of whole gradients, as they will be when they have come: the commonest case, in the fewest calls."""
    handling, first = running.bucket.handling, running.bucket.backward[0][0]
    flat = torch.cat([x.reshape(-1) for x in gradients], out=running.free_buffer(gradients[0], handling.reduced))
    # Another tensor of the same memory: until it is sent the buffer is not free, also where a backward has failed.
    torch.ops._c10d_functional.all_reduce_(flat.detach(), "sum", first.group)
    if handling.reduced != handling.stored:
        flat = torch.ops._c10d_functional.wait_tensor(flat).to(handling.stored)
    elif not running.has_start:
        running.synchronisation.later(running, flat)
    return torch._C._nn.unflatten_dense_tensors(flat, list(gradients))


@cache
def _sums_op() -> Any:
    """An operator that begins to add up gradients over a group; somebody waits for what comes of it.

    The compiler does not see into it: it would be free to copy what has not come.
    """

    def begun(gradients: list[Tensor], group: str) -> list[Tensor]:
        flat = torch.cat([x.reshape(-1) for x in gradients])
        torch.ops._c10d_functional.all_reduce_(flat, "sum", group)
        return list(torch._C._nn.unflatten_dense_tensors(flat, gradients))

    def like(gradients: list[Tensor], group: str) -> list[Tensor]:
        return [x.new_empty(x.shape) for x in gradients]

    library: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("sums_begun(Tensor[] gradients, str group) -> Tensor[]")
    library.impl("sums_begun", begun, "CompositeExplicitAutograd")
    torch.library.register_fake("autopar::sums_begun", like, lib=library)
    return library


def _sending(ways: Sequence[tuple[Move, ...]]) -> tuple[tuple[Move, ...], ...]:
    steps = tuple(zip(*ways, strict=True))
    return () if all(move.local for step in steps for move in step) else steps


def _locally(moves: tuple[Move, ...], x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Steps that send nothing."""
    for i, move in enumerate(moves):
        x = keep_local(move, x.reshape(move.before) if i == 0 else x)
    return x.reshape(shape) if moves else x


def _begin(steps: tuple[tuple[Move, ...], ...], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """All steps but the end of the last, which is begun; of its buffer, the piece of each tensor."""
    parts = [x.reshape(move.before) for x, move in zip(tensors, steps[0], strict=True)]
    for moves in steps[:-1]:
        pieces = _wait(_exchange(moves, parts))
        parts = [finish(move, piece) for move, piece in zip(moves, pieces, strict=True)]
    return _exchange(steps[-1], parts)


def _exchange(moves: tuple[Move, ...], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    first = moves[0]
    parts = [prepare(move, x) for move, x in zip(moves, tensors, strict=True)]
    sizes = [part.numel() for part in parts]
    if first.kind is StepKind.REDUCE_SCATTER:
        sizes = [size // first.ranks for size in sizes]
        rows = [part.view(first.ranks, size) for part, size in zip(parts, sizes, strict=True)]
        flat = torch.cat(rows, 1).view(-1)
    else:
        flat = torch.cat(parts)
    sent = send(first, flat) if flat.numel() else flat
    if torch.compiler.is_compiling():
        # The buffer and not its pieces: the compiler takes what is waited for to be contiguous.
        sent = torch.ops._c10d_functional.wait_tensor(sent)
    if first.kind is StepKind.ALL_GATHER:
        return torch.split(sent.view(first.ranks, sum(sizes)), sizes, 1)
    return torch.split(sent, sizes)


def _is_view(move: Move) -> bool:
    return move.kind is StepKind.ALL_REDUCE or move.longest == move.after[move.atom]


def _wait(pieces: Sequence[Tensor | None]) -> Any:
    """All pieces are of one buffer, and wait for it."""
    if torch.compiler.is_compiling():
        return pieces  # they are there
    for piece in pieces:
        if piece is not None:
            torch.ops._c10d_functional.wait_tensor(piece)
            break
    return pieces


# -- given up after the forward, gathered again for the backward -------------------------------------------------------


@dataclass(eq=False)
class Again:
    """The gathered tensors of one forward: their memory is given back, and filled again before it is read.

    What autograd has saved of them shares their memory, so nothing else has to know.
    """

    running: Running
    stored: tuple[Tensor, ...]
    whole: list[Tensor]
    begun: tuple[Tensor, ...] | None = None
    watched: bool = False
    released: bool = False

    def release(self) -> None:
        for tensor in self.whole:
            tensor.untyped_storage().resize_(0)
        self.released = True

    def begin(self) -> None:
        if self.released and self.begun is None:
            with torch.no_grad():
                self.begun = self.running.bucket.begin(self.stored)

    def fill(self) -> None:
        """Before the backward of whatever read them; the bucket that comes next in the backward is begun too."""
        if not self.released:
            return
        self.begin()
        assert self.begun is not None, "just begun"
        begun, self.begun, self.released = self.begun, None, False
        next_one = None if self.running.before is None else self.running.before.again
        if next_one is not None:
            next_one.begin()
        with torch.no_grad():
            found = self.running.bucket.finished(_wait(begun))
            for tensor, value in zip(self.whole, found, strict=True):
                tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
                with torch.autograd._unsafe_preserve_version_counter(tensor):  # type: ignore[attr-defined]
                    tensor.copy_(value)


# -- as steps of the generated graph ----------------------------------------------------------------------------------


class BucketStart(nn.Module):
    def __init__(self, running: Running, notes: tuple[str, ...]) -> None:
        super().__init__()
        self.running = running
        self.notes = notes

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return start(self.running, tensors)

    def extra_repr(self) -> str:
        return "\n".join(str(conversion.reshard) for conversion in self.running.bucket.conversions)


class BucketEnd(nn.Module):
    def __init__(self, running: Running, notes: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.running = running
        self.notes = notes

    def forward(self, started: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return end(self.running, started)


class Watch(nn.Module):
    """After an op that reads a tensor that is gathered again: its backward is where that must have happened."""

    def __init__(self, running: Running) -> None:
        super().__init__()
        self.running = running

    def forward(self, *results: Tensor) -> None:
        again = self.running.again
        if torch.compiler.is_compiling() or again is None:
            return
        for result in results:
            if result.grad_fn is not None:
                again.watched = True
                result.grad_fn.register_prehook(lambda _: again.fill())


class Release(nn.Module):
    """After the last op of the forward that reads the tensors of a bucket."""

    def __init__(self, running: Running) -> None:
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
