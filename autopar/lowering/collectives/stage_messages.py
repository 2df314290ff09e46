"""Messages between the stages of a pipeline: values of micro-batches, and their gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from autopar.sharding.schedules import Schedule, StageMessage, StageTask

__all__ = ["Crossing", "MessageExchange", "ResultMessage", "StageGroup", "StageMessages", "receive", "send"]

# Sends of one route and direction that may be under way before the stage waits for the oldest of them.
MOST_SENDS = 2
# Bytes of a route and direction that are received ahead of the program, where the order of messages is free: at least
# the next message, whose transfer then begins as soon as it is sent.
BYTES_AHEAD = 2**22
# Results of at most as many bytes travel together.
MOST_JOINED_BYTES = 4096


@dataclass(frozen=True)
class StageGroup:
    """Ranks along the axis of the stages, and the schedule that they run."""

    # Of values, and of gradients: a library may run the messages of a group one after the other.
    groups: tuple[ProcessGroup, ProcessGroup]
    # Global rank of each stage.
    ranks: tuple[int, ...]
    stage: int
    schedule: Schedule
    chunks: int
    more: int
    # True if messages find each other by their tags, so that a stage may post receives before its program says so.
    by_tag: bool = False

    def stage_of(self, part: int) -> int:
        return part % len(self.ranks)

    def part_of(self, task: StageTask) -> int:
        return task.chunk * len(self.ranks) + self.stage


@dataclass(frozen=True)
class Crossing:
    """Value that a part makes and other parts read, on one micro-batch and this rank's coordinates."""

    name: str
    source: int
    targets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool


def send(x: Tensor, group: ProcessGroup, place: int, tag: int = 0) -> Any:
    """Begin to send a tensor to a place in a group.

    The function of torch with this name looks up the place of the rank, which takes as long as the message itself.
    """
    return group.send([x], place, tag)


def receive(x: Tensor, group: ProcessGroup, place: int, tag: int = 0) -> Any:
    """Begin to receive a tensor from a place in a group."""
    return group.recv([x], place, tag)


@dataclass(frozen=True)
class _Envelope:
    """Message of this stage: the other end, and the tensor in it."""

    message: StageMessage
    is_sent: bool
    # The stage at the other end, the part that reads the message, and the place in the group.
    other: int
    target: int
    group: ProcessGroup
    place: int
    tag: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    # True if a message comes back, which proves that this one has arrived.
    is_answered: bool

    def failure(self, stage: int, error: RuntimeError) -> RuntimeError:
        """Return an error of the process group that names the message."""
        what = "gradient" if self.message.backward else "forward"
        number = self.message.micro_batch
        if self.is_sent:
            text = f"stage {stage} waits until stage {self.other} has received the {what} of micro-batch {number}"
        else:
            text = f"stage {stage} waits for the {what} of micro-batch {number} from stage {self.other}"
        return RuntimeError(f"{text}, into part {self.target}: {error}")


class _PendingSend(NamedTuple):
    envelope: _Envelope
    work: Any
    # The send reads its memory until it ends.
    x: Tensor


