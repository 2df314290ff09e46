"""The steps of conversions, found once for all tensors that are cut alike.

`reshard` finds the cheapest steps by a search over layouts. What it finds does not depend on dims that no axis touches,
nor on how long a dim is that all axes divide: so one search on a small tensor serves many large ones, and sizes scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from autopar.layout.state import Atoms, Layout
from autopar.reshard import steps

__all__ = ["Leg", "Routes"]


class Leg(NamedTuple):
    """One step: its kind and axes, what the collective works on, what there is before, the more of before and after."""

    kind: str
    axes: tuple[str, ...]
    numel: float
    local: bool
    before: float
    larger: float


@dataclass
class Routes:
    """The conversions of one mesh."""

    axes: Mapping[str, int]
    small: dict[tuple[tuple[int, ...], Layout, Layout], tuple[Leg, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ranks = prod(self.axes.values())

    def of(self, sizes: tuple[int, ...], source: Layout, target: Layout) -> tuple[Leg, ...]:
        """The steps from one value layout to another, of a tensor with atoms of these sizes."""
        if source.splits == target.splits and source.partial == target.partial:
            return ()
        kept = self._kept(sizes, source, target)
        shrunk = tuple(size for _, size in kept)
        places = [i for i, _ in kept]
        key = (
            shrunk,
            Layout(tuple(source.splits[i] for i in places), source.partial),
            Layout(tuple(target.splits[i] for i in places), target.partial),
        )
        legs = self.small.get(key)
        if legs is None:
            legs = self.small[key] = self._found(*key)
        scale = prod(sizes) / max(prod(shrunk), 1)
        return tuple(
            Leg(leg.kind, leg.axes, leg.numel * scale, leg.local, leg.before * scale, leg.larger * scale)
            for leg in legs
        )

    def _kept(self, sizes: tuple[int, ...], source: Layout, target: Layout) -> list[tuple[int, int]]:
        """The atoms that matter, with the sizes that stand for theirs."""
        touched = [i for i in range(len(sizes)) if source.splits[i] or target.splits[i]]
        helper = self._helper(sizes, source, target)
        largest = max([self.ranks, *(sizes[i] for i in touched if sizes[i] % self.ranks)])
        kept = []
        for i in sorted({*touched, *helper}):
            if sizes[i] % self.ranks or not sizes[i]:
                kept.append((i, sizes[i]))
            else:
                kept.append((i, self.ranks * (1 + largest) if i in helper else self.ranks))
        return kept

    def _helper(self, sizes: tuple[int, ...], source: Layout, target: Layout) -> list[int]:
        """The atom that may serve on the way, as the search over conversions picks it."""
        cut: set[int] = set()
        kept = source.partial & target.partial
        for i, (before, after) in enumerate(zip(source.splits, target.splits, strict=True)):
            common = 0
            while common < min(len(before), len(after)) and before[common] == after[common]:
                common += 1
            kept = kept | set(before[:common])
            if before[common:] or after[common:]:
                cut.add(i)
        mentioned = {*source.axes, *target.axes}
        count = prod(size for axis, size in self.axes.items() if axis in mentioned and axis not in kept)
        others = [i for i in range(len(sizes)) if i not in cut]
        return sorted(others, key=lambda i: (sizes[i] % count != 0, -sizes[i], i))[:1]

    def _found(self, sizes: tuple[int, ...], source: Layout, target: Layout) -> tuple[Leg, ...]:
        atoms = Atoms(sizes, (1,) * len(sizes))
        first = dict.fromkeys(self.axes, 0)
        legs = []
        for step in steps(atoms, source, target, self.axes):
            before, after = (prod(end.local_sizes(atoms, self.axes, first)) for end in (step.before, step.after))
            legs.append(Leg(step.kind.value, step.axes, step.numel, step.local, before, max(before, after)))
        return tuple(legs)
