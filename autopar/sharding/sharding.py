"""The sharding of a tensor: one of four states along every mesh axis.

    R replicated   the same value on every rank; so is its gradient
    B broadcast    the same value on every rank; the ranks' gradients add up to its gradient
    S split        rank i holds piece i of one dim; its gradient is split the same way
    P partial      the ranks' values add up to the value; its gradient is the same on every rank

A physical dim may be made of several named dims, `(heads head_dim)`, and an axis may split any of them. So a sharding
splits the *atoms* of a tensor: its dims with every compound one unfolded. `to_placements` converts it for DTensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import Any, Protocol

from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from autopar.errors import LayoutError
from autopar.mesh import SubMesh


class NamedAtom(Protocol):
    @property
    def dim(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def by_share(self) -> bool: ...


class HasAtoms(Protocol):
    """Tensor as the layout language reads it: a name, and atoms with the names of the dims that they belong to."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def atoms(self) -> tuple[NamedAtom, ...]: ...
    @property
    def routed(self) -> int: ...
    @property
    def slotted(self) -> int: ...


def atoms_of(tensor: HasAtoms) -> Atoms:
    """Return the sizes of the atoms of a tensor; tensors with equal atoms share one object."""
    return _atoms(tensor.atoms, len(tensor.shape), tensor.routed)


@lru_cache(maxsize=65536)
def _atoms(atoms: tuple[NamedAtom, ...], rank: int, routed: int) -> Atoms:
    counts = [0] * rank
    for atom in atoms:
        counts[atom.dim] += 1
    marked = tuple(i for i, atom in enumerate(atoms) if atom.by_share)
    return Atoms(tuple(atom.size for atom in atoms), tuple(counts), marked, roles_of(atoms, routed))


# Roles of the atoms of a tensor with routed rows: its groups, its rows, and all others.
GROUP, ROW, OTHER = "g", "r", "."
# Rows of the busiest rank over the mean, where groups are split; a guess, as it depends on the router. Prices and
# memory count with it, plans print it.
ROUTING_IMBALANCE = 1.2


def routing_excess(roles: str, *shardings: Sharding) -> float:
    """Return the rows of the busiest rank over the mean: more than 1 where one of the shardings splits groups."""
    split = any(axes for one in shardings for role, axes in zip(roles, one.splits, strict=False) if role == GROUP)
    return ROUTING_IMBALANCE if split else 1.0


def roles_of(atoms: tuple[NamedAtom, ...], routed: int) -> str:
    """Return the role of each atom, a letter each; nothing for a tensor that is stored in full."""
    if not routed:
        return ""
    return "".join(OTHER if atom.dim else GROUP if i < routed else ROW for i, atom in enumerate(atoms))


@dataclass(frozen=True)
class Atoms:
    """Global sizes of the atoms of a tensor, row-major; `dims[i]` is the number of atoms of physical dim i.

    Routed rows have the dim `(g s)`, of which only one group of each row is stored (`autopar/rules/ops/routed.py`).
    """

    sizes: tuple[int, ...]
    dims: tuple[int, ...]
    # Atoms that axes with shares split by them.
    by_share: tuple[int, ...] = ()
    # By atom, its role in routed rows; empty for a tensor that is stored in full.
    roles: str = ""

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

    def role(self, atom: int) -> str:
        return self.roles[atom] if self.roles else OTHER

    @cached_property
    def members(self) -> tuple[range, ...]:
        """The atoms of each physical dim."""
        ends = [sum(self.dims[: i + 1]) for i in range(len(self.dims))]
        return tuple(range(end - count, end) for end, count in zip(ends, self.dims, strict=True))


# Start and length of the part of one atom that a rank has.
Piece = tuple[int, int]


class State(Enum):
    REPLICATED = "R"
    BROADCAST = "B"
    SPLIT = "S"
    PARTIAL = "P"


