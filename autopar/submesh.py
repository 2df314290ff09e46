"""The axes of one SPMD program: their sizes, ranks, and the unequal shares of the dim that they split."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

__all__ = ["Shares", "SubMesh"]


@dataclass(frozen=True)
class Shares:
    """Unequal pieces of one dim along some axes, `batch -> pod by 12:4`; all other dims are split evenly.

    Weights are whole numbers without a common divisor, one for each place along an axis. An extent that their sum
    divides has pieces in exact proportion.
    """

    dim: str
    weights: tuple[tuple[str, tuple[int, ...]], ...]

    def of(self, axis: str) -> tuple[int, ...] | None:
        """Return the weights along an axis; None where it splits the dim evenly."""
        return next((weights for name, weights in self.weights if name == axis), None)

    def along(self, axes: Iterable[str]) -> Shares | None:
        """Return the shares along some axes; None if all of them split evenly."""
        names = set(axes)
        kept = tuple((axis, weights) for axis, weights in self.weights if axis in names)
        return Shares(self.dim, kept) if kept else None


class SubMesh(dict[str, int]):
    """The part of a device mesh that runs one SPMD program: axis name -> size, major first, and its ranks.

    The whole mesh is the sub-mesh of all ranks; a stage of a pipeline runs on a smaller one. A sub-mesh is a value: it
    is hashed and compared by axes, in their order, ranks and shares. `seen_from` are the coordinates of the rank whose
    shards are priced, along axes with shares; without it the longest shard counts.

    >>> stage = SubMesh({"dp": 2, "tp": 4}, ranks=range(8, 16))
    >>> stage["tp"], stage.size, stage.rank({"dp": 1, "tp": 0})
    (4, 8, 12)
    """

    # A dict and no dataclass: the search reads sizes in its innermost loops.
    __slots__ = ("_hash", "ranks", "seen_from", "shares")

    def __init__(
        self,
        axes: Mapping[str, int],
        ranks: Sequence[int] | None = None,
        shares: Shares | None = None,
        seen_from: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(axes)
        self.ranks = _as_range(range(self.size) if ranks is None else ranks)
        self.shares = None if shares is None else shares.along(self)
        unequal = () if self.shares is None else [axis for axis, _ in self.shares.weights]
        self.seen_from = {axis: place for axis, place in (seen_from or {}).items() if axis in unequal}
        self._hash = hash((tuple(self.items()), self.ranks, self.shares, tuple(self.seen_from.items())))
        assert len(self.ranks) == self.size, f"{len(self.ranks)} ranks for the sub-mesh {dict(self)}"

    @staticmethod
    def of(axes: Mapping[str, int]) -> SubMesh:
        """Return the axes as a sub-mesh, which they may be already."""
        return axes if isinstance(axes, SubMesh) else SubMesh(axes)

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.values())

    @property
    def used(self) -> SubMesh:
        """Axes with more than one rank: along the others nothing is split or sent."""
        return self.like({name: size for name, size in self.items() if size > 1}, self.ranks)

    def like(self, axes: Mapping[str, int], ranks: Sequence[int] | None = None) -> SubMesh:
        """Return a sub-mesh of some of these axes, or of more, with the shares of this one."""
        return SubMesh(axes, ranks, self.shares, self.seen_from)

    def with_shares(self, shares: Shares | None) -> SubMesh:
        """Return the same axes with these shares."""
        return SubMesh(self, self.ranks, shares, self.seen_from)

    def seen(self, coordinate: Mapping[str, int]) -> SubMesh:
        """Return the same axes, for prices of the rank at a coordinate."""
        return SubMesh(self, self.ranks, self.shares, coordinate)

    @property
    def longest(self) -> dict[str, int]:
        """Coordinates of a rank with the longest shards, or of the one that is priced."""
        found = dict.fromkeys(self, 0)
        for axis, weights in () if self.shares is None else self.shares.weights:
            found[axis] = self.seen_from.get(axis, weights.index(max(weights)))
        return found

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """Return the rank at these positions along all axes."""
        index = 0
        for name, size in self.items():
            # Row-major: the first axis varies slowest, so neighbours along the last axis have adjacent ranks.
            index = index * size + coordinate[name]
        return self.ranks[index]

    def __hash__(self) -> int:  # type: ignore[override]
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, SubMesh):
            return super().__eq__(other)
        mine, theirs = ((one.ranks, one.shares, one.seen_from) for one in (self, other))
        return tuple(self.items()) == tuple(other.items()) and mine == theirs

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __setitem__(self, name: str, size: int) -> NoReturn:
        raise TypeError("a SubMesh is a value and does not change")

    def __reduce__(self) -> tuple[Any, ...]:
        return SubMesh, (dict(self), self.ranks, self.shares, self.seen_from)


def _as_range(ranks: Sequence[int]) -> Sequence[int]:
    # Equal ranks have one form, so that sub-meshes compare and hash without a walk over thousands of them.
    if isinstance(ranks, range):
        return ranks
    consecutive = range(ranks[0], ranks[0] + len(ranks))
    return consecutive if list(ranks) == list(consecutive) else tuple(ranks)
