"""Simulator of messages between ranks, which knows no formula of the cost model.

A rank has a port out and a port in. On two levels, messages between nodes pass the NICs of both nodes; a rank has a NIC
of its own or shares one. A message takes the sender's port for the time of its bytes, begins to arrive a latency after
it began to leave, and takes the receiver's port for as long. A program is a list of steps; a rank posts all messages of
a step at once, and its next step begins when they have ended. Messages that wait for a port go in the order of posting.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

# A rank, or a rank and one of its threads: threads share the ports of their rank.
Place = int | tuple[int, str]


class Message(NamedTuple):
    """A message as one of its ends posts it."""

    sends: bool
    other: Place
    size: float
    tag: str


def send(other: Place, size: float, tag: str) -> Message:
    return Message(True, other, size, tag)


def receive(other: Place, tag: str) -> Message:
    return Message(False, other, 0.0, tag)


Programs = Mapping[Place, Sequence[Sequence[Message]]]


@dataclass(frozen=True)
class Link:
    seconds: float
    seconds_per_byte: float


@dataclass(frozen=True)
class Wires:
    """Links inside nodes and between them."""

    inside: Link
    between: Link
    per_node: int
    nics: int
    # Time for which the start of a message takes the sender's port.
    occupied: float = 0.0

    def path(self, source: int, target: int) -> tuple[Link, tuple[str, int, int], tuple[str, int, int]]:
        nodes, places = ((source // self.per_node, target // self.per_node), (source, target))
        if nodes[0] == nodes[1]:
            return self.inside, ("out", *divmod(source, self.per_node)), ("in", *divmod(target, self.per_node))
        nics = [place % self.per_node % self.nics for place in places]
        return self.between, ("nic out", nodes[0], nics[0]), ("nic in", nodes[1], nics[1])


def rank_of(place: Place) -> int:
    return place if isinstance(place, int) else place[0]


class _Run:
    def __init__(self, wires: Wires, programs: Programs) -> None:
        self.wires, self.programs = wires, programs
        self.step = dict.fromkeys(programs, 0)
        self.open = dict.fromkeys(programs, 0)
        self.free: dict[tuple[str, int, int], float] = {}
        self.arrived: set[tuple[Place, Place, str]] = set()
        self.wanted: set[tuple[Place, Place, str]] = set()
        self.events: list[tuple[float, int, str, Place, Message, Link]] = []
        self.numbers = count()
        self.end = 0.0

    def seconds(self) -> float:
        for place in self.programs:
            self._post(place, 0.0)
        while self.events:
            now, _, what, place, message, link = heapq.heappop(self.events)
            self.end = max(self.end, now)
            if what == "sent":
                self._ended(place, now)
            elif what == "begins to arrive":
                _, _, port = self.wires.path(rank_of(place), rank_of(message.other))
                self._add(self._through(port, now, message.size * link.seconds_per_byte), "came", place, message, link)
            else:
                key = place, message.other, message.tag
                if key in self.wanted:
                    self.wanted.remove(key)
                    self._ended(message.other, now)
                else:
                    self.arrived.add(key)
        assert all(self.step[place] == len(steps) for place, steps in self.programs.items()), "ranks wait for ever"
        assert not self.arrived, "a message that nobody receives"
        return self.end

    def _add(self, at: float, what: str, place: Place, message: Message, link: Link) -> None:
        heapq.heappush(self.events, (at, next(self.numbers), what, place, message, link))

    def _through(self, port: tuple[str, int, int], now: float, duration: float) -> float:
        """Return when a message that comes now has passed a port."""
        self.free[port] = max(now, self.free.get(port, 0.0)) + duration
        return self.free[port]

    def _post(self, place: Place, now: float) -> None:
        steps = self.programs[place]
        while self.step[place] < len(steps) and not self.open[place]:
            for message in steps[self.step[place]]:
                if message.sends:
                    self._start(place, message, now)
                    self.open[place] += 1
                elif (key := (message.other, place, message.tag)) in self.arrived:
                    self.arrived.remove(key)
                else:
                    self.wanted.add(key)
                    self.open[place] += 1
            if not self.open[place]:
                self.step[place] += 1

    def _start(self, place: Place, message: Message, now: float) -> None:
        link, port, _ = self.wires.path(rank_of(place), rank_of(message.other))
        sending = self.wires.occupied + message.size * link.seconds_per_byte
        sent = self._through(port, now, sending)
        self._add(sent, "sent", place, message, link)
        self._add(sent - sending + link.seconds, "begins to arrive", place, message, link)

    def _ended(self, place: Place, now: float) -> None:
        self.open[place] -= 1
        if not self.open[place]:
            self.step[place] += 1
            self._post(place, now)


def simulate(wires: Wires, programs: Programs) -> float:
    """Return the seconds until all programs have ended."""
    return _Run(wires, programs).seconds()
