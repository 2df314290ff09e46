"""All-reduces by level on one rank: their groups and phases, run at once or a phase at a time.

They work on flat buffers of any length, padded to a multiple of the ranks of each group that scatters them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from autopar.lowering.collectives.gather import begin_gather

__all__ = ["LevelChain", "LevelGroups", "sum_by_level"]


@dataclass(frozen=True)
class LevelGroups:
    """Process groups of an all-reduce by level, as name and ranks: the fast ones first, the last is all-reduced."""

    groups: tuple[tuple[str, int], ...]
    least_bytes: float
    most_bytes: float

    @property
    def phases(self) -> int:
        return 2 * len(self.groups) - 1

    def lengths(self, numel: int) -> tuple[int, ...]:
        """Return the elements of a buffer before each reduce-scatter, without padding, and after the last one."""
        found = [numel]
        for _, ranks in self.groups[:-1]:
            found.append(-(-found[-1] // ranks))
        return tuple(found)

    def begin(self, number: int, x: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """Begin a phase on the result of the one before it, which has arrived; the result may be pending."""
        ops, scattered = torch.ops._c10d_functional, len(self.groups) - 1
        sent: Tensor
        if number == scattered:
            sent = ops.all_reduce(x, "sum", self.groups[-1][0])
        elif number < scattered:
            group, ranks = self.groups[number]
            padding = lengths[number + 1] * ranks - lengths[number]
            sent = ops.reduce_scatter_tensor(pad(x, (0, padding)) if padding else x, "sum", ranks, group)
        else:
            place = 2 * scattered - number
            group, ranks = self.groups[place]
            # The padding of the phases inside goes before the outer ones gather.
            sent = begin_gather(x[: lengths[place + 1]].contiguous(), ranks, group)
        return sent


def sum_by_level(buffer: Tensor, level: LevelGroups) -> Tensor:
    """Return the sum of a flat buffer over all ranks of the groups, which may be pending."""
    lengths, x = level.lengths(buffer.numel()), buffer
    for number in range(level.phases):
        x = level.begin(number, x, lengths)
        # In compiled code also the last one: the compiler may cut the result before a later wait.
        if number < level.phases - 1 or torch.compiler.is_compiling():
            x = torch.ops._c10d_functional.wait_tensor(x)
    return x[: lengths[0]]


@dataclass(eq=False)
class LevelChain:
    """All-reduce by level of a buffer in place: each phase begins when somebody comes by, so none is waited for."""

    buffer: Tensor
    level: LevelGroups
    begun: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.lengths = self.level.lengths(self.buffer.numel())
        self.latest = self.buffer
        self.advance()

    def advance(self) -> None:
        """Begin the next phase, if there is one."""
        if self.begun < self.level.phases:
            x = torch.ops._c10d_functional.wait_tensor(self.latest) if self.begun else self.latest
            self.latest = self.level.begin(self.begun, x, self.lengths)
            self.begun += 1

    def finish(self) -> None:
        """Run all phases that are left, and write the sum into the buffer."""
        while self.begun < self.level.phases:
            self.advance()
        self.buffer.copy_(torch.ops._c10d_functional.wait_tensor(self.latest)[: self.lengths[0]])
