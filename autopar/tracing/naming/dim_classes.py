"""Union-find over the dims of all tensors of a graph, with compound classes and refused merges.

A class is a set of physical dims of equal extent that the rules tie together. A class may have parts:
`(heads head_dim)` is one physical dim that a view splits. A merge of two classes with parts merges the parts, split
further where they are cut differently. A merge is refused, as a whole, if it would put one class on one tensor twice
(the two `seq` of attention scores), or if the parts do not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import prod


class DimSpace:
    """All classes of one graph, as numbers; `find` returns the representative of a merged class."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._size: list[int] = []
        self._parts: list[tuple[int, ...]] = []
        self._tensors: list[set[int]] = []
        self._trail: list[Callable[[], None]] = []

    def new(self, size: int) -> int:
        """Return a new class without tensors."""
        self._parent.append(len(self._parent))
        self._size.append(size)
        self._parts.append(())
        self._tensors.append(set())
        return len(self._parent) - 1

    def compound(self, parts: Iterable[int]) -> int:
        """Return the class of a dim made of these parts, major first; parts of size 1 do not count."""
        roots = tuple(self.find(part) for part in parts)
        kept = roots if len(roots) == 1 else tuple(part for part in roots if self._size[part] > 1)
        if len(kept) == 1:
            return kept[0]
        dim = self.new(prod(self._size[part] for part in kept))
        self._parts[dim] = kept
        return dim

    def find(self, dim: int) -> int:
        # No path compression: an undo of a merge restores one parent only.
        root = dim
        while self._parent[root] != root:
            root = self._parent[root]
        return root

    def size(self, dim: int) -> int:
        return self._size[self.find(dim)]

    def parts(self, dim: int) -> tuple[int, ...]:
        """Return the classes that this one consists of, major first; empty if nothing splits it."""
        return tuple(self.find(part) for part in self._parts[self.find(dim)])

    def atoms(self, dim: int) -> Iterator[int]:
        """Yield the smallest classes that this one consists of, major first."""
        parts = self.parts(dim)
        if not parts:
            yield self.find(dim)
        for part in parts:
            yield from self.atoms(part)

    def within(self, dim: int) -> Iterator[int]:
        """Yield the class and its parts, at every level."""
        yield self.find(dim)
        for part in self.parts(dim):
            yield from self.within(part)

    def tensors(self, dim: int) -> frozenset[int]:
        """Return the tensors that have this class, as a dim or inside a compound."""
        return frozenset(self._tensors[self.find(dim)])

    def attach(self, dim: int, tensor: int) -> bool:
        """Add a class as a dim of a tensor; False, and no change, if the tensor has it already."""
        return self._all_or_nothing(lambda: self._touch(dim, {tensor}))

    def merge(self, first: int, second: int) -> bool:
        """Merge two classes; False, and no change, if that is refused."""
        if self.find(first) == self.find(second):
            return True
        return self._all_or_nothing(lambda: self._merge(first, second))

    def unite_compounds(self) -> None:
        """Merge the compounds that have the same parts."""
        # A merge of two compounds can make those around them equal.
        again = True
        while again:
            again = False
            first: dict[tuple[int, ...], int] = {}
            for dim in range(len(self._parent)):
                parts = self.parts(dim) if self._parent[dim] == dim else ()
                if parts and self.find(first.setdefault(parts, dim)) != dim:
                    again |= self.merge(first[parts], dim)

    # A merge changes many classes before it can fail, and copies of all classes are slow. So each change below appends
    # its inverse to the trail, and a refusal runs the trail backwards.

    def _all_or_nothing(self, change: Callable[[], bool]) -> bool:
        done = change()
        if not done:
            for undo in reversed(self._trail):
                undo()
        self._trail.clear()
        return done

    def _touch(self, dim: int, tensors: set[int]) -> bool:
        root = self.find(dim)
        carried = self._tensors[root]
        if not carried.isdisjoint(tensors):
            return False
        carried |= tensors
        self._trail.append(lambda: carried.difference_update(tensors))
        return all(self._touch(part, tensors) for part in self._parts[root])

    def _merge(self, first: int, second: int) -> bool:
        keep, drop = self.find(first), self.find(second)
        if keep == drop:
            return True
        # The smaller set is copied into the larger one: each entry moves at most log(n) times.
        if len(self._tensors[keep]) < len(self._tensors[drop]):
            keep, drop = drop, keep
        added = set(self._tensors[drop])
        if self._size[keep] != self._size[drop] or not self._tensors[keep].isdisjoint(added):
            return False
        kept_parts, dropped_parts = self._parts[keep], self._parts[drop]
        kept_tensors = set(self._tensors[keep]) if dropped_parts and not kept_parts else set()
        self._set_parent(drop, keep)
        carried = self._tensors[keep]
        carried |= added
        self._trail.append(lambda: carried.difference_update(added))
        if kept_parts and dropped_parts:
            return self._merge_parts(list(kept_parts), list(dropped_parts))
        if kept_parts:
            return all(self._touch(part, added) for part in kept_parts)
        self._set_parts(keep, dropped_parts)
        return all(self._touch(part, kept_tensors) for part in dropped_parts)

    def _merge_parts(self, left: list[int], right: list[int]) -> bool:
        """Merge two partitions of one dim, major first; split further where one is coarser."""
        while left and right:
            first, second = self.find(left[0]), self.find(right[0])
            if self._size[first] == self._size[second]:
                if not self._merge(first, second):
                    return False
                del left[0], right[0]
                continue
            coarse, side = (first, left) if self._size[first] > self._size[second] else (second, right)
            fine = second if coarse == first else first
            if not self._parts[coarse] and not self._cut(coarse, self._size[fine]):
                return False
            side[:1] = self._parts[coarse]
        return not left and not right

    def _cut(self, dim: int, major: int) -> bool:
        """Split a class into a major part of this size and the rest."""
        if self._size[dim] % major:
            return False
        parts = (self.new(major), self.new(self._size[dim] // major))
        self._set_parts(dim, parts)
        return all(self._touch(part, set(self._tensors[dim])) for part in parts)

    def _set_parent(self, dim: int, parent: int) -> None:
        self._parent[dim] = parent
        self._trail.append(lambda: self._parent.__setitem__(dim, dim))

    def _set_parts(self, dim: int, parts: tuple[int, ...]) -> None:
        before = self._parts[dim]
        self._parts[dim] = parts
        self._trail.append(lambda: self._parts.__setitem__(dim, before))
