"""Passing of keys and values from rank to rank, bound to one rank.

Each hop is an all-to-all in which every rank sends to the next one alone. Libraries run it as one send and one receive,
in the order of all other collectives of the group, so ranks cannot wait for each other in a circle.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.lowering.collectives.process_groups import Groups
from autopar.sharding.lowered_ops.ring_attention import RingPass

__all__ = ["LocalKeyRing"]


@dataclass(frozen=True)
class LocalKeyRing:
    """Ring of the ranks of a group; it sends to the next place and receives from the one before."""

    message: RingPass
    place: int
    # By place, the number of the rank in the group.
    members: tuple[int, ...]
    group: str
    most_places: int | None = None

    @classmethod
    def bind(cls, message: RingPass, groups: Groups) -> LocalKeyRing:
        """Bind a ring to this rank; all ranks of the mesh bind the same ones, in the same order."""
        group = groups.of(message.axes)
        at = [message.place({**groups.coordinate, **member}) for member in group.members]
        members = tuple(at.index(place) for place in range(len(at)))
        return cls(message, message.place(groups.coordinate), members, group.name)

    def begin(self, message: Tensor, received: int) -> Tensor:
        """Begin a hop; the result must not be read before `end`."""
        count = len(self.members)
        sent, expected = [0] * count, [0] * count
        sent[self.members[(self.place + 1) % count]] = message.numel()
        expected[self.members[(self.place - 1) % count]] = received
        begun: Tensor = torch.ops._c10d_functional.all_to_all_single(message.contiguous(), expected, sent, self.group)
        return begun

    def end(self, message: Tensor) -> Tensor:
        """Wait for a hop."""
        ended: Tensor = torch.ops._c10d_functional.wait_tensor(message)
        return ended
