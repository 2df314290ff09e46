"""Replicas meet with neighbours: on a ring (D-PSGD), or at distances 1, 2, 4, ... (stochastic gradient push).

    ring         x_i <- (x_left + x_i + x_right) / 3
    exponential  x_i <- (x_i + x_j) / 2,    j = i - 2^(meeting mod log n)

Both keep the mean of all replicas. X. Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?",
2017; M. Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", 2019.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.sync.meeting import Meeting, number

__all__ = ["NeighbourMeeting", "distances"]


def distances(count: int) -> tuple[int, ...]:
    """Return the distances to the neighbours of `exponential`, in the order of its meetings."""
    return tuple(2**power for power in range(max(1, (count - 1).bit_length())))


class NeighbourMeeting(Meeting):
    """Meetings with the neighbours of a replica."""

    # Meetings so far, which decide the neighbour.
    meetings = 0

    def after_step(self, step: int, rows: float) -> None:
        if step % self.statement.every or self.group.count == 1:
            return
        me, count = self.group.index, self.group.count
        if self.statement.meeting == "ring":
            targets = sources = [(me + 1) % count, (me - 1) % count]
        else:
            every = distances(count)
            distance = every[self.meetings % len(every)]
            targets, sources = [(me + distance) % count], [(me - distance) % count]
        self.meetings += 1
        for start, stop in self.vector.buckets(0, self.vector.size):
            own = self.vector.read(start, stop)
            received = self._exchange(own, targets, sources)
            self.vector.write(start, stop, sum(received, own) / (len(received) + 1))
            self.sent_bytes += own.numel() * own.element_size() * len(targets)

    def _exchange(self, own: Tensor, targets: list[int], sources: list[int]) -> list[Tensor]:
        """Send a vector to some replicas, and return those of others."""
        received = [torch.empty_like(own) for _ in sources]
        ranks, group = self.group.ranks, self.group.group
        # On a ring of two both neighbours are one replica: the tag tells its two messages apart.
        sends = [dist.P2POp(dist.isend, own, ranks[one], group, i) for i, one in enumerate(targets)]
        back = reversed(range(len(sources))) if len(sources) > 1 else range(1)
        receives = [
            dist.P2POp(dist.irecv, x, ranks[one], group, tag)
            for x, one, tag in zip(received, sources, back, strict=True)
        ]
        for work in dist.batch_isend_irecv([*sends, *receives]):
            work.wait()
        return received

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return {"meetings": number(self.meetings)}, {}

    def load(self, common: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        self.meetings = int(common["meetings"])
