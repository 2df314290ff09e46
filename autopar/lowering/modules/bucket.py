"""Buckets: one collective for many parameters, and their state between two places of a step.

A bucket packs its tensors into one buffer, sends it, and unpacks each tensor. Large tensors are sent from their own
memory by the same collective. Results may be pending when these functions return; a reader waits for them (`waited`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from math import inf, prod
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from autopar.lowering.collectives.checksum import quick_checksum
from autopar.lowering.collectives.level_groups import LevelChain, LevelGroups, sum_by_level
from autopar.lowering.collectives.local_reshard import LocalReshard, send, send_all
from autopar.lowering.collectives.local_steps import LocalStep, finish, keep_local, prepare
from autopar.lowering.modules.float8 import coded, decoded
from autopar.lowering.modules.run_state import RUN_STATE
from autopar.sharding.reshard.reshard import StepKind

# -- custom ops --------------------------------------------------------------------------------------------------------


_LIBRARY: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]


def sums_begun(gradients: Sequence[Tensor], running: BucketState) -> list[Tensor]:
    """Return pending sums of gradients of a bucket; waiting for one of them waits for all.

    The compiler may not copy them before they arrive.
    """
    move = running.bucket.backward[0][0]
    # Not `nbytes`: a compiler may take sizes as symbols.
    level = move.level_of(sum(x.numel() * x.element_size() for x in gradients))
    groups = ((move.group, move.ranks),) if level is None else level.groups
    names, ranks = ([group[i] for group in groups] for i in range(2))
    found: list[Tensor] = torch.ops.autopar.sums_begun.default(list(gradients), names, ranks, running.number)
    return found


def _sums_begun(gradients: list[Tensor], groups: list[str], ranks: list[int], bucket: int) -> list[Tensor]:
    flat = torch.cat([x.reshape(-1) for x in gradients], out=_free_buffer(bucket, gradients))
    if len(groups) > 1:
        flat = sum_by_level(flat, LevelGroups(tuple(zip(groups, ranks, strict=True)), 0.0, inf))
    else:
        # A second tensor of the same memory keeps the buffer in use until it is sent.
        torch.ops._c10d_functional.all_reduce_(flat.detach(), "sum", groups[0])
    return list(torch._C._nn.unflatten_dense_tensors(flat, gradients))


def _free_buffer(bucket: int, gradients: Sequence[Tensor]) -> Tensor | None:
    """Return the buffer of the previous step for all gradients of a bucket; None where a new one is as good."""
    running, first = _BUCKETS.get(bucket), gradients[0]
    # A new buffer costs a CPU more than the copy into it; other devices keep memory for reuse.
    if running is None or not first.is_cpu or len(gradients) < len(running.bucket.conversions):
        return None
    return running.free_buffer(first, first.dtype)


def _sums_like(gradients: list[Tensor], groups: list[str], ranks: list[int], bucket: int) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in gradients]


_LIBRARY.define("sums_begun(Tensor[] gradients, str[] groups, int[] ranks, int bucket) -> Tensor[]")
_LIBRARY.impl("sums_begun", _sums_begun, "CompositeExplicitAutograd")
torch.library.register_fake("autopar::sums_begun", _sums_like, lib=_LIBRARY)


# Bytes. A larger tensor is sent from its own memory: copying it into a buffer, and out of it, takes longer than
# one more buffer of the collective. With 1 MiB a step of `fsdp` on 4 processes of 2 cores took up to 15 % longer.
ALONE_BYTES = 2**22


@dataclass(frozen=True)
class ParameterHandling:
    """Gathering of a parameter in the forward, and reduction of its gradient in the backward."""

    stored: torch.dtype
    used: torch.dtype
    # Dtype in which gradients are summed.
    reduced: torch.dtype
    # Under `no_sync` each rank keeps the whole gradient; else every backward sends it.
    deferred: bool = False
    # Gathered again in the backward.
    again: bool = False
    # Under `no_sync` one gathered copy serves all forwards.
    lasting: bool = False
    # Gathered in float8, with a scale for each shard.
    in_float8: bool = False


@dataclass(frozen=True)
class BucketCollectives:
    """Reshards with the same steps over the same groups, run as one."""

    conversions: tuple[LocalReshard, ...]
    handling: ParameterHandling
    # For each step, its form for each tensor; empty for a direction that sends nothing.
    forward: tuple[tuple[LocalStep, ...], ...] = field(init=False)
    backward: tuple[tuple[LocalStep, ...], ...] = field(init=False)
    # True if gradients are only summed.
    is_sum: bool = field(init=False)
    # True if the parameters need no step.
    is_idle: bool = field(init=False)

    def __post_init__(self) -> None:
        forward, backward = [one.forward for one in self.conversions], [one.backward for one in self.conversions]
        kinds = [[move.kind for move in one.backward] for one in self.conversions]
        is_sum = all(each == [StepKind.ALL_REDUCE] for each in kinds) and all(prod(x.shape) for x in self.conversions)
        # Fields, as torch.compile cannot read cached properties.
        object.__setattr__(self, "forward", _sending(forward))
        object.__setattr__(self, "backward", _sending(backward))
        object.__setattr__(self, "is_sum", is_sum)
        object.__setattr__(self, "is_idle", not any(forward) and self.handling.used == self.handling.stored)

    def begin(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Cast the stored tensors and begin their reshard; return the pieces of each, which may be pending."""
        used = self.handling.used
        cast = [x.to(used) for x in tensors]
        return begin_steps(self.forward, cast, self.handling.in_float8) if self.forward else tuple(cast)

    def finished(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Return the resharded tensors, unpacked from pieces that have arrived."""
        if not self.forward:
            return list(pieces)
        if self.handling.in_float8:
            pieces = _decoded(self.forward[-1], pieces, self.handling.used)
        pairs = zip(self.conversions, pieces, strict=True)
        return [finish(one.forward[-1], piece).reshape(one.result_shape) for one, piece in pairs]


def _sending(ways: Sequence[tuple[LocalStep, ...]]) -> tuple[tuple[LocalStep, ...], ...]:
    steps = tuple(zip(*ways, strict=True))
    return () if all(move.local for step in steps for move in step) else steps


def locally(moves: tuple[LocalStep, ...], x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Run steps that send nothing."""
    for i, move in enumerate(moves):
        x = keep_local(move, x.reshape(move.before) if i == 0 else x)
    return x.reshape(shape) if moves else x


def begin_steps(
    steps: tuple[tuple[LocalStep, ...], ...], tensors: Sequence[Tensor], in_float8: bool = False
) -> tuple[Tensor, ...]:
    """Run all steps, and begin the last; return the piece of each tensor in its buffer, which may be coded."""
    parts = [x.reshape(move.before) for x, move in zip(tensors, steps[0], strict=True)]
    for moves in steps[:-1]:
        pieces = waited(_exchange(moves, parts, in_float8))
        pieces = _decoded(moves, pieces, tensors[0].dtype) if in_float8 else pieces
        parts = [finish(move, piece) for move, piece in zip(moves, pieces, strict=True)]
    return _exchange(steps[-1], parts, in_float8)


def _decoded(moves: Sequence[LocalStep], pieces: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return what was gathered in float8 in another dtype; what other steps sent was not coded."""
    pairs = zip(moves, pieces, strict=True)
    return [decoded(x, move.ranks, dtype) if move.kind is StepKind.ALL_GATHER else x for move, x in pairs]


def _exchange(moves: tuple[LocalStep, ...], tensors: Sequence[Tensor], in_float8: bool = False) -> tuple[Tensor, ...]:
    parts = [prepare(move, x) for move, x in zip(moves, tensors, strict=True)]
    if in_float8 and moves[0].kind is StepKind.ALL_GATHER:
        parts = [coded(part) for part in parts]
    alone = [i for i, part in enumerate(parts) if _is_sent_alone(moves[0], part)]
    if not alone or torch.compiler.is_compiling():
        return _sent_as_one(moves[0], parts)
    others = [i for i in range(len(parts)) if i not in alone]
    buffers = [parts[i] for i in alone]
    if not others:
        return tuple(send_all(moves[0], buffers))
    flat, sizes = _joined(moves[0], [parts[i] for i in others])
    *sent, last = send_all(moves[0], [*buffers, flat])
    pieces = dict(zip([*alone, *others], [*sent, *_parted(moves[0], last, sizes)], strict=True))
    return tuple(pieces[i] for i in range(len(parts)))


def _is_sent_alone(move: LocalStep, part: Tensor) -> bool:
    if move.kind not in (StepKind.ALL_GATHER, StepKind.REDUCE_SCATTER) or part.is_complex():
        return False  # Gloo gathers no complex numbers from several buffers
    size = part.numel() * part.element_size() * (move.ranks if move.kind is StepKind.ALL_GATHER else 1)
    return size >= ALONE_BYTES


def _sent_as_one(first: LocalStep, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    flat, sizes = _joined(first, parts)
    sent = send(first, flat) if flat.numel() else flat
    if torch.compiler.is_compiling():
        # The buffer and not its pieces: the compiler takes a waited tensor to be contiguous.
        sent = torch.ops._c10d_functional.wait_tensor(sent)
    return _parted(first, sent, sizes)


def _joined(first: LocalStep, parts: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """Return one buffer, and the share of each part in every rank's result."""
    sizes = [part.numel() for part in parts]
    if first.kind is StepKind.REDUCE_SCATTER:
        sizes = [size // first.ranks for size in sizes]
        rows = [part.view(first.ranks, size) for part, size in zip(parts, sizes, strict=True)]
        return torch.cat(rows, 1).view(-1), sizes
    return torch.cat(list(parts)), sizes


def _parted(first: LocalStep, sent: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    if first.kind is StepKind.ALL_GATHER:
        return torch.split(sent.view(first.ranks, sum(sizes)), sizes, 1)
    return torch.split(sent, sizes)


def is_view(move: LocalStep) -> bool:
    """Return whether the result of a step is a slice of the sent buffer, which may be taken before it arrives."""
    return move.kind is StepKind.ALL_REDUCE or move.longest == move.after[move.atom]


def waited(pieces: Sequence[Tensor | None]) -> Any:
    """Return the pieces after they arrived; pieces of one buffer arrive together."""
    if not torch.compiler.is_compiling():  # else they are there
        for piece in {piece.untyped_storage()._cdata: piece for piece in pieces if piece is not None}.values():
            torch.ops._c10d_functional.wait_tensor(piece)
    return pieces


# -- state of a bucket -------------------------------------------------------------------------------------------------


@dataclass
class GradientSync:
    """State of gradient communication: sent in the backward or deferred, and pending parts.

    `ParallelModule.no_sync()` switches it off for a while.
    """

    enabled: bool = True
    unfinished: dict[BucketState, Sequence[Tensor]] = field(default_factory=dict)
    # Sums by level in progress, in the order in which all ranks began them.
    chains: list[LevelChain] = field(default_factory=list)
    # Number of times that parameters were written between two calls.
    writes: int = 0

    def finish(self) -> None:
        """Wait for all pending gradients."""
        while any(chain.begun < chain.level.phases for chain in self.chains):
            self.advance()
        while self.chains:
            self.complete(self.chains[0])
        while self.unfinished:
            waited(self.unfinished.popitem()[1])

    def begin_by_level(self, flat: Tensor, level: LevelGroups) -> LevelChain:
        """Begin a sum by level in place, after the next phase of those before it."""
        self.advance()
        self.chains.append(LevelChain(flat.detach(), level))
        return self.chains[-1]

    def advance(self) -> None:
        """Begin the next phase of every sum by level: the compute since the last one hides the phase before it."""
        for chain in self.chains:
            chain.advance()

    def complete(self, chain: LevelChain) -> None:
        """Wait for one sum by level."""
        if chain in self.chains:
            self.chains.remove(chain)
            chain.finish()

    def note_write(self) -> None:
        """Mark the gathered parameters as outdated."""
        self.writes += 1

    def later(self, running: BucketState, pieces: Sequence[Tensor]) -> None:
        """Leave gradients to `finish`; gradients of a second forward are added to the first's, so both must have
        arrived.
        """
        is_second = running in self.unfinished
        if is_second:
            self.finish()
        self.unfinished[running] = pieces
        if is_second:
            self.finish()

    @contextmanager
    def off(self) -> Iterator[None]:
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before


@dataclass(eq=False)
class BucketState:
    """Bucket with its state between the places of a step."""

    bucket: BucketCollectives
    synchronisation: GradientSync
    has_start: bool = True
    # Next bucket of the backward, if it is regathered too.
    before: BucketState | None = None
    unsent: list[Tensor | None] = field(default_factory=list, metadata=RUN_STATE)
    # Buffer of the sums; gradients are views of it.
    buffer: Tensor | None = field(default=None, metadata=RUN_STATE)
    lasting: KeptGathered | None = field(default=None, metadata=RUN_STATE)
    again: Regathered | None = field(default=None, metadata=RUN_STATE)
    # By which an op of a compiled graph finds this state.
    number: int = field(default_factory=count().__next__, init=False, metadata=RUN_STATE)

    def __post_init__(self) -> None:
        _BUCKETS[self.number] = self

    def free_buffer(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the buffer of the previous step, unless a gradient still uses it."""
        if self.buffer is None or _holders(self.buffer) > 1:
            numel = sum(prod(conversion.shape) for conversion in self.bucket.conversions)
            self.buffer = like.new_empty(numel, dtype=dtype)
        return self.buffer

    def kept(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        """Return the gathered copies, if the stored tensors are still the same."""
        if self.lasting is not None:
            is_same = self.lasting.writes == self.synchronisation.writes and self.lasting.states == _states(tensors)
            self.lasting = self.lasting if is_same else None
        return None if self.lasting is None else self.lasting.gathered

    def keep(self, tensors: Sequence[Tensor], gathered: Sequence[Tensor]) -> None:
        stored = [x.detach() for x in tensors]
        self.lasting = KeptGathered(
            stored, _states(stored), self.synchronisation.writes, [x.detach() for x in gathered]
        )


# By number.
_BUCKETS: WeakValueDictionary[int, BucketState] = WeakValueDictionary()


def _holders(tensor: Tensor) -> int:
    """Return the number of tensors that share the memory of one."""
    held: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return held - 1  # the storage object that was asked


def is_alone(tensor: Tensor) -> bool:
    """Return whether a tensor fills its storage, which may then be freed and filled again."""
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


@dataclass(eq=False)
class KeptGathered:
    """Gathered copies that serve several forwards."""

    # Sources of the copies; held, so that no other tensor takes their memory.
    stored: list[Tensor]
    states: tuple[tuple[int, int], ...]
    writes: int
    gathered: list[Tensor]


def _states(tensors: Iterable[Tensor]) -> tuple[tuple[int, int], ...]:
    """Return addresses of tensors, and on CPUs a checksum: writes to `x.data` and through a DTensor are not counted.

    Reading the values would make another device wait.
    """
    return tuple((x.data_ptr(), quick_checksum(x) if x.is_cpu else 0) for x in tensors)


@dataclass(eq=False)
class Regathered:
    """Gathered tensors of one forward: their memory is freed, and filled again before it is read.

    Saved tensors of autograd share their memory, so nothing else needs to know.
    """

    running: BucketState
    stored: tuple[Tensor, ...]
    whole: list[Tensor]
    begun: tuple[Tensor, ...] | None = None
    watched: bool = False
    # True if the gradient of an operand frees the memory; and after it has.
    ends: bool = False
    over: bool = False
    released: bool = False

    def release(self) -> None:
        for tensor in self.whole:
            tensor.untyped_storage().resize_(0)
        self.released = True

    def end(self) -> None:
        """Free the memory after the last op of the backward that reads it."""
        self.release()
        self.over = True

    def begin(self) -> None:
        if self.released and self.begun is None:
            with torch.no_grad():
                self.begun = self.running.bucket.begin(self.stored)

    def fill(self) -> None:
        """Gather again before the backward of a reader, and begin the gather of the next bucket of the backward."""
        if not self.released:
            return
        self.begin()
        assert self.begun is not None, "just begun"
        begun, self.begun, self.released = self.begun, None, False
        next_one = None if self.running.before is None else self.running.before.again
        if next_one is not None and not next_one.over:
            next_one.begin()
        with torch.no_grad():
            found = self.running.bucket.finished(waited(begun))
            for tensor, value in zip(self.whole, found, strict=True):
                tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
                with torch.autograd._unsafe_preserve_version_counter(tensor):  # type: ignore[attr-defined]
                    tensor.copy_(value)
