"""Graph of shardings and the steps between them, built once for all reshards of tensors with equal atoms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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


class StepForm(NamedTuple):
    """Step whatever the sizes of the atoms; sets of axes are bit masks."""

    kind: StepKind
    axes: tuple[str, ...]
    atom: int | None
    to_atom: int | None
    to_axes: tuple[str, ...]
    after: Sharding
    # Order among equally cheap steps, so that the path does not depend on hashes.
    rank: tuple[int, ...]
    mask: int


class StepEdge(NamedTuple):
    """Step as an edge of the graph; shardings are positions in a list."""

    after: int
    numel: int
    sent: int
    collectives: int
    form: StepForm

    def step(self, before: Sharding) -> Step:
        kind, axes, atom, to_atom, to_axes, after, _, _ = self.form
        return Step(kind, axes, atom, before, after, to_atom, to_axes, self.numel, self.sent)


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
            every = self.made[place] = _StepSizer(self, sharding).steps()
        sums = self.mask(sharding.partial) & limits.active & ~limits.summed
        same = limits.active & ~self.mask(sharding.axes)
        found = []
        kept = tuple(axis for axis in self.names if self.bits[axis] & same & limits.summed)
        # One local step makes all sums that the target wants, because their order does not matter.
        if kept:
            form = _step_form(self.names, StepKind.KEEP_ONE, kept, None, _partial(sharding, kept))
            found.append(self.edge(form, 0, 0))
        if sums:
            found += [
                one
                for one in every.reductions
                if not one.form.mask & ~sums and (one.form.atom is None or one.form.atom in limits.cut)
            ]
        for atom in limits.cut:
            if same:
                found += [one for one in every.slices[atom] if not one.form.mask & ~same]
            movable = len(sharding.splits[atom]) - limits.fixed[atom]
            for one in every.pieces[atom] if movable else ():
                form = one.form
                if len(form.axes) > movable or (form.to_atom is not None and form.to_atom not in limits.cut):
                    continue
                if form.kind is not StepKind.PAD or not form.mask & ~limits.summed:
                    found.append(one)
        return found

    def edge(self, form: StepForm, numel: int, sent: int) -> StepEdge:
        return StepEdge(self.place(form.after), numel, sent, 0 if form.kind in LOCAL else 1, form)


def _orders(axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return all ordered choices of at least one axis."""
    return [order for count in range(1, len(axes) + 1) for order in permutations(axes, count)]


@dataclass(frozen=True)
class _StepForms:
    """Steps from one sharding: reductions of sums; by atom, slices of it and moves of its pieces."""

    reductions: tuple[StepForm, ...]
    slices: Mapping[int, tuple[StepForm, ...]]
    pieces: Mapping[int, tuple[StepForm, ...]]


@lru_cache(maxsize=65536)
def _step_forms(sharding: Sharding, roles: str, names: tuple[str, ...]) -> _StepForms:
    """Return the steps from a sharding of a tensor, whatever the sizes; exchanges of routed rows are left out."""
    places = range(len(sharding.splits))
    sums = tuple(axis for axis in names if axis in sharding.partial)
    split = {axis for axes in sharding.splits for axis in axes}
    same = tuple(axis for axis in names if axis not in sharding.partial and axis not in split)
    # How many rows of a group stand where depends on data: they are neither cut nor joined, only exchanged.
    plain = [atom for atom in places if not roles or roles[atom] == OTHER]
    reductions = []
    for count in range(1, len(sums) + 1):
        for axes in combinations(sums, count):
            after = Sharding(sharding.splits, sharding.partial - set(axes))
            reductions.append(_step_form(names, StepKind.ALL_REDUCE, axes, None, after))
    for atom in plain:
        for axes in _orders(sums):
            after = _cut(Sharding(sharding.splits, sharding.partial - set(axes)), atom, axes)
            reductions.append(_step_form(names, StepKind.REDUCE_SCATTER, axes, atom, after))
    slices: dict[int, tuple[StepForm, ...]] = dict.fromkeys(places, ())
    pieces: dict[int, tuple[StepForm, ...]] = dict.fromkeys(places, ())
    for atom in plain:
        cuts = ((axes, _cut(sharding, atom, axes)) for axes in _orders(same))
        slices[atom] = tuple(_step_form(names, StepKind.SLICE, axes, atom, after) for axes, after in cuts)
        held = sharding.splits[atom]
        # A rank can join only pieces that are neighbours, those of the most minor axes.
        for count in range(1, len(held) + 1):
            pieces[atom] += tuple(_joins(sharding, atom, held[-count:], names))
            pieces[atom] += tuple(_exchanges(sharding, atom, held[-count:], plain, names))
    return _StepForms(tuple(reductions), slices, pieces)


