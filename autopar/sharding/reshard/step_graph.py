"""Graph of shardings and the steps between them, built once for all reshards of tensors with equal atoms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import combinations, permutations
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.mesh import SubMesh
from autopar.sharding.sharding import GROUP, OTHER, Atoms, Sharding, longest


class StepKind(Enum):
    """Kinds of steps, in the order of preference between equally cheap ones."""

    SLICE = "slice"
    KEEP_ONE = "keep_one"
    PAD = "pad"
    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"
    # In no reshard: windows along a split dim, as in convolutions, read the edges of the neighbours.
    HALO_EXCHANGE = "halo_exchange"
    # In no reshard: keys and values of attention pass from rank to rank.
    RING_PASS = "ring_pass"


LOCAL = frozenset((StepKind.SLICE, StepKind.KEEP_ONE, StepKind.PAD))


@dataclass(frozen=True)
class Step:
    """One step of one direction.

    `axes` are the axes of the collective, major to minor as they split `atom`. An all-to-all splits `to_atom` by
    `to_axes` instead: the same axes, and the same atom where only their order changes. Numbers hold for the busiest
    rank: `numel` elements in the buffer that is reduced, gathered or exchanged, padding included. A bandwidth-optimal
    algorithm sends `sent_numel` of them.
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
        """Return whether the step sends nothing."""
        return self.kind in LOCAL

    def __str__(self) -> str:
        text = f"{self.kind.value}({'*'.join(self.axes)})"
        if self.atom is not None:
            text += f" {self.atom}"
        return text if self.to_atom is None else f"{text} -> {self.to_atom}({'*'.join(self.to_axes)})"


_RANK = {kind: rank for rank, kind in enumerate(StepKind)}


class StepEdge(NamedTuple):
    """Step as an edge of the graph; sets of axes are bit masks, shardings are positions in a list."""

    after: int
    # Order among equally cheap steps, so that the path does not depend on hashes.
    rank: tuple[int, ...]
    sent: int
    collectives: int
    axes: int
    mask: int
    step: Step


class StepLimits(NamedTuple):
    """Steps that one reshard may take."""

    # Mask of the axes whose state changes.
    active: int
    # Mask of those along which the target is partial.
    summed: int
    # By atom, the number of its major axes that stay.
    fixed: tuple[int, ...]
    # Atoms that may be split.
    cut: tuple[int, ...]


@dataclass(frozen=True)
class _OutgoingSteps:
    """Steps from one sharding: reductions of sums; by atom, slices of it and moves of its pieces."""

    reductions: tuple[StepEdge, ...]
    slices: Mapping[int, tuple[StepEdge, ...]]
    pieces: Mapping[int, tuple[StepEdge, ...]]


@lru_cache(maxsize=256)
def step_space(atoms: Atoms, axes: SubMesh) -> StepGraph:
    return StepGraph(atoms, axes)


class StepGraph:
    def __init__(self, atoms: Atoms, axes: SubMesh) -> None:
        self.atoms = atoms
        # Collectives pad to the longest shard, whichever rank is priced.
        self.axes = axes.seen({})
        self.names = tuple(self.axes)
        self.bits = {axis: 1 << i for i, axis in enumerate(self.axes)}
        self.shardings: list[Sharding] = []
        self.places: dict[Sharding, int] = {}
        self.made: dict[int, _OutgoingSteps] = {}
        self.allowed: dict[tuple[int, StepLimits], tuple[StepEdge, ...]] = {}

    def mask(self, axes: frozenset[str] | tuple[str, ...]) -> int:
        return sum(self.bits[axis] for axis in axes)

    def place(self, sharding: Sharding) -> int:
        found = self.places.get(sharding)
        if found is None:
            found = self.places[sharding] = len(self.shardings)
            self.shardings.append(sharding)
        return found

    def steps_from(self, place: int, limits: StepLimits) -> tuple[StepEdge, ...]:
        """Return the steps from a sharding that the limits allow."""
        key = place, limits
        found = self.allowed.get(key)
        if found is None:
            found = self.allowed[key] = tuple(self._allowed(place, limits))
        return found

    def _allowed(self, place: int, limits: StepLimits) -> list[StepEdge]:
        sharding = self.shardings[place]
        every = self.made.get(place)
        if every is None:
            every = self.made[place] = _StepMaker(self, sharding).steps()
        sums = self.mask(sharding.partial) & limits.active & ~limits.summed
        same = limits.active & ~self.mask(sharding.axes)
        found = []
        kept = tuple(axis for axis in self.names if self.bits[axis] & same & limits.summed)
        # One local step makes all sums that the target wants, because their order does not matter.
        if kept:
            found.append(self.edge(Step(StepKind.KEEP_ONE, kept, None, sharding, _partial(sharding, kept))))
        if sums:
            found += [
                one
                for one in every.reductions
                if not one.mask & ~sums and (one.step.atom is None or one.step.atom in limits.cut)
            ]
        for atom in limits.cut:
            if same:
                found += [one for one in every.slices[atom] if not one.mask & ~same]
            movable = len(sharding.splits[atom]) - limits.fixed[atom]
            for one in every.pieces[atom] if movable else ():
                step = one.step
                if one.axes > movable or (step.to_atom is not None and step.to_atom not in limits.cut):
                    continue
                if step.kind is not StepKind.PAD or not one.mask & ~limits.summed:
                    found.append(one)
        return found

    def edge(self, step: Step) -> StepEdge:
        atoms = [-1 if atom is None else atom for atom in (step.atom, step.to_atom)]
        rank = (_RANK[step.kind], *atoms, *(self.names.index(axis) for axis in (*step.axes, *step.to_axes)))
        after, collectives = self.place(step.after), 0 if step.local else 1
        return StepEdge(after, rank, step.sent_numel, collectives, len(step.axes), self.mask(step.axes), step)


