"""The steps of conversions, found once for all tensors that are cut alike.

`reshard` finds the cheapest steps by a search over layouts. What it finds does not depend on dims that no axis touches,
nor on axes that stay as they are, nor on how long a dim is that all axes divide: so one search on a small tensor over
few axes serves many large ones, and sizes scale.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from autopar.mesh import SubMesh
from autopar.sharding.atoms import Atoms
from autopar.sharding.reshard.reshard import steps
from autopar.sharding.sharding import Sharding, common_axes, longest

__all__ = ["ScaledReshards", "StepSize"]


class StepSize(NamedTuple):
    """One step: its kind and axes, what the collective works on, what there is before, the more of before and after."""

    kind: str
    axes: tuple[str, ...]
    numel: float
    local: bool
    before: float
    larger: float


_Splits = tuple[tuple[str, ...], ...]
_Key = tuple[tuple[int, ...], _Splits, _Splits, frozenset[str], frozenset[str]]
"""A conversion of a small tensor: its sizes, how it is split and then what it is a sum over, before and after."""


class _ShardingChange(NamedTuple):
    """What two layouts do differently, whatever the sizes."""

    fixed: tuple[int, ...]
    """By atom, how many of its major axes are left out, as nothing becomes of them."""
    cut: tuple[int, ...]
    """The atoms that are cut differently."""
    others: tuple[int, ...]
    ranks: int
    """Of the axes that change."""
    before: frozenset[str]
    after: frozenset[str]
    """The axes whose sum is still due, but for those where it is due in both."""


@dataclass
class ScaledReshards:
    """The conversions of one mesh."""

    axes: SubMesh
    small: dict[_Key, tuple[StepSize, ...]] = field(default_factory=dict)
    changes: dict[tuple[Sharding, Sharding], _ShardingChange] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ranks = prod(self.axes.values())

    def of(self, sizes: tuple[int, ...], source: Sharding, target: Sharding) -> tuple[StepSize, ...]:
        """The steps from one value layout to another, of a tensor with atoms of these sizes."""
        if source.splits == target.splits and source.partial == target.partial:
            return ()
        change = self.changes.get((source, target))
        if change is None:
            change = self.changes[source, target] = self._change(source, target)
        # The atoms that matter: those that the layouts cut differently, and the one that may serve on the way. The
        # search over conversions picks the same helper.
        helper = min(change.others, key=lambda i: (sizes[i] % change.ranks != 0, -sizes[i], i), default=None)
        places = change.cut if helper is None else tuple(sorted((*change.cut, helper)))
        small, before, after = [], [], []
        scale = 1.0
        for i, size in enumerate(sizes):
            if i not in places:
                scale *= longest(size, source.splits[i], self.axes)
                continue
            fixed = 0
            if size and not size % self.ranks:
                fixed = change.fixed[i]
                scale *= size / prod([self.axes[axis] for axis in source.splits[i][:fixed]]) / self.ranks
                size = self.ranks
            small.append(size)
            before.append(source.splits[i][fixed:])
            after.append(target.splits[i][fixed:])
        key = tuple(small), tuple(before), tuple(after), change.before, change.after
        legs = self.small.get(key)
        if legs is None:
            legs = self.small[key] = self._found(*key)
        return tuple(
            StepSize(leg.kind, leg.axes, leg.numel * scale, leg.local, leg.before * scale, leg.larger * scale)
            for leg in legs
        )

    def _change(self, source: Sharding, target: Sharding) -> _ShardingChange:
        pairs = list(zip(source.splits, target.splits, strict=True))
        fixed = tuple(common_axes(before, after) for before, after in pairs)
        both = source.partial & target.partial
        still = both | {axis for (before, _), common in zip(pairs, fixed, strict=True) for axis in before[:common]}
        cut = tuple(i for i, (one, other) in enumerate(pairs) if one[fixed[i] :] or other[fixed[i] :])
        others = tuple(i for i in range(len(pairs)) if i not in cut)
        count = prod(self.axes[axis] for axis in {*source.axes, *target.axes} - still if axis in self.axes)
        return _ShardingChange(fixed, cut, others, count, source.partial - both, target.partial - both)

    def _found(
        self,
        sizes: tuple[int, ...],
        before: _Splits,
        after: _Splits,
        due_before: frozenset[str],
        due_after: frozenset[str],
    ) -> tuple[StepSize, ...]:
        atoms = Atoms(sizes, (1,) * len(sizes))
        legs = []
        for step in steps(atoms, Sharding(before, due_before), Sharding(after, due_after), self.axes):
            ends = [prod(end.largest_sizes(atoms, self.axes)) for end in (step.before, step.after)]
            legs.append(StepSize(step.kind.value, step.axes, step.numel, step.local, ends[0], max(ends)))
        return tuple(legs)