@dataclass(frozen=True)
class Sharding:
    """State of a tensor along every axis: `splits[atom]` are its axes, major to minor; unnamed axes replicate."""

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
        """All axes along which the tensor is not replicated."""
        # Sets are sorted, because their order differs between processes.
        return (*(axis for axes in self.splits for axis in axes), *sorted(self.partial), *sorted(self.broadcast))

    def state(self, axis: str) -> State:
        if axis in self.partial:
            return State.PARTIAL
        if axis in self.broadcast:
            return State.BROADCAST
        return State.REPLICATED if self.atom(axis) is None else State.SPLIT

    def atom(self, axis: str) -> int | None:
        """Return the atom that an axis splits, or None."""
        return next((atom for atom, axes in enumerate(self.splits) if axis in axes), None)

    # Searches look shardings up in dicts all the time, so the hash is computed once.

    @cached_property
    def _hash(self) -> int:
        return hash((self.splits, self.partial, self.broadcast))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # The cached hash stays behind, because hashes of strings differ between processes.
        return Sharding, (self.splits, self.partial, self.broadcast)

    @cached_property
    def value(self) -> Sharding:
        """The sharding of the values alone: B becomes R, as only their gradients differ."""
        return replace(self, broadcast=frozenset()) if self.broadcast else self

    @cached_property
    def gradient(self) -> Sharding:
        """The sharding of the gradient: B and P change places."""
        return Sharding(self.splits, partial=self.broadcast, broadcast=self.partial)

    def sums_to(self, other: Sharding) -> bool:
        """Return whether a reshard to another sharding adds up partial values."""
        return not self.partial <= other.partial

    def without(self, axes: Iterable[str]) -> Sharding:
        """Return this sharding with some axes replicated."""
        gone = frozenset(axes)
        if gone.isdisjoint(self.axes):
            return self
        splits = tuple(tuple(axis for axis in split if axis not in gone) for split in self.splits)
        return Sharding(splits, self.partial - gone, self.broadcast - gone)

    def routed(self, roles: str) -> Sharding:
        """Return the splits of the groups and rows of routed rows alone."""
        pairs = zip(self.splits, roles, strict=True)
        return Sharding(tuple(() if role == OTHER else axes for axes, role in pairs))

    def check(self, atoms: Atoms, axes: SubMesh) -> None:
        """Raise unless a tensor with these atoms can have this sharding on this mesh."""
        if len(self.splits) != len(atoms.sizes):
            raise ValueError(f"the layout {self} is for {len(self.splits)} atoms, the tensor has {len(atoms.sizes)}")
        for axis in self.axes:
            if axis not in axes:
                raise LayoutError("E1", f"the layout {self} names axis '{axis}', but the mesh has {', '.join(axes)}")

    def pieces(self, atoms: Atoms, axes: SubMesh, coordinate: Mapping[str, int]) -> tuple[Piece, ...]:
        """Return the part of every atom on the rank at this coordinate."""
        return tuple(
            piece(size, split, axes, coordinate, i in atoms.by_share)
            for i, (size, split) in enumerate(zip(atoms.sizes, self.splits, strict=True))
        )

    def local_sizes(self, atoms: Atoms, axes: SubMesh, coordinate: Mapping[str, int]) -> tuple[int, ...]:
        """Return the sizes of the local atoms; `atoms.fold` makes the local shape of them."""
        return tuple(length for _, length in self.pieces(atoms, axes, coordinate))

    def largest_sizes(self, atoms: Atoms, axes: SubMesh) -> tuple[int, ...]:
        """Return the local sizes on the rank that has the largest shard, or on the one that prices are for."""
        return _largest_sizes(atoms.sizes, self.splits, SubMesh.of(axes), atoms.by_share)

    def __str__(self) -> str:
        rules = ", ".join(f"{atom} -> {'*'.join(axes)}" for atom, axes in enumerate(self.splits) if axes)
        marks = [("partial", self.partial), ("broadcast", self.broadcast)]
        return f"[{rules}]" + "".join(f" + {word}({'*'.join(sorted(axes))})" for word, axes in marks if axes)


@lru_cache(maxsize=65536)
def _largest_sizes(
    sizes: tuple[int, ...], splits: tuple[tuple[str, ...], ...], axes: SubMesh, by_share: tuple[int, ...]
) -> tuple[int, ...]:
    pairs = zip(sizes, splits, strict=True)
    return tuple(longest(size, split, axes, i in by_share) for i, (size, split) in enumerate(pairs))


