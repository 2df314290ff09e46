"""Weighted mean of a vector over the replicas, in one or two messages that are under way while a replica trains.

Plain vectors take one all-reduce. A code cannot be added up, so coded ones take two messages: each replica gets a slice
of all vectors, adds it up in full precision, and sends the coded sum to all. The largest values alone (`topk`) are sent
to all at once.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.sync.coders import TopCode, VectorCode, code_of, with_feedback
from autopar.runtime.sync.replica_group import ReplicaGroup
from autopar.runtime.sync.shard_vector import ShardVector
from autopar.sharding.layout.drift import Coder

__all__ = ["MeanExchange", "SendMean"]

# Sends tensors to all replicas and returns their sum in place: what fault tolerance puts in place of torch's.
AllReduce = Callable[[Tensor], Any]


class MeanExchange:
    """One mean under way."""

    def __init__(self, messages: Sequence[Callable[[], Any]], sent_bytes: float) -> None:
        # Each message waits for the one before it, and begins the next message; the last returns mean and weight.
        self._messages = list(messages)
        self._found: tuple[Tensor, float] | None = None
        self.sent_bytes = sent_bytes

    @classmethod
    def of_result(cls, mean: Tensor, weight: float) -> MeanExchange:
        """Return an exchange that has ended, as a checkpoint has it."""
        made = cls((), 0.0)
        made._found = mean, weight
        return made

    def second_message(self) -> None:
        """Begin the second message of two, once the first has come."""
        if len(self._messages) > 1:
            self._messages.pop(0)()

    def result(self) -> Tensor:
        """Wait for the mean."""
        while self._found is None:
            self._found = self._messages.pop(0)()
        return self._found[0]

    @property
    def weight(self) -> float:
        """Return the weight of this replica in the mean."""
        assert self._found is not None, "the mean has come"
        return self._found[1]


class SendMean:
    """How the mean of a vector is sent: plain or coded."""

    def __init__(self, group: ReplicaGroup, coder: Coder | None, all_reduce: AllReduce | None = None) -> None:
        self.group = group
        self.code: VectorCode | None = None if coder is None else code_of(coder)
        self._all_reduce = all_reduce or (lambda x: dist.all_reduce(x, group=group.group, async_op=True))

    def lost(self, length: int, vector: ShardVector) -> tuple[Tensor, ...]:
        """Return memory for what each message loses of a vector of this length; none for plain vectors."""
        if self.code is None:
            return ()
        lengths = [length] if isinstance(self.code, TopCode) else [length, len(self.slices(length)[self.group.index])]
        return tuple(torch.zeros(each, dtype=vector.dtype, device=vector.device) for each in lengths)

    def begin(self, values: Tensor, rows: float, lost: tuple[Tensor, ...], whole: bool = False) -> MeanExchange:
        """Begin the mean of `values`, each replica weighted by its rows; `whole` sends them plain."""
        if self.code is None or whole:
            return self._plain(values, rows)
        if isinstance(self.code, TopCode):
            return self._gathered(self.code, values, rows, lost)
        return self._in_two_messages(self.code, values, rows, lost)

    def _plain(self, values: Tensor, rows: float) -> MeanExchange:
        sent = torch.cat([values * rows, values.new_full((1,), rows)])
        work = self._all_reduce(sent)

        def last() -> tuple[Tensor, float]:
            work.wait()
            total = float(sent[-1])
            return sent[:-1] / total, rows / total

        count = self.group.count
        return MeanExchange([last], 2 * (count - 1) / count * values.numel() * values.element_size())

    def _gathered(self, code: VectorCode, values: Tensor, rows: float, lost: tuple[Tensor, ...]) -> MeanExchange:
        own = _with_rows(with_feedback(code, values, lost[0]), rows)
        every = [torch.empty_like(own) for _ in range(self.group.count)]
        work: Any = dist.all_gather(every, own, group=self.group.group, async_op=True)

        def last() -> tuple[Tensor, float]:
            work.wait()
            return _mean(code, every, len(values), values.dtype, rows)

        return MeanExchange([last], (self.group.count - 1) * own.numel())

    def _in_two_messages(self, code: VectorCode, values: Tensor, rows: float, lost: tuple[Tensor, ...]) -> MeanExchange:
        slices = self.slices(len(values))
        lost[0].add_(values)
        outgoing = []
        for piece in slices:
            own = lost[0][piece.start : piece.stop]
            outgoing.append(_with_rows(with_feedback(code, torch.zeros_like(own), own), rows))
        mine = slices[self.group.index]
        sizes = [len(one) for one in outgoing]
        coming = [sizes[self.group.index]] * len(slices)
        received = outgoing[0].new_empty(sum(coming))
        first: Any = dist.all_to_all_single(
            received, torch.cat(outgoing), coming, sizes, self.group.group, async_op=True
        )
        pending: dict[str, Any] = {}
        longest = code.size(len(slices[-1]))  # none is longer than the last one

        def middle() -> None:
            first.wait()
            found, pending["weight"] = _mean(code, received.chunk(len(slices)), len(mine), values.dtype, rows)
            own = with_feedback(code, found, lost[1])
            # All-gather takes equal lengths, and slices differ by one value.
            own = torch.nn.functional.pad(own, (0, longest - len(own)))
            pending["every"] = [torch.empty_like(own) for _ in slices]
            pending["work"] = dist.all_gather(pending["every"], own, group=self.group.group, async_op=True)

        def last() -> tuple[Tensor, float]:
            pending["work"].wait()
            pairs = zip(pending["every"], map(len, slices), strict=True)
            found = [code.decode(one[: code.size(length)], length, values.dtype) for one, length in pairs if length]
            return torch.cat([values.new_empty(0), *found]), pending["weight"]

        count = self.group.count
        return MeanExchange([middle, last], 2 * (count - 1) / count * sum(sizes))

    def slices(self, length: int) -> list[range]:
        """Return the slices of a vector that the replicas add up."""
        ends = [length * i // self.group.count for i in range(self.group.count + 1)]
        return [range(*pair) for pair in pairwise(ends)]


def _with_rows(sent: Tensor, rows: float) -> Tensor:
    """Append the number of rows to the bytes of a vector."""
    return torch.cat([sent, torch.tensor(list(struct.pack("<d", rows)), dtype=torch.uint8, device=sent.device)])


def _mean(
    code: VectorCode, every: Sequence[Tensor], length: int, dtype: torch.dtype, rows: float
) -> tuple[Tensor, float]:
    """Return the weighted mean of coded vectors, and the weight of this replica."""
    weights = [struct.unpack("<d", bytes(one[-8:].tolist()))[0] for one in every]
    total = sum(weights)
    found = torch.zeros(length, dtype=dtype, device=every[0].device)
    if length:
        for one, weight in zip(every, weights, strict=True):
            found += code.decode(one[:-8], length, dtype) * (weight / total)
    return found, rows / total
