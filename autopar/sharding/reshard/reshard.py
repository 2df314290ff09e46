"""Reshards: the cheapest steps from one sharding to another, forward and backward, with the elements that they send.

Along each axis the values of a tensor are either the same on every rank (R and B), in pieces (S), or a sum (P). One
table serves both directions, because a gradient is a tensor with a sharding of its own (`Sharding.gradient`):

    same  -> sum    keep_one         the first rank keeps the value, the others hold zeros
    sum   -> same   all_reduce
    sum   -> piece  reduce_scatter
    piece -> same   all_gather
    same  -> piece  slice
    piece -> piece  all_to_all       another dim, or the same dim with its axes in another order
    piece -> sum    pad              with zeros, to the full extent

So R -> B sends nothing forward, and its backward, which takes a sum to one value, is an all-reduce. The two directions
are planned one by one: the backward of S -> R is a slice, whichever way the forward took.

The steps of a direction send the fewest elements over all orders, whatever the links: a shortest path, whose nodes are
layouts, whose edges are steps, over one axis or over several at once. Only axes that the two layouts treat differently
take part, so the communication stays on the axes that the user sees change.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from autopar.mesh import SubMesh
from autopar.sharding.atoms import Atoms
from autopar.sharding.reshard.shortest_path import cheapest
from autopar.sharding.reshard.step_graph import LOCAL, Step, StepKind
from autopar.sharding.sharding import Sharding, common_axes, longest

__all__ = ["LOCAL", "Reshard", "ScaledReshards", "Step", "StepKind", "StepSize", "reshard", "steps"]


@dataclass(frozen=True)
class Reshard:
    """Steps between two shardings, forward and, for the gradient, backward."""

    atoms: Atoms
    axes: SubMesh
    source: Sharding
    target: Sharding
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]

    @property
    def gradient(self) -> Reshard:
        return Reshard(self.atoms, self.axes, self.target.gradient, self.source.gradient, self.backward, self.forward)

    def __str__(self) -> str:
        ways = [", ".join(map(str, way)) or "nothing" for way in (self.forward, self.backward)]
        return f"{self.source} -> {self.target}: forward {ways[0]}; backward {ways[1]}"


def reshard(atoms: Atoms, source: Sharding, target: Sharding, axes: SubMesh) -> Reshard:
    """The cheapest steps from one layout to another and, for the gradient, back."""
    return Reshard(
        atoms,
        SubMesh.of(axes),
        source,
        target,
        steps(atoms, source, target, axes),
        steps(atoms, target.gradient, source.gradient, axes),
    )


def steps(atoms: Atoms, source: Sharding, target: Sharding, axes: SubMesh) -> tuple[Step, ...]:
    """The cheapest steps from one layout to another, one direction only."""
    source.check(atoms, axes)
    target.check(atoms, axes)
    # Along an axis of size 1 all states are the same.
    single = [axis for axis, size in axes.items() if size == 1]
    source, target = source.value.without(single), target.value.without(single)
    if source == target:
        return ()
    return cheapest(atoms, source, target, SubMesh.of(axes))


class StepSize(NamedTuple):
    """Size of one step on the rank with the largest shards, in elements."""

    kind: str
    axes: tuple[str, ...]
    # Elements of the buffer that the collective works on.
    numel: float
    local: bool
    # Elements of the shard before the step.
    before: float
    # Elements of the larger one of the shards before and after the step.
    larger: float

    @staticmethod
    def of(step: Step, atoms: Atoms, axes: SubMesh) -> StepSize:
        before, after = (prod(end.largest_sizes(atoms, axes)) for end in (step.before, step.after))
        return StepSize(step.kind.value, step.axes, step.numel, step.local, before, max(before, after))


_Splits = tuple[tuple[str, ...], ...]
# A reshard of a small tensor: its sizes, then splits and partial axes, each before and after.
_Key = tuple[tuple[int, ...], _Splits, _Splits, frozenset[str], frozenset[str]]


class _ShardingChange(NamedTuple):
    """Difference of two shardings, whatever the sizes."""

    # By atom, the number of major axes that both shardings share, and that the search leaves out.
    fixed: tuple[int, ...]
    # Atoms whose splits differ, and all others.
    cut: tuple[int, ...]
    others: tuple[int, ...]
    # Product of the sizes of the axes that change.
    ranks: int
    before: frozenset[str]
    # Partial axes of one sharding that are not partial in the other.
    after: frozenset[str]


@dataclass
class ScaledReshards:
    """Cache of reshards on one mesh, by their small tensors."""

    axes: SubMesh
    small: dict[_Key, tuple[StepSize, ...]] = field(default_factory=dict)
    changes: dict[tuple[Sharding, Sharding], _ShardingChange] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ranks = prod(self.axes.values())

    def of(self, sizes: tuple[int, ...], source: Sharding, target: Sharding) -> tuple[StepSize, ...]:
        """Return the steps from one sharding of values to another, of a tensor with atoms of these sizes."""
        if source.splits == target.splits and source.partial == target.partial:
            return ()
        change = self.changes.get((source, target))
        if change is None:
            change = self.changes[source, target] = self._change(source, target)
        # Only these atoms matter: those whose splits differ, and the one that may be split on the way. The choice of
        # this helper must equal that of `shortest_path._limits`.
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
        found = steps(atoms, Sharding(before, due_before), Sharding(after, due_after), self.axes)
        return tuple(StepSize.of(step, atoms, self.axes) for step in found)