def _orders(axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return all ordered choices of at least one axis."""
    return [order for count in range(1, len(axes) + 1) for order in permutations(axes, count)]


class _StepMaker:
    """Builder of the steps from one sharding."""

    def __init__(self, space: StepGraph, sharding: Sharding) -> None:
        self.space = space
        self.atoms, self.axes = space.atoms, space.axes
        self.sharding = sharding

    def steps(self) -> _OutgoingSteps:
        sharding, places = self.sharding, range(len(self.atoms.sizes))
        sums = tuple(axis for axis in self.axes if axis in sharding.partial)
        split = {axis for axes in sharding.splits for axis in axes}
        same = tuple(axis for axis in self.axes if axis not in sharding.partial and axis not in split)
        reductions = [self._all_reduce(axes) for count in range(1, len(sums) + 1) for axes in combinations(sums, count)]
        # How many rows of a group stand where depends on data: they are neither cut nor joined, only exchanged.
        plain = [atom for atom in places if self.atoms.role(atom) == OTHER]
        reductions += [self._reduce_scatter(atom, axes) for atom in plain for axes in _orders(sums)]
        slices: dict[int, list[Step]] = {atom: [] for atom in places}
        for atom in plain:
            slices[atom] = [
                Step(StepKind.SLICE, axes, atom, sharding, _cut(sharding, atom, axes)) for axes in _orders(same)
            ]
        pieces: dict[int, list[Step]] = {}
        for atom in places:
            held = sharding.splits[atom]
            # A rank can join only pieces that are neighbours, those of the most minor axes.
            for count in range(1, len(held) + 1):
                pieces.setdefault(atom, []).extend(self._from_pieces(atom, held[-count:]))
        return _OutgoingSteps(
            self._edges(reductions),
            {atom: self._edges(found) for atom, found in slices.items()},
            {atom: self._edges(found) for atom, found in pieces.items()},
        )

    def _edges(self, steps: list[Step]) -> tuple[StepEdge, ...]:
        return tuple(map(self.space.edge, steps))

    def _ranks(self, axes: tuple[str, ...]) -> int:
        return prod(self.axes[axis] for axis in axes)

    def _extent(self, atom: int, split: tuple[str, ...]) -> int:
        """Return the longest local extent of an atom."""
        return longest(self.atoms.sizes[atom], split, self.axes, atom in self.atoms.by_share)

    def _local_numel(self, sharding: Sharding, leave_out: tuple[int, ...] = ()) -> int:
        splits = enumerate(sharding.splits)
        return prod(self._extent(atom, split) for atom, split in splits if atom not in leave_out)

    def _from_pieces(self, atom: int, axes: tuple[str, ...]) -> list[Step]:
        """Return the steps over the most minor axes of an atom: all-gather, pad and all-to-alls."""
        sharding = self.sharding
        splits = list(sharding.splits)
        splits[atom] = splits[atom][: -len(axes)]
        joined = Sharding(tuple(splits), sharding.partial)
        chunk = self._local_numel(sharding)
        numel = chunk * self._ranks(axes)
        found = []
        if self.atoms.role(atom) == OTHER:
            found = [
                Step(StepKind.ALL_GATHER, axes, atom, sharding, joined, numel=numel, sent_numel=numel - chunk),
                Step(StepKind.PAD, axes, atom, sharding, _partial(joined, axes)),
            ]
        for to_atom in self._reached(atom, axes):
            for to_axes in permutations(axes):
                # Within one atom, an exchange that leaves the first axis in place needs only the others.
                if to_atom != atom or to_axes[0] != axes[0]:
                    after = _cut(joined, to_atom, to_axes)
                    sent = self._exchanged(atom, axes, to_atom, to_axes)
                    ends = sharding, after, to_atom, to_axes
                    found.append(Step(StepKind.ALL_TO_ALL, axes, atom, *ends, numel=chunk, sent_numel=sent))
        return found

    def _reached(self, atom: int, axes: tuple[str, ...]) -> list[int]:
        """Return the atoms that pieces of an atom may be exchanged for: rows for whole groups, or groups for rows."""
        role = self.atoms.role(atom)
        if role == OTHER:
            return [i for i in range(len(self.atoms.sizes)) if self.atoms.role(i) == OTHER]
        splits = self.sharding.splits
        return [
            i
            for i, size in enumerate(self.atoms.sizes)
            if self.atoms.role(i) not in (OTHER, role)
            if role == GROUP or size % self._ranks((*splits[i], *axes)) == 0
        ]

    def _all_reduce(self, axes: tuple[str, ...]) -> Step:
        sharding = self.sharding
        after = Sharding(sharding.splits, sharding.partial - set(axes))
        numel, ranks = self._local_numel(sharding), self._ranks(axes)
        # A bandwidth-optimal all-reduce sends 2 (p - 1) / p of its buffer.
        sent = -(-2 * (ranks - 1) * numel // ranks)
        return Step(StepKind.ALL_REDUCE, axes, None, sharding, after, numel=numel, sent_numel=sent)

    def _reduce_scatter(self, atom: int, axes: tuple[str, ...]) -> Step:
        sharding = self.sharding
        after = _cut(Sharding(sharding.splits, sharding.partial - set(axes)), atom, axes)
        chunk = self._local_numel(after)
        numel = chunk * self._ranks(axes)
        return Step(StepKind.REDUCE_SCATTER, axes, atom, sharding, after, numel=numel, sent_numel=numel - chunk)

    def _exchanged(self, atom: int, axes: tuple[str, ...], to_atom: int, to_axes: tuple[str, ...]) -> int:
        """Return the elements that the busiest rank of an all-to-all sends."""
        splits = self.sharding.splits
        extent = self._extent(atom, splits[atom][: -len(axes)])
        other = None if to_atom == atom else self._extent(to_atom, splits[to_atom])
        sizes, order = tuple(self.axes[axis] for axis in axes), tuple(axes.index(axis) for axis in to_axes)
        return _busiest(extent, other, sizes, order) * self._local_numel(self.sharding, (atom, to_atom))


@lru_cache(maxsize=65536)
def _busiest(extent: int, other: int | None, sizes: tuple[int, ...], order: tuple[int, ...]) -> int:
    """Return the most that a rank sends in an exchange of pieces of two extents.

    Without another extent only the order of the pieces changes. Ranks at 0 of all other axes have the longest pieces,
    so only the axes of the exchange count.
    """
    # All ranks at once: a mesh may have thousands.
    places = np.indices(sizes).reshape(len(sizes), -1)
    begins, held = _pieces(extent, sizes, places)
    wanted_at, wanted = _pieces(extent if other is None else other, [sizes[i] for i in order], places[list(order)])
    if other is not None:
        return int((held * (other - wanted)).max())
    overlap = np.minimum(begins + held, wanted_at + wanted) - np.maximum(begins, wanted_at)
    return int((held - np.maximum(overlap, 0)).max())


def _pieces(
    extent: int, sizes: Sequence[int], places: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return begin and length of the piece of each rank after cuts by all axes, as `nested` does for one rank."""
    begins, lengths = np.zeros(places.shape[1], np.int64), np.full(places.shape[1], extent)
    for size, index in zip(sizes, places, strict=True):
        step = -(-lengths // size)
        offset = np.minimum(index * step, lengths)
        begins, lengths = begins + offset, np.minimum(step, lengths - offset)
    return begins, lengths


def _cut(sharding: Sharding, atom: int, axes: tuple[str, ...]) -> Sharding:
    splits = list(sharding.splits)
    splits[atom] += axes
    return Sharding(tuple(splits), sharding.partial)


def _partial(sharding: Sharding, axes: tuple[str, ...]) -> Sharding:
    return Sharding(sharding.splits, sharding.partial | set(axes))