def chunk(extent: int, count: int, index: int, weights: tuple[int, ...] | None = None) -> Piece:
    """Return a piece of `torch.chunk`, of the ceiling size, the last ones shorter; with weights, one in proportion."""
    if weights is not None:
        whole, before = sum(weights), sum(weights[:index])
        start = extent * before // whole
        return start, extent * (before + weights[index]) // whole - start
    step = -(-extent // count)
    start = min(index * step, extent)
    return start, min(step, extent - start)


def piece(extent: int, split: Iterable[str], axes: SubMesh, at: Mapping[str, int], by_share: bool) -> Piece:
    """Return the piece of an extent at a coordinate after cuts by several axes, major to minor."""
    start = 0
    for axis in split:
        offset, extent = chunk(extent, axes[axis], at[axis], weights_of(axes, axis, by_share))
        start += offset
    return start, extent


def weights_of(axes: SubMesh, axis: str, by_share: bool) -> tuple[int, ...] | None:
    """Return the weights by which an axis splits an atom; None if evenly."""
    return axes.shares.of(axis) if by_share and axes.shares is not None else None


def longest(extent: int, split: Iterable[str], axes: SubMesh, by_share: bool = False) -> int:
    """Return the length of the longest piece of an extent that these axes split, or of that which is priced."""
    for axis in split:
        weights = weights_of(axes, axis, by_share)
        if weights is None:
            extent = -(-extent // axes[axis])
        elif axis in axes.seen_from:
            extent = chunk(extent, len(weights), axes.seen_from[axis], weights)[1]
        else:
            extent = max(chunk(extent, len(weights), i, weights)[1] for i in range(len(weights)))
    return extent


def split_by_share(sharding: Sharding, atoms: Atoms, axes: SubMesh) -> str | None:
    """Return an axis that splits a tensor into shards of unequal shares, None if there is none."""
    split = (axis for i in atoms.by_share for axis in sharding.splits[i])
    return next((axis for axis in split if weights_of(axes, axis, True) is not None), None)


def splits_evenly(extent: int, split: Iterable[str], axes: SubMesh, by_share: bool = False) -> bool:
    """Return whether axes split an extent without a rest: into equal pieces, or in proportion to their shares."""
    lengths = {extent}
    for axis in split:
        weights = weights_of(axes, axis, by_share)
        if any(length % (axes[axis] if weights is None else sum(weights)) for length in lengths):
            return False
        if weights is None:
            lengths = {length // axes[axis] for length in lengths}
        else:
            lengths = {length // sum(weights) * weight for length in lengths for weight in weights}
    return True


def common_axes(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    """Return the number of leading axes that two splits of an atom share."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


def coordinates(axes: SubMesh) -> Iterator[dict[str, int]]:
    """Yield the coordinates of all ranks, row-major: the last axis varies fastest."""
    for indices in product(*map(range, axes.values())):
        yield dict(zip(axes, indices, strict=True))


# -- micro-batches ----------------------------------------------------------------------------------------------------
# The statement `micro 8` of a layout splits the batch into eight micro-batches, one after the other. Propagation treats
# them as an axis of eight places. Along it a tensor is replicated (computed once per call), split (a part in each
# micro-batch), partial (parts add up after the last one) or broadcast (one value, whose gradients add up).

# Name of the axis; nobody can write it, so it is no axis of a mesh.
MICRO = "micro-batch"


def with_time(axes: SubMesh, count: int) -> SubMesh:
    """Return the axes of a mesh and, for more than one micro-batch, the axis of time."""
    return axes if count == 1 else SubMesh.of(axes).like({MICRO: count, **without_time(axes)})


def without_time(axes: SubMesh) -> SubMesh:
    """Return the axes of the mesh alone."""
    return SubMesh.of(axes).like({axis: size for axis, size in axes.items() if axis != MICRO})


def place_in_time(sharding: Sharding) -> tuple[State, int | None]:
    """Return the state along the micro-batches, and the atom that they split."""
    return sharding.state(MICRO), sharding.atom(MICRO)


# -- DTensor placements ------------------------------------------------------------------------------------------------


def to_placements(sharding: Sharding, atoms: Atoms, axes: SubMesh, tensor: str = "the tensor") -> tuple[Placement, ...]:
    """Return one placement per mesh axis, in the order of the mesh, or raise E4 naming `tensor`.

    A placement names a physical dim. An axis may split a minor atom of a dim, or split in another order than the
    mesh's. Its pieces are then strided in the dim, and the placement is a `_StridedShard`, which exists for even pieces
    only. `autopar.runtime.strided_dtensor` lets DTensor gather them.
    """
    sharding.check(atoms, axes)
    dims = {atom: dim for dim, members in enumerate(atoms.members) for atom in members}
    placements: list[Placement] = []
    for axis in axes:
        atom = sharding.atom(axis)
        if atom is None:
            placements.append(Partial() if axis in sharding.partial else Replicate())
            continue
        # A stride of 1 is a plain shard; any other makes blocks in which the axis cuts.
        stride = _stride(sharding, atoms, axes, axis, dims[atom])
        _check_even(sharding, atoms, axes, dims[atom], tensor)
        placements.append(Shard(dims[atom]) if stride == 1 else _StridedShard(dims[atom], split_factor=stride))
    return tuple(placements)


def _stride(sharding: Sharding, atoms: Atoms, axes: SubMesh, axis: str, dim: int) -> int:
    """Return the number of blocks of a dim in each of which the axis cuts."""
    order = list(axes)
    earlier = set(order[: order.index(axis)])
    stride = 1
    for atom in atoms.members[dim]:
        split = sharding.splits[atom]
        if axis in split:
            return stride * prod(axes[major] for major in split[: split.index(axis)] if major not in earlier)
        stride *= atoms.sizes[atom] // prod(axes[major] for major in split if major in earlier)
    raise AssertionError(f"axis '{axis}' does not split dim {dim} in {sharding}")


def _check_even(sharding: Sharding, atoms: Atoms, axes: SubMesh, dim: int, tensor: str) -> None:
    # Uneven pieces are contiguous only if one atom is cut by axes in the order of the mesh.
    members = atoms.members[dim]
    places = {axis: place for place, axis in enumerate(axes)}
    simple = len(members) == 1 and sorted(sharding.splits[members[0]], key=places.__getitem__) == [
        *sharding.splits[members[0]]
    ]
    for atom in members:
        split = sharding.splits[atom]
        count, size = prod(axes[axis] for axis in split), atoms.sizes[atom]
        if not simple and size % count:
            why = (
                f"the dim is compound, with atoms {tuple(atoms.sizes[atom] for atom in members)}"
                if len(members) > 1
                else f"the mesh has its axes in the order {', '.join(axes)}"
            )
            raise LayoutError(
                "E4",
                f"{tensor}: dim {dim} cannot be stored split by {'*'.join(split)}: {size} is not divisible by {count}, "
                f"and {why}, so the uneven pieces would lie strided, which no DTensor placement describes\n"
                f"fix: split by axes whose product divides {size}, or another dim",
            )
