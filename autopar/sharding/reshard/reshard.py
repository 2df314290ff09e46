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

The steps of a direction send the fewest elements, whatever the links: a shortest path with shardings as nodes and steps
over one or several axes as edges. Only axes whose state differs between source and target take part, so the
communication stays on the axes that the user sees change.

`ScaledReshards` finds the steps once for tensors that are cut alike. The path does not depend on dims that no axis
splits, on axes that stay, or on the length of a dim that all axes divide. So one search on a small tensor serves many
large ones, whose sizes are scaled.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import NamedTuple

from autopar.mesh import SubMesh
from autopar.sharding.reshard.step_graph import (
    LOCAL,
    Step,
    StepEdge,
    StepForm,
    StepGraph,
    StepKind,
    StepLimits,
    step_space,
)
from autopar.sharding.sharding import OTHER, Atoms, Sharding, common_axes, longest

__all__ = [
    "LOCAL",
    "NoSteps",
    "Reshard",
    "ScaledReshards",
    "Step",
    "StepKind",
    "StepSize",
    "goes_in_bucket",
    "reshard",
    "steps",
]

_BUCKETED = frozenset((StepKind.ALL_REDUCE, StepKind.ALL_GATHER, StepKind.REDUCE_SCATTER))


class NoSteps(Exception):
    """No steps lead from one sharding to another: the places of routed rows depend on data."""


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

    def sent_numel(self, differentiable: bool) -> int:
        """Return the number of elements that the busiest rank sends, forward and backward."""
        steps = (*self.forward, *self.backward) if differentiable else self.forward
        return sum(step.sent_numel for step in steps)

    def __str__(self) -> str:
        ways = [", ".join(map(str, way)) or "nothing" for way in (self.forward, self.backward)]
        return f"{self.source} -> {self.target}: forward {ways[0]}; backward {ways[1]}"


def reshard(atoms: Atoms, source: Sharding, target: Sharding, axes: SubMesh) -> Reshard:
    """Return the cheapest steps from one sharding to another and, for the gradient, back."""
    return Reshard(
        atoms,
        SubMesh.of(axes),
        source,
        target,
        steps(atoms, source, target, axes),
        steps(atoms, target.gradient, source.gradient, axes),
    )


def steps(atoms: Atoms, source: Sharding, target: Sharding, axes: SubMesh) -> tuple[Step, ...]:
    """Return the cheapest steps from one sharding to another, one direction only."""
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
# A reshard of a small tensor: its sizes, the atoms split by share and the roles, then splits and partial axes, each
# before and after.
_Key = tuple[tuple[int, ...], tuple[int, ...], str, _Splits, _Splits, frozenset[str], frozenset[str]]


_Known = dict[tuple[Sharding, Sharding], tuple[StepSize, ...] | None]


class _ShardingChange(NamedTuple):
    """Difference of two shardings, whatever the sizes."""

    # By atom, the number of major axes that both shardings share, and that the search leaves out.
    fixed: tuple[int, ...]
    # Atoms whose splits differ, and all others.
    cut: tuple[int, ...]
    others: tuple[int, ...]
    # Product of the sizes of the axes that change.
    ranks: int
    # Partial axes of one sharding that are not partial in the other.
    before: frozenset[str]
    after: frozenset[str]


class _Shape(NamedTuple):
    """Sizes of the atoms of a tensor, up to a factor of the elements that all of its reshards send."""

    # An atom that all axes divide is as long as their product.
    sizes: tuple[int, ...]
    # Atoms from long to short, as the search chooses the one that it may split on the way.
    order: tuple[int, ...]
    by_share: tuple[int, ...]
    roles: str


