"""Atoms: the smallest named pieces of the dims of a tensor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Protocol


class NamedAtom(Protocol):
    @property
    def dim(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def names(self) -> tuple[str, ...]: ...


class HasAtoms(Protocol):
    """Tensor as the layout language reads it: a name, and atoms with the names of the dims that they belong to."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def atoms(self) -> tuple[NamedAtom, ...]: ...


def atoms_of(tensor: HasAtoms) -> Atoms:
    """Return the sizes of the atoms of a tensor; tensors with equal atoms share one object."""
    return _atoms(tensor.atoms, len(tensor.shape))


@lru_cache(maxsize=65536)
def _atoms(atoms: tuple[NamedAtom, ...], rank: int) -> Atoms:
    counts = [0] * rank
    for atom in atoms:
        counts[atom.dim] += 1
    return Atoms(tuple(atom.size for atom in atoms), tuple(counts))


@dataclass(frozen=True)
class Atoms:
    """Global sizes of the atoms of a tensor, row-major; `dims[i]` is the number of atoms of physical dim i."""

    sizes: tuple[int, ...]
    dims: tuple[int, ...]

    def __post_init__(self) -> None:
        if sum(self.dims) != len(self.sizes) or min((*self.sizes, *self.dims), default=0) < 0:
            raise ValueError(f"{len(self.sizes)} atoms {self.sizes} cannot be dealt to physical dims as {self.dims}")

    @classmethod
    def plain(cls, shape: Iterable[int]) -> Atoms:
        """Return the atoms of a tensor of this shape, one for each dim."""
        sizes = tuple(shape)
        return cls(sizes, (1,) * len(sizes))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.fold(self.sizes)

    def fold(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Return the physical shape of a tensor whose atoms have these (local) sizes."""
        return tuple(prod(sizes[i] for i in members) for members in self.members)

    @cached_property
    def members(self) -> tuple[range, ...]:
        """The atoms of each physical dim."""
        ends = [sum(self.dims[: i + 1]) for i in range(len(self.dims))]
        return tuple(range(end - count, end) for end, count in zip(ends, self.dims, strict=True))