def _step_form(
    names: tuple[str, ...],
    kind: StepKind,
    axes: tuple[str, ...],
    atom: int | None,
    after: Sharding,
    to_atom: int | None = None,
    to_axes: tuple[str, ...] = (),
) -> StepForm:
    atoms = [-1 if one is None else one for one in (atom, to_atom)]
    rank = (_RANK[kind], *atoms, *(names.index(axis) for axis in (*axes, *to_axes)))
    return StepForm(kind, axes, atom, to_atom, to_axes, after, rank, sum(1 << names.index(axis) for axis in axes))


def _joined(sharding: Sharding, atom: int, axes: tuple[str, ...]) -> Sharding:
    """Return a sharding without the most minor axes of an atom."""
    splits = list(sharding.splits)
    splits[atom] = splits[atom][: -len(axes)]
    return Sharding(tuple(splits), sharding.partial)


def _joins(sharding: Sharding, atom: int, axes: tuple[str, ...], names: tuple[str, ...]) -> Iterator[StepForm]:
    joined = _joined(sharding, atom, axes)
    yield _step_form(names, StepKind.ALL_GATHER, axes, atom, joined)
    yield _step_form(names, StepKind.PAD, axes, atom, _partial(joined, axes))


def _exchanges(
    sharding: Sharding, atom: int, axes: tuple[str, ...], reached: Sequence[int], names: tuple[str, ...]
) -> Iterator[StepForm]:
    joined = _joined(sharding, atom, axes)
    for to_atom in reached:
        for to_axes in permutations(axes):
            # Within one atom, an exchange that leaves the first axis in place needs only the others.
            if to_atom != atom or to_axes[0] != axes[0]:
                after = _cut(joined, to_atom, to_axes)
                yield _step_form(names, StepKind.ALL_TO_ALL, axes, atom, after, to_atom, to_axes)


class _StepSizer:
    """Builder of the steps from one sharding, with their sizes."""

    def __init__(self, space: StepGraph, sharding: Sharding) -> None:
        self.space = space
        self.atoms, self.axes = space.atoms, space.axes
        self.sharding = sharding
        self.chunk = self._local_numel(sharding)

    def steps(self) -> _OutgoingSteps:
        forms = _step_forms(self.sharding, self.atoms.roles, self.space.names)
        pieces = {atom: self._edges((*found, *self._routed(atom))) for atom, found in forms.pieces.items()}
        slices = {atom: self._edges(found) for atom, found in forms.slices.items()}
        return _OutgoingSteps(self._edges(forms.reductions), slices, pieces)

    def _edges(self, forms: Iterable[StepForm]) -> tuple[StepEdge, ...]:
        return tuple(self.space.edge(form, *self._numel(form)) for form in forms)

    def _numel(self, form: StepForm) -> tuple[int, int]:
        """Return the elements in the buffer of a step, and those that it sends."""
        kind, chunk, ranks = form.kind, self.chunk, self._ranks(form.axes)
        if kind is StepKind.ALL_TO_ALL:
            assert form.atom is not None
            assert form.to_atom is not None
            return chunk, self._exchanged(form.atom, form.axes, form.to_atom, form.to_axes)
        if kind is StepKind.ALL_REDUCE:
            # A bandwidth-optimal all-reduce sends 2 (p - 1) / p of its buffer.
            return chunk, -(-2 * (ranks - 1) * chunk // ranks)
        if kind is StepKind.REDUCE_SCATTER:
            chunk = self._local_numel(form.after)
        elif kind is not StepKind.ALL_GATHER:
            return 0, 0
        return chunk * ranks, chunk * (ranks - 1)

    def _ranks(self, axes: tuple[str, ...]) -> int:
        return prod(self.axes[axis] for axis in axes)

    def _extent(self, atom: int, split: tuple[str, ...]) -> int:
        """Return the longest local extent of an atom."""
        return longest(self.atoms.sizes[atom], split, self.axes, atom in self.atoms.by_share)

    def _local_numel(self, sharding: Sharding, leave_out: tuple[int, ...] = ()) -> int:
        splits = enumerate(sharding.splits)
        return prod(self._extent(atom, split) for atom, split in splits if atom not in leave_out)

    def _routed(self, atom: int) -> Iterator[StepForm]:
        """Yield the exchanges of the groups of routed rows, or of their rows."""
        held = self.sharding.splits[atom]
        for count in range(1, len(held) + 1) if self.atoms.role(atom) != OTHER else ():
            axes = held[-count:]
            yield from _exchanges(self.sharding, atom, axes, self._reached(atom, axes), self.space.names)

    def _reached(self, atom: int, axes: tuple[str, ...]) -> list[int]:
        """Return the atoms that pieces of an atom may be exchanged for: rows for whole groups, or groups for rows."""
        role, splits = self.atoms.role(atom), self.sharding.splits
        return [
            i
            for i, size in enumerate(self.atoms.sizes)
            if self.atoms.role(i) not in (OTHER, role)
            if role == GROUP or size % self._ranks((*splits[i], *axes)) == 0
        ]

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
