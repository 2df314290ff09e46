"""Replicas meet in the mean of all: local SGD, DiLoCo, streaming DiLoCo, and the mean of gradients.

    delta_i = anchor - x_i
    d       = sum_i w_i decode(code(delta_i + lost_i)),     w_i = rows of replica i / rows of all
    anchor <- outer(anchor, d)
    x_i    <- anchor,     or  x_i / 2 + anchor / 2  where the meeting ends `late` steps after it began

Where the outer optimizer takes the mean as it is and nothing is coded, the replicas send x_i, and no anchor is stored.
S. Stich, "Local SGD Converges Fast and Communicates Little", 2019; T. Lin et al., "Don't Use Large Mini-batches, Use
Local SGD", 2020; A. Douillard et al., "DiLoCo", 2023, and "Streaming DiLoCo with overlapping communication", 2025.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.sync.mean_exchange import MeanExchange, SendMean
from autopar.runtime.sync.meeting import Meeting, number
from autopar.runtime.sync.replica_group import ReplicaGroup
from autopar.runtime.sync.shard_vector import ShardVector
from autopar.sharding.layout.drift import DriftStatement, OuterOptimizer

__all__ = ["MeanMeeting", "outer_step"]


def outer_step(outer: OuterOptimizer, anchor: Tensor, delta: Tensor, momentum: Tensor | None) -> None:
    """Move the anchor against a gradient, as `torch.optim.SGD` does."""
    if momentum is not None:
        momentum.mul_(outer.momentum).add_(delta)
        delta = delta + outer.momentum * momentum if outer.kind == "nesterov" else momentum
    anchor.sub_(delta, alpha=outer.learning_rate)


@dataclass
class _MeetingPart:
    """Range of the vector that meets by itself."""

    start: int
    stop: int
    # Steps after the first part.
    offset: int
    # Rows that this replica has trained on since the meeting before.
    rows: float = 0.0
    # Meeting under way, and the step that it began at.
    exchange: MeanExchange | None = None
    began: int = 0
    lost: tuple[Tensor, ...] = field(default=())


class MeanMeeting(Meeting):
    """Meetings in the mean of all replicas."""

    def __init__(
        self, statement: DriftStatement, vector: ShardVector, group: ReplicaGroup, send: SendMean | None = None
    ) -> None:
        super().__init__(statement, vector, group)
        self.send = send or SendMean(group, statement.coder)
        self.anchor: Tensor | None = None
        self.momentum: Tensor | None = None
        count = statement.parts
        ends = [vector.size * i // count for i in range(count + 1)]
        self.parts = [
            _MeetingPart(start, stop, i * statement.every // count, lost=self.send.lost(stop - start, vector))
            for i, (start, stop) in enumerate(pairwise(ends))
        ]

    def common(self) -> Tensor | None:
        self.begin()
        return self.anchor

    def begin(self) -> None:
        if self.statement.has_anchor and self.anchor is None:
            self.anchor = self.vector.read(0, self.vector.size)
            if self.statement.outer.momentum:
                self.momentum = torch.zeros_like(self.anchor)

    # -- gradients, before a step --------------------------------------------------------------------------------------

    def before_step(self, rows: float) -> None:
        if self.statement.every:
            return
        (part,) = self.parts
        if self.statement.coder is not None:
            ranges = [(part.start, part.stop)]  # what is lost belongs to the whole vector
        else:
            ranges = self.vector.buckets(part.start, part.stop)
        for start, stop in ranges:
            exchange = self._exchange(self.vector.read_gradients(start, stop), rows, part.lost)
            self.vector.write_gradients(start, stop, exchange.result())
            self.weight = exchange.weight

    # -- parameters, after a step --------------------------------------------------------------------------------------

    def after_step(self, step: int, rows: float) -> None:
        every, count = self.statement.every, step - self.statement.warmup
        if not every:
            return
        for part in self.parts:
            part.rows += rows
            if count <= 0:
                self._average(part)
                continue
            self._advance(part, step)
            if count >= every and (count - part.offset) % every == 0:
                self._start(part, step)
                self._advance(part, step)

    def finish(self) -> None:
        for part in self.parts:
            self._end(part)

    def _average(self, part: _MeetingPart) -> None:
        """Take the mean, without the outer optimizer."""
        rows, part.rows = part.rows, 0.0
        pending: list[tuple[int, int, MeanExchange]] = []
        for start, stop in self.vector.buckets(part.start, part.stop):
            pending.append((start, stop, self._exchange(self.vector.read(start, stop), rows, whole=True)))
            if len(pending) > 1:  # one bucket is sent while the next one is read
                self._store(*pending.pop(0))
        for one in pending:
            self._store(*one)

    def _store(self, start: int, stop: int, exchange: MeanExchange) -> None:
        mean = exchange.result()
        self.weight = exchange.weight
        self.vector.write(start, stop, mean)
        if self.anchor is not None:
            self.anchor[start:stop] = mean

    def _start(self, part: _MeetingPart, step: int) -> None:
        if self.anchor is None and not self.statement.late:
            self._average(part)
            return
        x = self.vector.read(part.start, part.stop)
        sent = x if self.anchor is None else self.anchor[part.start : part.stop] - x
        part.exchange, part.began = self._exchange(sent, part.rows, part.lost), step
        part.rows = 0.0

    def _advance(self, part: _MeetingPart, step: int) -> None:
        """Do what a meeting under way has to do at this step."""
        if part.exchange is None:
            return
        if step >= part.began + self.statement.late:
            self._end(part)
        elif step >= part.began + (self.statement.late + 1) // 2:
            part.exchange.second_message()

    def _end(self, part: _MeetingPart) -> None:
        if part.exchange is None:
            return
        mean = part.exchange.result()
        self.weight, part.exchange = part.exchange.weight, None
        if self.anchor is not None:
            anchor = self.anchor[part.start : part.stop]
            momentum = None if self.momentum is None else self.momentum[part.start : part.stop]
            outer_step(self.statement.outer, anchor, mean, momentum)
            mean = anchor
        if self.statement.late:  # what this replica has trained since the meeting began counts for a half
            mean = (mean + self.vector.read(part.start, part.stop)) / 2
        self.vector.write(part.start, part.stop, mean)

    def _exchange(
        self, values: Tensor, rows: float, lost: tuple[Tensor, ...] = (), whole: bool = False
    ) -> MeanExchange:
        exchange = self.send.begin(values, rows, lost, whole)
        self.sent_bytes += exchange.sent_bytes
        return exchange

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        self.begin()
        common: dict[str, Tensor] = {}
        own: dict[str, Tensor] = {}
        for name, held in (("anchor", self.anchor), ("momentum", self.momentum)):
            if held is not None:
                common |= self.vector.tensors(held, name)
        coming = torch.zeros(self.vector.size, dtype=self.vector.dtype, device=self.vector.device)
        for i, part in enumerate(self.parts):
            if part.exchange is not None:
                coming[part.start : part.stop] = part.exchange.result()
            own[f"rows.{i}"] = number(part.rows)
            common[f"began.{i}"] = number(part.began if part.exchange is not None else -1)
        if self.statement.late:
            common |= self.vector.tensors(coming, "coming")
        for message, places in enumerate(self._lost_places()):
            whole = torch.zeros_like(coming)
            for part, (start, stop) in zip(self.parts, places, strict=True):
                whole[start:stop] = part.lost[message]
            own |= self.vector.tensors(whole, f"lost.{message}")
        return common, own

    def _lost_places(self) -> list[list[tuple[int, int]]]:
        """Return for each message the range of the vector that each part has lost something of."""
        messages = len(self.parts[0].lost)
        # The second message loses something of the slice that this replica adds up.
        slices = [self.send.slices(part.stop - part.start)[self.group.index] for part in self.parts]
        second = [(p.start + one.start, p.start + one.stop) for p, one in zip(self.parts, slices, strict=True)]
        return [[(part.start, part.stop) for part in self.parts], second][:messages]

    def load(self, common: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        for name in ("anchor", "momentum"):
            if getattr(self, name) is not None:
                setattr(self, name, self.vector.vector(common, name))
        coming = self.vector.vector(common, "coming") if self.statement.late else None
        for i, part in enumerate(self.parts):
            part.rows, part.began = float(own[f"rows.{i}"]), int(common[f"began.{i}"])
            part.exchange = None
            if coming is not None and part.began >= 0:
                part.exchange = MeanExchange.of_result(coming[part.start : part.stop].clone(), self.weight)
        for message, places in enumerate(self._lost_places()):
            whole = self.vector.vector(own, f"lost.{message}")
            for part, (start, stop) in zip(self.parts, places, strict=True):
                part.lost[message].copy_(whole[start:stop])