class StageMessages:
    """All messages of one stage in a step, prepared once."""

    def __init__(self, stages: StageGroup, crossings: Iterable[Crossing], program: Iterable[object]) -> None:
        self.stages = stages
        self.routed = tuple((one, target) for one in crossings for target in one.targets)
        # Places of the routes, by the name of the value and the part that reads it.
        self.numbers = {(one.name, target): number for number, (one, target) in enumerate(self.routed)}
        messages = [item for item in program if isinstance(item, StageMessage)]
        self._count = 1 + max((message.micro_batch for message in messages), default=0)
        # Places of the stages in their groups.
        self.places = [dist.get_group_rank(stages.groups[0], rank) for rank in stages.ranks]
        self.envelopes = {message: self._envelope(message) for message in messages}
        # Receives to post where the program has one.
        self.posted = self._posted()

    def _posted(self) -> dict[StageMessage, list[StageMessage]]:
        by_way: dict[tuple[int, bool], list[StageMessage]] = {}
        for message, one in self.envelopes.items():
            if not one.is_sent:
                by_way.setdefault((message.route, message.backward), []).append(message)
        found: dict[StageMessage, list[StageMessage]] = {}
        for messages in by_way.values():
            ahead = 0
            if self.stages.by_tag:
                one = self.envelopes[messages[0]]
                ahead = max(1, BYTES_AHEAD // max(1, prod(one.shape) * one.dtype.itemsize))
            # The first posts those ahead of it, the others one each.
            for place, message in enumerate(messages):
                found[message] = messages[place + ahead : place + ahead + 1] if place else messages[: 1 + ahead]
        return found

    def _envelope(self, message: StageMessage) -> _Envelope:
        stages = self.stages
        one, into = self.routed[message.route]
        source, target = (into, one.source) if message.backward else (one.source, into)
        is_sent = stages.stage_of(source) == stages.stage
        other = stages.stage_of(target if is_sent else source)
        tag = (2 * message.route + message.backward) * self._count + message.micro_batch
        return _Envelope(
            message,
            is_sent,
            other,
            target,
            stages.groups[message.backward],
            self.places[other],
            tag,
            one.shape,
            one.dtype,
            is_sent and not message.backward and one.differentiable,
        )


class MessageExchange:
    """Messages of one pass of a stage.

    The program of the stage says where each message is sent, or its receive posted. It is waited for where its value is
    read. All stages post their messages in one order, so a wait for an earlier send ends.
    """

    def __init__(self, messages: StageMessages, like: Tensor, has_backward: bool) -> None:
        self.messages, self.like, self.has_backward = messages, like, has_backward
        # Values and gradients of this stage, until they are sent or read here.
        self.made: dict[StageMessage, Tensor] = {}
        # Receives that are posted.
        self.coming: dict[StageMessage, tuple[Any, Tensor]] = {}
        # Sends whose answer is still to come, by route and micro-batch, and others by route and direction.
        self.answered: dict[tuple[int, int], _PendingSend] = {}
        self.sending: dict[tuple[int, bool], deque[_PendingSend]] = {}

    def put(self, route: int, micro_batch: int, x: Tensor, backward: bool) -> None:
        """Keep a value for the part that reads it, or its gradient for the part that makes it."""
        self.made[StageMessage(route, micro_batch, backward)] = x

    def exchange(self, message: StageMessage) -> None:
        """Send a message that this stage has made, or post its receive and those ahead of it."""
        one = self.messages.envelopes[message]
        if not one.is_sent:
            for other in self.messages.posted[message]:
                self._post(other)
            return
        x = self.made.pop(message).contiguous()
        try:
            sent = _PendingSend(one, send(x, one.group, one.place, one.tag), x)
        except RuntimeError as error:
            raise one.failure(self.messages.stages.stage, error) from error
        if one.is_answered and self.has_backward:
            self.answered[message.route, message.micro_batch] = sent
            return
        under_way = self.sending.setdefault((message.route, message.backward), deque())
        under_way.append(sent)
        if len(under_way) > MOST_SENDS:
            self._end(under_way.popleft())

    def _post(self, message: StageMessage) -> None:
        """Begin to receive a message."""
        one = self.messages.envelopes[message]
        x = self.like.new_empty(one.shape, dtype=one.dtype)
        try:
            self.coming[message] = receive(x, one.group, one.place, one.tag), x
        except RuntimeError as error:
            raise one.failure(self.messages.stages.stage, error) from error

    def received(self, route: int, micro_batch: int, backward: bool) -> Tensor:
        """Return a value for a part, or its gradient."""
        message = StageMessage(route, micro_batch, backward)
        own = self.made.pop(message, None)
        if own is not None:
            return own.detach()
        work, x = self.coming.pop(message)
        try:
            work.wait()
        except RuntimeError as error:
            raise self.messages.envelopes[message].failure(self.messages.stages.stage, error) from error
        if backward and (answered := self.answered.pop((route, micro_batch), None)) is not None:
            self._end(answered)
        return x

    def finish(self) -> None:
        """Wait for all sends."""
        for one in (*self.answered.values(), *chain(*self.sending.values())):
            self._end(one)
        self.answered, self.sending = {}, {}

    def _end(self, sent: _PendingSend) -> None:
        """Wait for a send."""
        try:
            sent.work.wait()
        except RuntimeError as error:
            raise sent.envelope.failure(self.messages.stages.stage, error) from error


@dataclass(frozen=True)
class ResultMessage:
    """Results of one stage, which all other stages receive in one message."""

    source: int
    # Places of the results among all of them.
    places: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, results: Sequence[tuple[int, tuple[int, ...], torch.dtype]]) -> list[ResultMessage]:
        """Return the messages of results, by the stage, shape and dtype of each; small ones of a stage are joined."""
        by_source: dict[tuple[int, int], list[int]] = {}
        for place, (source, shape, dtype) in enumerate(results):
            is_small = prod(shape) * dtype.itemsize <= MOST_JOINED_BYTES
            by_source.setdefault((source, -1 if is_small else place), []).append(place)
        found = []
        for (source, _), places in by_source.items():
            # The widest dtype first, so that all of them are aligned.
            places.sort(key=lambda place: -results[place][2].itemsize)
            shapes = tuple(results[place][1] for place in places)
            found.append(cls(source, tuple(places), shapes, tuple(results[place][2] for place in places)))
        return found

    def share(self, stages: StageGroup, values: Sequence[Tensor], like: Tensor) -> Sequence[Tensor]:
        """Return the results on all stages; the values are those of the source, and empty elsewhere."""
        if len(stages.ranks) == 1:
            return values
        is_source = self.source == stages.stage
        if len(self.places) == 1:
            x = values[0] if is_source else like.new_empty(self.shapes[0], dtype=self.dtypes[0])
            dist.broadcast(x, stages.ranks[self.source], stages.groups[0])
            return [x]
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True)]
        if is_source:
            joined = torch.cat([x.reshape(-1).view(torch.uint8) for x in values])
        else:
            joined = like.new_empty(sum(sizes), dtype=torch.uint8)
        dist.broadcast(joined, stages.ranks[self.source], stages.groups[0])
        if is_source:
            return values
        tables = zip(torch.split(joined, sizes), self.shapes, self.dtypes, strict=True)
        # Copies, as results of a call share no memory.
        return [part.view(dtype).reshape(shape).clone() for part, shape, dtype in tables]
