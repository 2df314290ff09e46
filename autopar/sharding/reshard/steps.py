"""One step of a conversion between layouts, and what sending costs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from autopar.sharding.sharding import Sharding

__all__ = ["LOCAL", "LinkCost", "Step", "StepKind"]


class StepKind(Enum):
    """The order is the order of preference between equally cheap steps."""

    SLICE = "slice"
    KEEP_ONE = "keep_one"
    PAD = "pad"
    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"
    HALO_EXCHANGE = "halo_exchange"
    """Of no conversion: windows that slide along a split dim (convolutions) need the edges of the neighbours."""


LOCAL = frozenset((StepKind.SLICE, StepKind.KEEP_ONE, StepKind.PAD))


@dataclass(frozen=True)
class LinkCost:
    """What sending costs along an axis, in any unit that all axes share: by default, elements sent."""

    per_element: float = 1.0
    per_collective: float = 0.0


@dataclass(frozen=True)
class Step:
    """One step of one direction.

    `axes` are the axes it is over, major to minor as they cut `atom` where it cuts one; an all-to-all cuts `to_atom`
    by `to_axes` instead (the same axes; the same atom where only their order changes). The numbers hold for the rank
    that has most to do: `numel` is the size of the buffer that the collective works on (what is reduced, gathered or
    exchanged, padding included), `sent_numel` what a bandwidth-optimal algorithm sends of it.
    """

    kind: StepKind
    axes: tuple[str, ...]
    atom: int | None
    before: Sharding
    after: Sharding
    to_atom: int | None = None
    to_axes: tuple[str, ...] = ()
    numel: int = 0
    sent_numel: int = 0

    @property
    def local(self) -> bool:
        """Whether it sends nothing."""
        return self.kind in LOCAL

    def __str__(self) -> str:
        text = f"{self.kind.value}({'*'.join(self.axes)})"
        if self.atom is not None:
            text += f" {self.atom}"
        return text if self.to_atom is None else f"{text} -> {self.to_atom}({'*'.join(self.to_axes)})"
