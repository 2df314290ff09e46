"""Find the cheapest steps from one sharding to another: an A* search over shardings as nodes and steps as edges."""

from __future__ import annotations

import heapq
from functools import lru_cache
from math import prod

from autopar.mesh import SubMesh
from autopar.sharding.atoms import Atoms
from autopar.sharding.reshard.step_graph import Step, StepEdge, StepGraph, StepKind, StepLimits, step_space
from autopar.sharding.sharding import Sharding, common_axes

# Compared from left to right: what is sent, collectives, axes that take part, steps. Then the steps themselves.
_Cost = tuple[int, int, int, int]
_Key = tuple[tuple[int, ...], ...]


@lru_cache(maxsize=65536)
def cheapest(atoms: Atoms, source: Sharding, target: Sharding, axes: SubMesh) -> tuple[Step, ...]:
    space = step_space(atoms, axes)
    limits = _limits(space, source, target)
    bound = _RemainingBound(space, limits, source, target)
    start, end = space.place(source), space.place(target)
    zero: _Cost = (0, 0, 0, 0)
    # Ordered by the lower bound of the whole path, then by the ranks of its steps, which start the key of every longer
    # path. Two entries with equal cost and key do not occur, so no further field is compared.
    queue: list[tuple[_Cost, _Key, int, tuple[Step, ...]]] = [(zero, (), start, ())]
    least: dict[int, tuple[_Cost, _Key]] = {start: (zero, ())}
    extents = {start: bound.extent(source)}
    done: set[int] = set()
    while queue:
        _, key, place, path = heapq.heappop(queue)
        if place == end:
            return path
        if place in done:
            continue
        done.add(place)
        cost, extent = least[place][0], extents[place]
        for edge in space.steps_from(place, limits):
            total = (cost[0] + edge.sent, cost[1] + edge.collectives, cost[2] + edge.axes, cost[3] + 1)
            known = least.get(edge.after)
            if known is not None and known[0] < total:
                continue
            keys = (*key, edge.rank)
            if known is None or (total, keys) < known:
                least[edge.after] = total, keys
                extents[edge.after] = reached = bound.after(extent, edge)
                heapq.heappush(queue, (bound.with_rest(total, reached), keys, edge.after, (*path, edge.step)))
    raise AssertionError(f"no steps lead from {source} to {target}")


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
    # An atom that neither layout cuts may serve on the way: an axis that replicates then cuts it in order to send
    # less. One is enough: best an even one, best a long one.
    sizes, p = space.atoms.sizes, prod(space.axes[axis] for axis in active)
    others = [atom for atom in range(len(sizes)) if atom not in cut]
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

    def extent(self, layout: Sharding) -> tuple[int, int]:
        split = sum(map(self.space.mask, layout.splits))
        sums = self.space.mask(layout.partial) & self.limits.active & ~self.limits.summed
        return self.whole // self._ranks(split | self.limits.summed), self._ranks(sums)

    def after(self, before: tuple[int, int], edge: StepEdge) -> tuple[int, int]:
        kind = edge.step.kind
        if kind not in _CHANGES_EXTENT:
            return before
        ranks = self._ranks(edge.mask & ~self.limits.summed)
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
        # Rounded down to whole elements, as all steps send; but whatever is left takes a collective.
        return cost[0] + rest // self.parts, cost[1] + 1, cost[2] + 1, cost[3] + 1

    def _ranks(self, mask: int) -> int:
        found = self.ranks.get(mask)
        if found is None:
            sizes = (size for axis, size in self.space.axes.items() if mask & self.space.bits[axis])
            found = self.ranks[mask] = prod(sizes)
        return found


_CHANGES_EXTENT = {StepKind.SLICE, StepKind.ALL_GATHER, StepKind.ALL_REDUCE, StepKind.REDUCE_SCATTER}