@dataclass
class ScaledReshards:
    """Cache of reshards on one mesh, by their small tensors."""

    axes: SubMesh
    small: dict[_Key, tuple[StepSize, ...] | None] = field(default_factory=dict)
    changes: dict[tuple[Sharding, Sharding], _ShardingChange] = field(default_factory=dict)
    # By sizes, atoms that are split by share, and roles: the shape's reshards so far, and the factor.
    shapes: dict[Hashable, tuple[_Shape, _Known, float]] = field(default_factory=dict)
    known: dict[_Shape, _Known] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ranks = prod(self.axes.values())

    @staticmethod
    @lru_cache(maxsize=8)
    def on(axes: SubMesh) -> ScaledReshards:
        """Return the cache of a mesh, which several problems on it share."""
        return ScaledReshards(axes)

    def of(
        self,
        sizes: tuple[int, ...],
        source: Sharding,
        target: Sharding,
        by_share: tuple[int, ...] = (),
        roles: str = "",
    ) -> tuple[StepSize, ...] | None:
        """Return the steps between two shardings of a tensor with atoms of these sizes, some of them split by share.

        None if no steps lead there.
        """
        return self.between(sizes, by_share, roles)(source, target)

    def between(
        self, sizes: tuple[int, ...], by_share: tuple[int, ...] = (), roles: str = ""
    ) -> Callable[[Sharding, Sharding], tuple[StepSize, ...] | None]:
        """Return the function from two shardings of a tensor to the steps of `of`."""
        named = sizes, by_share, roles
        if named not in self.shapes:
            self.shapes[named] = self._shape(*named)
        shape, known, scale = self.shapes[named]

        def steps_of(source: Sharding, target: Sharding) -> tuple[StepSize, ...] | None:
            if source.splits == target.splits and source.partial == target.partial:
                return ()
            pair = source, target
            if pair not in known:
                known[pair] = self._of_shape(shape, source, target) if not roles or is_reached(pair) else None
            found = known[pair]
            return found and _scaled(found, scale)

        def is_reached(pair: tuple[Sharding, Sharding]) -> bool:
            # Steps move groups and rows apart from all other atoms.
            source, target = (one.routed(roles) for one in pair)
            return (source, target) == pair or steps_of(source, target) is not None

        return steps_of

    def _shape(self, sizes: tuple[int, ...], by_share: tuple[int, ...], roles: str) -> tuple[_Shape, _Known, float]:
        even = [bool(size) and i not in by_share and size % self.ranks == 0 for i, size in enumerate(sizes)]
        small = tuple(self.ranks if is_even else size for is_even, size in zip(even, sizes, strict=True))
        order = tuple(sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)))
        scale = prod(size // self.ranks for is_even, size in zip(even, sizes, strict=True) if is_even)
        shape = _Shape(small, order, by_share, roles)
        return shape, self.known.setdefault(shape, {}), float(scale)

    def _of_shape(self, shape: _Shape, source: Sharding, target: Sharding) -> tuple[StepSize, ...] | None:
        sizes, order, by_share, roles = shape
        change = self.changes.get((source, target))
        if change is None:
            change = self.changes[source, target] = self._change(source, target)
        # Only these atoms matter: those whose splits differ, and the one that may be split on the way. The choice of
        # this helper must equal that of `_limits`.
        others = [i for i in order if i in change.others and (not roles or roles[i] == OTHER)]
        helper = min(others, key=lambda i: sizes[i] % change.ranks != 0, default=None)
        places = change.cut if helper is None else tuple(sorted((*change.cut, helper)))
        small, marked = list[int](), list[int]()
        before, after = [], []
        scale = 1.0
        # Other atoms scale the result by their local size; one that all axes divide does not keep what stays.
        for i, size in enumerate(sizes):
            if i not in places:
                split = source.splits[i]
                scale *= longest(size, split, self.axes, i in by_share) if split else size
                continue
            fixed = 0
            if i in by_share:
                marked.append(len(small))
            elif size and not size % self.ranks:
                fixed = change.fixed[i]
                if fixed:
                    scale /= prod([self.axes[axis] for axis in source.splits[i][:fixed]])
            small.append(size)
            before.append(source.splits[i][fixed:])
            after.append(target.splits[i][fixed:])
        kept = "".join(roles[i] for i in places) if roles else ""
        key = tuple(small), tuple(marked), kept, tuple(before), tuple(after), change.before, change.after
        if key not in self.small:
            self.small[key] = self._steps(key)
        found = self.small[key]
        return found and _scaled(found, scale)

    def _steps(self, key: _Key) -> tuple[StepSize, ...] | None:
        sizes, by_share, roles, before, after, summed_before, summed_after = key
        atoms = Atoms(sizes, (1,) * len(sizes), by_share, roles)
        try:
            found = steps(atoms, Sharding(before, summed_before), Sharding(after, summed_after), self.axes)
        except NoSteps:
            return None
        return tuple(StepSize.of(step, atoms, self.axes) for step in found)

    def _change(self, source: Sharding, target: Sharding) -> _ShardingChange:
        pairs = list(zip(source.splits, target.splits, strict=True))
        fixed = tuple(common_axes(before, after) for before, after in pairs)
        both = source.partial & target.partial
        still = both | {axis for (before, _), common in zip(pairs, fixed, strict=True) for axis in before[:common]}
        cut = tuple(i for i, (one, other) in enumerate(pairs) if one[fixed[i] :] or other[fixed[i] :])
        others = tuple(i for i in range(len(pairs)) if i not in cut)
        count = prod(self.axes[axis] for axis in {*source.axes, *target.axes} - still if axis in self.axes)
        return _ShardingChange(fixed, cut, others, count, source.partial - both, target.partial - both)


def _scaled(steps: tuple[StepSize, ...], scale: float) -> tuple[StepSize, ...]:
    if scale == 1.0:
        return steps
    return tuple(
        StepSize(step.kind, step.axes, step.numel * scale, step.local, step.before * scale, step.larger * scale)
        for step in steps
    )


# -- shortest path -----------------------------------------------------------------------------------------------------


# Compared from left to right: elements sent, collectives, axes that take part, steps. Ties go by the steps themselves.
_Cost = tuple[int, int, int, int]
_PathKey = tuple[tuple[int, ...], ...]


@lru_cache(maxsize=65536)
def cheapest(atoms: Atoms, source: Sharding, target: Sharding, axes: SubMesh) -> tuple[Step, ...]:
    """Return the cheapest steps, by an A* search with shardings as nodes and steps as edges."""
    space = step_space(atoms, axes)
    limits = _limits(space, source, target)
    bound = _RemainingBound(space, limits, source, target)
    start, end = space.place(source), space.place(target)
    zero: _Cost = (0, 0, 0, 0)
    # Ordered by the lower bound of the whole path, then by the ranks of its steps, which start the key of every longer
    # path. Two entries with equal cost and key do not occur, so no further field is compared.
    queue: list[tuple[_Cost, _PathKey, int, tuple[StepEdge, ...]]] = [(zero, (), start, ())]
    least: dict[int, tuple[_Cost, _PathKey]] = {start: (zero, ())}
    extents = {start: bound.extent(source)}
    done: set[int] = set()
    while queue:
        _, key, place, path = heapq.heappop(queue)
        if place == end:
            befores = (source, *(edge.form.after for edge in path))
            return tuple(edge.step(before) for edge, before in zip(path, befores, strict=False))
        if place in done:
            continue
        done.add(place)
        cost, extent = least[place][0], extents[place]
        for edge in space.steps_from(place, limits):
            form = edge.form
            total = (cost[0] + edge.sent, cost[1] + edge.collectives, cost[2] + len(form.axes), cost[3] + 1)
            known = least.get(edge.after)
            if known is not None and known[0] < total:
                continue
            keys = (*key, form.rank)
            if known is None or (total, keys) < known:
                least[edge.after] = total, keys
                extents[edge.after] = reached = bound.after(extent, form)
                heapq.heappush(queue, (bound.with_rest(total, reached), keys, edge.after, (*path, edge)))
    raise NoSteps(f"no steps lead from {source} to {target}")


def _limits(space: StepGraph, source: Sharding, target: Sharding) -> StepLimits:
    pairs = list(zip(source.splits, target.splits, strict=True))
    # Major axes that an atom has in both shardings stay.
    fixed = tuple(common_axes(before, after) for before, after in pairs)
    kept = {axis for (split, _), count in zip(pairs, fixed, strict=True) for axis in split[:count]}
    kept |= source.partial & target.partial
    mentioned = {*source.axes, *target.axes}
    active = tuple(axis for axis in space.axes if axis in mentioned and axis not in kept)
    # A step makes a partial sum only along axes that the target sums over, and keeps it. To pad with zeros and reduce
    # again would send less at times, but needs buffers of the full size.
    summed = frozenset(active) & target.partial
    cut = {atom for atom, ((s, t), count) in enumerate(zip(pairs, fixed, strict=True)) if s[count:] or t[count:]}
    # An atom that neither sharding splits may be split on the way: an axis that replicates then sends less. One is
    # enough, preferably one of even pieces, then the longest.
    sizes, p = space.atoms.sizes, prod(space.axes[axis] for axis in active)
    others = [atom for atom in range(len(sizes)) if atom not in cut and space.atoms.role(atom) == OTHER]
    cut.update(sorted(others, key=lambda atom: (sizes[atom] % p != 0, -sizes[atom], atom))[:1])
    return StepLimits(space.mask(active), space.mask(summed), fixed, tuple(sorted(cut)))


class _RemainingBound:
    """Lower bound of the elements that remain to be sent from a sharding; it prunes the search.

    A gather sends at least the growth of the local tensor. A reduction sends least on the smallest local tensor, that
    with every axis splitting it. The bound assumes shards of equal length, which are at most as long as that of the
    first rank. Axes that the target sums over count as splitting, because padding costs nothing. An extent is a pair:
    local elements, in fractions 1 / `parts`, and the number of ranks whose sums are not reduced yet.
    """

    def __init__(self, space: StepGraph, limits: StepLimits, source: Sharding, target: Sharding) -> None:
        self.space = space
        self.limits = limits
        self.ranks: dict[int, int] = {}
        self.parts = prod(space.axes.values())
        self.whole = prod(space.atoms.sizes) * self.parts
        self.goal = self.extent(target)[0]
        fixed = sum(space.mask(axes[:count]) for axes, count in zip(source.splits, limits.fixed, strict=True))
        self.least = self.whole // self._ranks(fixed | limits.active)

    def extent(self, sharding: Sharding) -> tuple[int, int]:
        split = sum(map(self.space.mask, sharding.splits))
        sums = self.space.mask(sharding.partial) & self.limits.active & ~self.limits.summed
        return self.whole // self._ranks(split | self.limits.summed), self._ranks(sums)

    def after(self, before: tuple[int, int], form: StepForm) -> tuple[int, int]:
        kind = form.kind
        if kind not in _CHANGES_EXTENT:
            return before
        ranks = self._ranks(form.mask & ~self.limits.summed)
        numel, sums = before
        if kind is StepKind.SLICE:
            return numel // ranks, sums
        if kind is StepKind.ALL_GATHER:
            return numel * ranks, sums
        return (numel if kind is StepKind.ALL_REDUCE else numel // ranks), sums // ranks

    def with_rest(self, cost: _Cost, extent: tuple[int, int]) -> _Cost:
        """Return the lower bound of a path: its cost so far and that of the rest."""
        numel, sums = extent
        # All sums are reduced on the smallest local tensor, in whatever order.
        rest = self.least * (sums - 1) + max(0, self.goal - (self.least if sums > 1 else numel))
        if not rest:
            return cost
        # Rounded down, because steps send whole elements. Any rest takes at least one collective over one axis.
        return cost[0] + rest // self.parts, cost[1] + 1, cost[2] + 1, cost[3] + 1

    def _ranks(self, mask: int) -> int:
        found = self.ranks.get(mask)
        if found is None:
            sizes = (size for axis, size in self.space.axes.items() if mask & self.space.bits[axis])
            found = self.ranks[mask] = prod(sizes)
        return found


_CHANGES_EXTENT = {StepKind.SLICE, StepKind.ALL_GATHER, StepKind.ALL_REDUCE, StepKind.REDUCE_SCATTER}


def goes_in_bucket(forward: tuple[StepKind, ...], backward: tuple[StepKind, ...]) -> bool:
    """Return whether reshards of these steps can share a bucket."""
    ways = [kinds for kinds in (forward, backward) if not LOCAL.issuperset(kinds)]
    return bool(ways) and all(_BUCKETED.issuperset(kinds) for kinds in ways)
