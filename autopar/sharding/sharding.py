"""The four states of a tensor along a mesh axis, and the frozen layout that holds one for every axis.

    R replicated   the same value on every rank; so is its gradient
    B broadcast    the same value on every rank; the ranks' gradients add up to its gradient
    S split        rank i holds piece i of one dim; its gradient is split the same way
    P partial      the ranks' values add up to the value; its gradient is the same on every rank

A physical dim may be made of several named dims, `(heads head_dim)`, and an axis may split any of them. So a layout
speaks of a tensor's *atoms*: its sizes as if every compound dim were unfolded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, lru_cache
from itertools import product
from typing import Any

from autopar.errors import LayoutError
from autopar.mesh import SubMesh
from autopar.sharding.atoms import Atoms

# Where a rank's part of one atom starts, and how long it is.
Piece = tuple[int, int]


class State(Enum):
    REPLICATED = "R"
    BROADCAST = "B"
    SPLIT = "S"
    PARTIAL = "P"


@dataclass(frozen=True)
class Sharding:
    """A tensor's state along every axis: `splits[atom]` are the axes that split it, major to minor; the rest is R."""

    splits: tuple[tuple[str, ...], ...]
    partial: frozenset[str] = frozenset()
    broadcast: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if len(set(self.axes)) == len(self.axes):
            return
        axis = next(axis for axis in self.axes if self.axes.count(axis) > 1)
        raise LayoutError("E3", f"axis '{axis}' stands twice in the layout {self}: an axis does one thing to a tensor")

    @classmethod
    def replicated(cls, atoms: Atoms) -> Sharding:
        return cls(((),) * len(atoms.sizes))

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """All axes that are mentioned: those that are not, replicate."""
        return (*(axis for axes in self.splits for axis in axes), *sorted(self.partial), *sorted(self.broadcast))

    def state(self, axis: str) -> State:
        if axis in self.partial:
            return State.PARTIAL
        if axis in self.broadcast:
            return State.BROADCAST
        return State.REPLICATED if self.atom(axis) is None else State.SPLIT

    def atom(self, axis: str) -> int | None:
        """Return the atom that the axis splits."""
        return next((atom for atom, axes in enumerate(self.splits) if axis in axes), None)

    # Searches ask the same layouts for these all the time.

    @cached_property
    def _hash(self) -> int:
        return hash((self.splits, self.partial, self.broadcast))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return Sharding, (self.splits, self.partial, self.broadcast)  # hashes differ between processes

    @cached_property
    def value(self) -> Sharding:
        """What the ranks hold, without what becomes of the gradient: R and B are one."""
        return replace(self, broadcast=frozenset()) if self.broadcast else self

    @cached_property
    def gradient(self) -> Sharding:
        """The layout of the gradient. B and P change places, so the gradient's gradient has the first layout again."""
        return Sharding(self.splits, partial=self.broadcast, broadcast=self.partial)

    def without(self, axes: Iterable[str]) -> Sharding:
        """This layout with some axes replicated."""
        gone = frozenset(axes)
        if gone.isdisjoint(self.axes):
            return self
        splits = tuple(tuple(axis for axis in split if axis not in gone) for split in self.splits)
        return Sharding(splits, self.partial - gone, self.broadcast - gone)

    def check(self, atoms: Atoms, axes: SubMesh) -> None:
        """Raise if this is no layout of such a tensor on such a mesh."""
        if len(self.splits) != len(atoms.sizes):
            raise ValueError(f"the layout {self} is for {len(self.splits)} atoms, the tensor has {len(atoms.sizes)}")
        for axis in self.axes:
            if axis not in axes:
                raise LayoutError("E1", f"the layout {self} names axis '{axis}', but the mesh has {', '.join(axes)}")

    def pieces(self, atoms: Atoms, axes: SubMesh, coordinate: Mapping[str, int]) -> tuple[Piece, ...]:
        """Which part of every atom the rank at this coordinate holds."""
        return tuple(
            nested(size, [(axes[axis], coordinate[axis]) for axis in split])
            for size, split in zip(atoms.sizes, self.splits, strict=True)
        )

    def local_sizes(self, atoms: Atoms, axes: SubMesh, coordinate: Mapping[str, int]) -> tuple[int, ...]:
        """Return the sizes of the local atoms; `atoms.fold` makes the local shape of them."""
        return tuple(length for _, length in self.pieces(atoms, axes, coordinate))

    def largest_sizes(self, atoms: Atoms, axes: SubMesh) -> tuple[int, ...]:
        """Return those of the first rank, which has the largest shard."""
        return _largest_sizes(atoms.sizes, self.splits, SubMesh.of(axes))

    def __str__(self) -> str:
        rules = ", ".join(f"{atom} -> {'*'.join(axes)}" for atom, axes in enumerate(self.splits) if axes)
        marks = [("partial", self.partial), ("broadcast", self.broadcast)]
        return f"[{rules}]" + "".join(f" + {word}({'*'.join(sorted(axes))})" for word, axes in marks if axes)


@lru_cache(maxsize=65536)
def _largest_sizes(sizes: tuple[int, ...], splits: tuple[tuple[str, ...], ...], axes: SubMesh) -> tuple[int, ...]:
    return tuple(longest(size, split, axes) for size, split in zip(sizes, splits, strict=True))


def chunk(extent: int, count: int, index: int) -> Piece:
    """Return the pieces of `torch.chunk`, and of DTensor: all of the ceiling size, the last ones shorter or empty."""
    step = -(-extent // count)
    start = min(index * step, extent)
    return start, min(step, extent - start)


def nested(extent: int, cuts: Iterable[tuple[int, int]]) -> Piece:
    """Return the piece of a piece of ...: how many there are and which one, major to minor."""
    start = 0
    for count, index in cuts:
        offset, extent = chunk(extent, count, index)
        start += offset
    return start, extent


def longest(extent: int, split: Iterable[str], axes: SubMesh) -> int:
    """Return the longest piece of an extent that axes split."""
    for axis in split:
        extent = -(-extent // axes[axis])
    return extent


def common_axes(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    """How many major axes two splits of an atom begin with alike."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


def coordinates(axes: SubMesh) -> Iterator[dict[str, int]]:
    """Yield the coordinates of all ranks, row-major: the last axis runs fastest."""
    for indices in product(*map(range, axes.values())):
        yield dict(zip(axes, indices, strict=True))
