"""Layout to layout: the steps that turn one into the other, forward and backward, and what each of them sends.

Seen as values, a tensor is along each axis either the same on every rank (R and B), in pieces (S), or a sum (P). One
table serves both directions, because a gradient is a tensor with a layout of its own (`Layout.gradient`):

    same  -> sum    keep_one         the first rank keeps the value, the others hold zeros
    sum   -> same   all_reduce
    sum   -> piece  reduce_scatter
    piece -> same   all_gather
    same  -> piece  slice
    piece -> piece  all_to_all       another dim, or the same dim with its axes in another order
    piece -> sum    pad              with zeros, to the full extent

So R -> B sends nothing forward, and its backward, which takes a sum to one value, is an all-reduce. The two directions
are planned one by one: the backward of S -> R is a slice, whichever way the forward took.

The steps of a direction are the cheapest over all orders: a shortest path, whose nodes are layouts, whose edges are
steps, over one axis or over several at once. Only axes that the two layouts treat differently take part, so the
communication stays on the axes that the user sees change.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from functools import lru_cache
from itertools import combinations, permutations, product
from math import prod

from autopar.layout.state import Atoms, Layout, Piece, common_axes, longest, nested

__all__ = ["LOCAL", "Link", "Reshard", "Step", "StepKind", "reshard", "steps"]

Axes = tuple[tuple[str, int], ...]


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


_RANK = {kind: rank for rank, kind in enumerate(StepKind)}
LOCAL = frozenset((StepKind.SLICE, StepKind.KEEP_ONE, StepKind.PAD))


@dataclass(frozen=True)
class Link:
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
    before: Layout
    after: Layout
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


@dataclass(frozen=True)
class Reshard:
    """A conversion with both its directions; `gradient` is the conversion that its backward makes."""

    atoms: Atoms
    axes: Axes
    source: Layout
    target: Layout
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]

    @property
    def gradient(self) -> Reshard:
        return Reshard(self.atoms, self.axes, self.target.gradient, self.source.gradient, self.backward, self.forward)

    def __str__(self) -> str:
        ways = [", ".join(map(str, way)) or "nothing" for way in (self.forward, self.backward)]
        return f"{self.source} -> {self.target}: forward {ways[0]}; backward {ways[1]}"


def reshard(
    atoms: Atoms,
    source: Layout,
    target: Layout,
    axes: Mapping[str, int],
    links: Mapping[str, Link] | None = None,
) -> Reshard:
    """The cheapest steps from one layout to another and, for the gradient, back."""
    return Reshard(
        atoms,
        tuple(axes.items()),
        source,
        target,
        steps(atoms, source, target, axes, links),
        steps(atoms, target.gradient, source.gradient, axes, links),
    )


def steps(
    atoms: Atoms,
    source: Layout,
    target: Layout,
    axes: Mapping[str, int],
    links: Mapping[str, Link] | None = None,
) -> tuple[Step, ...]:
    """The cheapest steps from one layout to another, one direction only."""
    source.check(atoms, axes)
    target.check(atoms, axes)
    # An axis of size 1 does nothing: along it all states are one.
    single = [axis for axis, size in axes.items() if size == 1]
    source, target = source.value.without(single), target.value.without(single)
    if source == target:
        return ()
    links = links or {}
    return _cheapest(
        atoms, source, target, tuple(axes.items()), tuple((axis, links.get(axis, Link())) for axis in axes)
    )


# -- the search -------------------------------------------------------------------------------------------------------

# Compared from left to right: what is sent, collectives, axes that take part, steps. Then the steps themselves.
_Cost = tuple[int | Fraction, int, int, int]
_Added = tuple[int | Fraction, int, int]
"""What a step adds to all but the last, to which it adds one."""
_Key = tuple[tuple[int, ...], ...]


@lru_cache(maxsize=65536)
def _cheapest(
    atoms: Atoms, source: Layout, target: Layout, axes: Axes, links: tuple[tuple[str, Link], ...]
) -> tuple[Step, ...]:
    search = _Search(atoms, source, target, dict(axes), dict(links))
    zero: _Cost = (0, 0, 0, 0)
    # Two entries with one cost and one key do not occur, so layouts are never compared.
    queue: list[tuple[_Cost, _Key, Layout, tuple[Step, ...]]] = [(zero, (), source, ())]
    least: dict[Layout, tuple[_Cost, _Key]] = {source: (zero, ())}
    done: set[Layout] = set()
    while queue:
        cost, key, layout, path = heapq.heappop(queue)
        if layout == target:
            return path
        if layout in done:
            continue
        done.add(layout)
        for step, rank, added in search.steps_from(layout):
            after = step.after
            total = (cost[0] + added[0], cost[1] + added[1], cost[2] + added[2], cost[3] + 1)
            known = least.get(after)
            if known is not None and known[0] < total:
                continue
            keys = (*key, rank)
            if known is None or (total, keys) < known:
                least[after] = total, keys
                heapq.heappush(queue, (total, keys, after, (*path, step)))
    raise AssertionError(f"no steps lead from {source} to {target}")


def _orders(axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """All ordered choices of at least one axis."""
    return [order for count in range(1, len(axes) + 1) for order in permutations(axes, count)]


@dataclass
class _Search:
    atoms: Atoms
    source: Layout
    target: Layout
    axes: dict[str, int]
    links: dict[str, Link]
    fixed: tuple[int, ...] = field(init=False)
    active: tuple[str, ...] = field(init=False)
    summed: frozenset[str] = field(init=False)
    cut: tuple[int, ...] = field(init=False)
    every_axis: Axes = field(init=False)
    plain: bool = field(init=False)
    """Whether all links cost what is sent."""

    def __post_init__(self) -> None:
        pairs = list(zip(self.source.splits, self.target.splits, strict=True))
        # The major axes that an atom has in both layouts stay where they are.
        self.fixed = tuple(common_axes(before, after) for before, after in pairs)
        kept = {axis for (split, _), fixed in zip(pairs, self.fixed, strict=True) for axis in split[:fixed]}
        kept |= self.source.partial & self.target.partial
        mentioned = {*self.source.axes, *self.target.axes}
        self.active = tuple(axis for axis in self.axes if axis in mentioned and axis not in kept)
        # A sum is made only where the target wants one, and then for good. To pad with zeros and reduce them again
        # would send less at times, but takes buffers of the full size.
        self.summed = frozenset(self.active) & self.target.partial
        self.cut = self._worth_cutting(pairs)
        self.every_axis = tuple(self.axes.items())
        self.plain = all(link == Link() for link in self.links.values())

    def _worth_cutting(self, pairs: list[tuple[tuple[str, ...], tuple[str, ...]]]) -> tuple[int, ...]:
        cut = {
            atom for atom, ((s, t), fixed) in enumerate(zip(pairs, self.fixed, strict=True)) if s[fixed:] or t[fixed:]
        }
        # An atom that neither layout cuts may serve on the way: to scatter a sum over the fast axis first, or to use an
        # axis that replicates in order to send less. One is enough: best an even one, best a long one.
        sizes, p = self.atoms.sizes, prod(self.axes[axis] for axis in self.active)
        others = [atom for atom in range(len(sizes)) if atom not in cut]
        cut.update(sorted(others, key=lambda atom: (sizes[atom] % p != 0, -sizes[atom], atom))[:1])
        return tuple(sorted(cut))

    def steps_from(self, layout: Layout) -> list[_Ranked]:
        """Those that may lead to the target."""
        sums = {axis for axis in self.active if axis in layout.partial and axis not in self.summed}
        held = layout.axes
        same = {axis for axis in self.active if axis not in held}
        kept = tuple(axis for axis in self.active if axis in same and axis in self.summed)
        every = _every_step(self.atoms, self.every_axis, layout)
        found: list[_Ranked] = []
        if kept:
            found.append(_ranked(Step(StepKind.KEEP_ONE, kept, None, layout, _partial(layout, kept)), tuple(self.axes)))
        if sums:
            found += [
                one
                for one in every.reductions
                if sums.issuperset(one[0].axes) and (one[0].atom is None or one[0].atom in self.cut)
            ]
        for atom in self.cut:
            if same:
                found += [one for one in every.slices[atom] if same.issuperset(one[0].axes)]
            movable = len(layout.splits[atom]) - self.fixed[atom]
            for one in every.pieces[atom] if movable else ():
                step = one[0]
                if len(step.axes) > movable or (step.to_atom is not None and step.to_atom not in self.cut):
                    continue
                if step.kind is not StepKind.PAD or self.summed.issuperset(step.axes):
                    found.append(one)
        return found if self.plain else [(step, rank, self._linked(step, added)) for step, rank, added in found]

    def _linked(self, step: Step, added: _Added) -> _Added:
        """What a step takes on links of different cost."""
        if step.local:
            return added
        links = [self.links[axis] for axis in step.axes]
        price = _exact(max(link.per_element for link in links)) * added[0]
        return (price + _exact(max(link.per_collective for link in links)), *added[1:])


_Ranked = tuple[Step, tuple[int, ...], _Added]
"""A step, its rank among equally cheap ones, and what it takes."""


def _ranked(step: Step, names: tuple[str, ...]) -> _Ranked:
    return step, _key(step, names), (step.sent_numel, 0 if step.local else 1, len(step.axes))


@dataclass(frozen=True)
class _Steps:
    """All steps from one layout: those that reduce sums; by atom, those that cut it and those that move its pieces."""

    reductions: tuple[_Ranked, ...]
    slices: Mapping[int, tuple[_Ranked, ...]]
    pieces: Mapping[int, tuple[_Ranked, ...]]


@lru_cache(maxsize=65536)
def _every_step(atoms: Atoms, axes: Axes, layout: Layout) -> _Steps:
    return _Maker(atoms, dict(axes), layout).steps()


def _key(step: Step, names: tuple[str, ...]) -> tuple[int, ...]:
    atoms = [-1 if atom is None else atom for atom in (step.atom, step.to_atom)]
    return (_RANK[step.kind], *atoms, *(names.index(axis) for axis in (*step.axes, *step.to_axes)))


@dataclass
class _Maker:
    """Makes the steps from one layout."""

    atoms: Atoms
    axes: dict[str, int]
    layout: Layout

    def steps(self) -> _Steps:
        layout, places = self.layout, range(len(self.atoms.sizes))
        sums = tuple(axis for axis in self.axes if axis in layout.partial)
        split = {axis for axes in layout.splits for axis in axes}
        same = tuple(axis for axis in self.axes if axis not in layout.partial and axis not in split)
        reductions = [self._all_reduce(axes) for count in range(1, len(sums) + 1) for axes in combinations(sums, count)]
        reductions += [self._reduce_scatter(atom, axes) for atom in places for axes in _orders(sums)]
        slices = {
            atom: [Step(StepKind.SLICE, axes, atom, layout, _cut(layout, atom, axes)) for axes in _orders(same)]
            for atom in places
        }
        pieces: dict[int, list[Step]] = {}
        for atom in places:
            held = layout.splits[atom]
            for count in range(1, len(held) + 1):
                pieces.setdefault(atom, []).extend(self._from_pieces(atom, held[-count:]))
        return _Steps(
            self._ranked(reductions),
            {atom: self._ranked(found) for atom, found in slices.items()},
            {atom: self._ranked(found) for atom, found in pieces.items()},
        )

    def _ranked(self, steps: list[Step]) -> tuple[_Ranked, ...]:
        names = tuple(self.axes)
        return tuple(_ranked(step, names) for step in steps)

    def _ranks(self, axes: tuple[str, ...]) -> int:
        return prod(self.axes[axis] for axis in axes)

    def _extent(self, atom: int, split: tuple[str, ...]) -> int:
        """The longest local extent of an atom."""
        return longest(self.atoms.sizes[atom], split, self.axes)

    def _local_numel(self, layout: Layout, leave_out: tuple[int, ...] = ()) -> int:
        splits = enumerate(layout.splits)
        return prod(self._extent(atom, split) for atom, split in splits if atom not in leave_out)

    def _from_pieces(self, atom: int, axes: tuple[str, ...]) -> list[Step]:
        """What can be done with the most minor axes of an atom."""
        layout = self.layout
        joined = _joined(layout, atom, axes)
        chunk = self._local_numel(layout)
        numel = chunk * self._ranks(axes)
        found = [
            Step(StepKind.ALL_GATHER, axes, atom, layout, joined, numel=numel, sent_numel=numel - chunk),
            Step(StepKind.PAD, axes, atom, layout, _partial(joined, axes)),
        ]
        for to_atom in range(len(self.atoms.sizes)):
            for to_axes in permutations(axes):
                if to_atom != atom or to_axes[0] != axes[0]:
                    after = _cut(joined, to_atom, to_axes)
                    sent = self._exchanged(layout, after, atom, axes, to_atom, to_axes)
                    kind = StepKind.ALL_TO_ALL
                    found.append(Step(kind, axes, atom, layout, after, to_atom, to_axes, numel=chunk, sent_numel=sent))
        return found

    def _all_reduce(self, axes: tuple[str, ...]) -> Step:
        layout = self.layout
        after = Layout(layout.splits, layout.partial - set(axes))
        numel, ranks = self._local_numel(layout), self._ranks(axes)
        sent = -(-2 * (ranks - 1) * numel // ranks)
        return Step(StepKind.ALL_REDUCE, axes, None, layout, after, numel=numel, sent_numel=sent)

    def _reduce_scatter(self, atom: int, axes: tuple[str, ...]) -> Step:
        layout = self.layout
        after = _cut(Layout(layout.splits, layout.partial - set(axes)), atom, axes)
        chunk = self._local_numel(after)
        numel = chunk * self._ranks(axes)
        return Step(StepKind.REDUCE_SCATTER, axes, atom, layout, after, numel=numel, sent_numel=numel - chunk)

    def _exchanged(
        self, before: Layout, after: Layout, atom: int, axes: tuple[str, ...], to_atom: int, to_axes: tuple[str, ...]
    ) -> int:
        """What the busiest rank of an all-to-all sends: all that it holds but what it holds afterwards too."""
        extent = self._extent(atom, before.splits[atom][: -len(axes)])
        other = None if to_atom == atom else self._extent(to_atom, before.splits[to_atom])
        sizes, order = tuple(self.axes[axis] for axis in axes), tuple(axes.index(axis) for axis in to_axes)
        return _busiest(extent, other, sizes, order) * self._local_numel(before, (atom, to_atom))


@lru_cache(maxsize=65536)
def _busiest(extent: int, other: int | None, sizes: tuple[int, ...], order: tuple[int, ...]) -> int:
    """The most that one rank sends when pieces of one extent are exchanged for pieces of another, or in another order.

    Ranks at 0 of all other axes have the longest pieces of what those cut, so only the axes of the exchange count.
    """
    busiest = 0
    for place in product(*map(range, sizes)):
        held = nested(extent, zip(sizes, place, strict=True))
        wanted = nested(extent if other is None else other, [(sizes[i], place[i]) for i in order])
        sent = held[1] - _overlap(held, wanted) if other is None else held[1] * (other - wanted[1])
        busiest = max(busiest, sent)
    return busiest


def _exact(number: float) -> int | Fraction:
    """Sums of these do not depend on their order, so ties are ties. Whole numbers are much the faster ones."""
    return int(number) if number == int(number) else Fraction(number)


def _overlap(one: Piece, other: Piece) -> int:
    return max(0, min(one[0] + one[1], other[0] + other[1]) - max(one[0], other[0]))


def _cut(layout: Layout, atom: int, axes: tuple[str, ...]) -> Layout:
    splits = list(layout.splits)
    splits[atom] += axes
    return Layout(tuple(splits), layout.partial)


def _joined(layout: Layout, atom: int, axes: tuple[str, ...]) -> Layout:
    splits = list(layout.splits)
    splits[atom] = splits[atom][: -len(axes)]
    return Layout(tuple(splits), layout.partial)


def _partial(layout: Layout, axes: tuple[str, ...]) -> Layout:
    return Layout(layout.splits, layout.partial | set(axes))
