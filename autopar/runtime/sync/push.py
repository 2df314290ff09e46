"""Asynchronous gradient push: half of a replica's mass goes to a neighbour, and nobody waits for anybody.

A replica has a weighted sum x and its weight w, and trains z = x / w. What is sent is taken off both, and added where
it arrives, so the sums over all replicas stay what they are however late a message is. A fast replica would halve its
weight again and again, and its steps would be too large by 1/w: what the optimizer does counts w times, and below a
least weight nothing is sent. Of the ranks of a replica that have the same shard the first one decides: the others
have other messages, and another weight.

M. Assran and M. Rabbat, "Asynchronous Gradient-Push", 2018; X. Lian et al., "Asynchronous Decentralized Parallel
Stochastic Gradient Descent", 2018.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.lowering.collectives.process_groups import limit_seconds_of
from autopar.lowering.collectives.start_group import choose_gloo_interface
from autopar.runtime.sync.meeting import Meeting, number
from autopar.runtime.sync.neighbours import distances

__all__ = ["PushMeeting"]

# Replicas with less weight keep what they have.
LEAST_WEIGHT = 0.3


class PushMeeting(Meeting):
    """Meetings with neighbours for whom a replica does not wait: one thread sends, and one for each source receives."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.x: Tensor | None = None
        self.w = 1.0
        # Parameters after the latest meeting: the rest is what the optimizer did.
        self._before = torch.empty(0)
        self._outbox: queue.Queue[tuple[int, Tensor] | None] = queue.Queue(maxsize=1)
        self._inbox: queue.Queue[Tensor] = queue.Queue()
        self._threads: list[threading.Thread] = []
        self._error: RuntimeError | None = None
        self._group: Any = None
        self.distances = distances(self.group.count)
        # Messages to and from the neighbour at each distance; the end of a stream counts.
        self._sent, self._received = [0] * len(self.distances), [0] * len(self.distances)
        self._meetings = 0

    def begin(self) -> None:
        if self.x is None:
            self._before = self.vector.read(0, self.vector.size).cpu()
            self.x = self._before.clone()
        if self._threads or self.group.count == 1:
            return
        # A group of its own, as its threads send while the replica does; on the host, where sends block a thread alone.
        choose_gloo_interface()
        self._group = dist.new_group(list(self.group.ranks), backend="gloo", use_local_synchronization=True)
        runs: list[Callable[[], None]] = [self._send]
        runs += [partial(self._receive, place) for place in range(len(self.distances))]
        self._threads = [threading.Thread(target=run, daemon=True) for run in runs]
        for thread in self._threads:
            thread.start()

    def after_step(self, step: int, rows: float) -> None:
        assert self.x is not None, "begun before the first step"
        self._raise()
        z = self.vector.read(0, self.vector.size).cpu()
        self.x.add_(z - self._before, alpha=self.w)
        self._take()
        if step % self.statement.every == 0 and self._threads and self._outbox.empty() and self.w > LEAST_WEIGHT:
            self.x /= 2
            self.w /= 2
            place = self._meetings % len(self.distances)
            self._meetings += 1
            self._put(place, torch.cat([self.x, self.x.new_full((1,), self.w)]))
            self.sent_bytes += self.x.numel() * self.x.element_size()
        self._store()

    def finish(self) -> None:
        """Take in all that is under way, and end the threads; all replicas call this together."""
        if not self._threads:
            return
        self._settle()
        for place in range(len(self.distances)):
            self._put(place, torch.full((self.vector.size + 1,), -1.0, dtype=self.vector.dtype))
        self._outbox.put(None)
        for thread in self._threads:
            thread.join(limit_seconds_of(self._group))
        self._threads = []
        self._raise()

    def _settle(self) -> None:
        """Wait until every message that was sent has come, and add it."""
        sent = torch.tensor(self._sent, device=self.vector.device)
        everyone = self.group.gathered(sent)
        sources = [(self.group.index - distance) % self.group.count for distance in self.distances]
        due = [everyone[source][place] for place, source in enumerate(sources)]
        ends = time.monotonic() + limit_seconds_of(self._group)
        while self._received != due:
            self._raise()
            if time.monotonic() > ends:
                raise RuntimeError(f"messages of replicas are missing: expected {due}, got {self._received}")
            time.sleep(1e-3)
        self._take()
        self._store()

    def _take(self) -> None:
        """Add the messages that have come."""
        assert self.x is not None, "begun before the first step"
        while not self._inbox.empty():
            found = self._inbox.get()
            self.x += found[:-1]
            self.w += float(found[-1])

    def _store(self) -> None:
        assert self.x is not None, "begun before the first step"
        self._before = self.x / self.w
        if self.group.replica_size > 1:
            self.vector.agree(self._before)
            self.x = self._before * self.w
        self.vector.write(0, self.vector.size, self._before.to(self.vector.device))

    def _put(self, place: int, message: Tensor) -> None:
        self._sent[place] += 1
        self._outbox.put((place, message))

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    # -- threads -------------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        try:
            while (found := self._outbox.get()) is not None:
                place, message = found
                target = (self.group.index + self.distances[place]) % self.group.count
                dist.send(message, self.group.ranks[target], group=self._group, tag=place)
        except RuntimeError as error:
            self._error = error

    def _receive(self, place: int) -> None:
        source = self.group.ranks[(self.group.index - self.distances[place]) % self.group.count]
        try:
            while True:
                message = torch.empty(self.vector.size + 1, dtype=self.vector.dtype)
                dist.recv(message, source, group=self._group, tag=place)
                if float(message[-1]) < 0:  # no weight: the end
                    return
                self._inbox.put(message)
                self._received[place] += 1
        except RuntimeError as error:
            self._error = error

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        self.begin()
        if self._threads:
            self._settle()
        return {}, {"weight": number(self.w), "meetings": number(self._meetings)}

    def load(self, common: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        self.begin()
        self.w, self._meetings = float(own["weight"]), int(own["meetings"])

    def loaded(self) -> None:
        """Take the parameters that were loaded after the rest of the state."""
        self._before = self.vector.read(0, self.vector.size).cpu()
        self.x = self._before * self.w
