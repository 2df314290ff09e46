"""The steps of conversions, found once for all tensors that are cut alike.

`reshard` finds the cheapest steps by a search over layouts. What it finds does not depend on dims that no axis touches,
nor on axes that stay as they are, nor on how long a dim is that all axes divide: so one search on a small tensor over
few axes serves many large ones, and sizes scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from autopar.layout.state import Atoms, Layout, common_axes, longest
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


class _Atom(NamedTuple):
    """An atom as the search sees it: how many of its major axes are left out, as nothing becomes of them."""

    place: int
    size: int
    fixed: int
    times: float
    """How much longer it really is."""


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
        both = source.partial & target.partial
        key = (
            tuple(atom.size for atom in kept),
            Layout(tuple(source.splits[atom.place][atom.fixed :] for atom in kept), source.partial - both),
            Layout(tuple(target.splits[atom.place][atom.fixed :] for atom in kept), target.partial - both),
        )
        legs = self.small.get(key)
        if legs is None:
            legs = self.small[key] = self._found(*key)
        if not legs:
            return ()
        places = {atom.place for atom in kept}
        scale = prod((atom.times for atom in kept), start=1.0)
        scale *= prod(longest(sizes[i], source.splits[i], self.axes) for i in range(len(sizes)) if i not in places)
        return tuple(
            Leg(leg.kind, leg.axes, leg.numel * scale, leg.local, leg.before * scale, leg.larger * scale)
            for leg in legs
        )

    def _kept(self, sizes: tuple[int, ...], source: Layout, target: Layout) -> list[_Atom]:
        """The atoms that matter: those that the layouts cut differently, and the one that may serve on the way."""
        fixed: list[int] = []
        cut: list[int] = []
        still = source.partial & target.partial
        for i, (before, after) in enumerate(zip(source.splits, target.splits, strict=True)):
            common = common_axes(before, after)
            fixed.append(common)
            still = still | set(before[:common])
            if before[common:] or after[common:]:
                cut.append(i)
        # The search over conversions picks the same helper.
        mentioned = {*source.axes, *target.axes}
        count = prod(size for axis, size in self.axes.items() if axis in mentioned and axis not in still)
        others = [i for i in range(len(sizes)) if i not in cut]
        helper = sorted(others, key=lambda i: (sizes[i] % count != 0, -sizes[i], i))[:1]
        kept = []
        for i in sorted((*cut, *helper)):
            if sizes[i] % self.ranks or not sizes[i]:
                kept.append(_Atom(i, sizes[i], 0, 1.0))
            else:
                own = prod(self.axes[axis] for axis in source.splits[i][: fixed[i]])
                kept.append(_Atom(i, self.ranks, fixed[i], sizes[i] / own / self.ranks))
        return kept

    def _found(self, sizes: tuple[int, ...], source: Layout, target: Layout) -> tuple[Leg, ...]:
        atoms = Atoms(sizes, (1,) * len(sizes))
        legs = []
        for step in steps(atoms, source, target, self.axes):
            before, after = (prod(end.largest_sizes(atoms, self.axes)) for end in (step.before, step.after))
            legs.append(Leg(step.kind.value, step.axes, step.numel, step.local, before, max(before, after)))
        return tuple(legs)
