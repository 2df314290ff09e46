"""State of a bucket between two places of a step: gathered parameters and pending gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from autopar.lowering.collectives.checksum import quick_checksum
from autopar.lowering.modules.bucket import BucketCollectives, waited

__all__ = ["BucketState", "GradientSync", "Regathered", "is_alone"]


@dataclass
class GradientSync:
    """State of gradient communication: sent in the backward or deferred, and pending parts.

    `ParallelModule.no_sync()` switches it off for a while.
    """

    enabled: bool = True
    unfinished: dict[BucketState, Sequence[Tensor]] = field(default_factory=dict)
    # Number of times that parameters were written between two calls.
    writes: int = 0

    def finish(self) -> None:
        """Wait for all pending gradients."""
        while self.unfinished:
            waited(self.unfinished.popitem()[1])

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
    unsent: list[Tensor | None] = field(default_factory=list)
    # Buffer of the sums; gradients are views of it.
    buffer: Tensor | None = None
    lasting: KeptGathered | None = None
    again: Regathered | None = None
    # Inputs and outputs of the previous call, at the end of a bucket without work in the forward.
    ended: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None = None

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
        """Gather again before the backward of a reader, and begin the gather of the next bucket of the backward."""
        if not self.released:
            return
        self.begin()
        assert self.begun is not None, "just begun"
        begun, self.begun, self.released = self.begun, None, False
        next_one = None if self.running.before is None else self.running.before.again
        if next_one is not None:
            next_one.begin()
        with torch.no_grad():
            found = self.running.bucket.finished(waited(begun))
            for tensor, value in zip(self.whole, found, strict=True):
                tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
                with torch.autograd._unsafe_preserve_version_counter(tensor):  # type: ignore[attr-defined]
                    tensor.copy_(value)
