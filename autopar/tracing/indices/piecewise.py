"""Tensors as functions of their indices: piecewise affine, exact, of any extent.

A `Value` is a list of pieces: a term, and the predicate of the indices where the tensor has it. A term is affine in the
indices, or one number. A predicate is a disjunction of conjunctions of `affine >= 0`. Dims are counted from the right
(-1 is the last), so that broadcasting needs no change; an index along a dim of extent 1 is 0 and does not occur.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from math import gcd

__all__ = [
    "ALWAYS",
    "NEVER",
    "Affine",
    "Conjunction",
    "Pieces",
    "Predicate",
    "Term",
    "UnreadError",
    "at_least",
    "between",
    "both",
    "bounds",
    "constant",
    "either",
    "merged",
    "negation",
    "substituted",
]

MOST = 64
"""Pieces or conjunctions of one tensor; masks have one to four."""


class UnreadError(Exception):
    """A value that this reading cannot express; its text ends a sentence that begins with 'mask kept:'."""


@dataclass(frozen=True)
class Affine:
    """`constant + sum(coefficient * index)`; coefficients by dim, none of them zero."""

    constant: int
    coefficients: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, constant: int, coefficients: Mapping[int, int]) -> Affine:
        return cls(constant, tuple(sorted((dim, times) for dim, times in coefficients.items() if times)))

    def __add__(self, other: Affine) -> Affine:
        found = dict(self.coefficients)
        for dim, times in other.coefficients:
            found[dim] = found.get(dim, 0) + times
        return Affine.of(self.constant + other.constant, found)

    def __mul__(self, factor: int) -> Affine:
        return Affine.of(self.constant * factor, {dim: times * factor for dim, times in self.coefficients})

    def __sub__(self, other: Affine) -> Affine:
        return self + other * -1

    def at(self, index: Mapping[int, Affine]) -> Affine:
        """The same with other expressions in the place of indices."""
        found = Affine(self.constant)
        for dim, times in self.coefficients:
            found = found + index.get(dim, Affine(0, ((dim, 1),))) * times
        return found


Shape = tuple[int, ...]
Conjunction = frozenset[Affine]
"""Each is >= 0."""
Predicate = frozenset[Conjunction]
"""One of them holds."""
Term = Affine | float | bool
"""Whole numbers are affine, all others are a number."""
Pieces = tuple[tuple[Term, Predicate], ...]
"""The predicates exclude each other, and one of them holds."""

ALWAYS: Predicate = frozenset({frozenset()})
NEVER: Predicate = frozenset()


def constant(term: Term) -> Pieces:
    return ((term, ALWAYS),)


def bounds(affine: Affine, shape: Shape) -> tuple[int, int]:
    """The least and the greatest value over all indices of a shape."""
    ends = [(0, times * (shape[dim] - 1)) for dim, times in affine.coefficients]
    return affine.constant + sum(map(min, ends)), affine.constant + sum(map(max, ends))


def at_least(affine: Affine, shape: Shape) -> Predicate:
    """`affine >= 0`."""
    found = _conjunction([affine], shape)
    return NEVER if found is None else frozenset({found})


def between(affine: Affine, low: int, high: int, shape: Shape) -> Predicate:
    """`low <= affine < high`."""
    found = _conjunction([affine - Affine(low), Affine(high - 1) - affine], shape)
    return NEVER if found is None else frozenset({found})


def both(first: Predicate, second: Predicate, shape: Shape) -> Predicate:
    if len(first) * len(second) > MOST:
        raise UnreadError("it has too many cases")
    found = (_conjunction([*one, *other], shape) for one, other in product(first, second))
    return _absorbed((one for one in found if one is not None), shape)


def either(first: Predicate, second: Predicate, shape: Shape) -> Predicate:
    """Written as shortly as two negations make it: `x and y or x and not y` is `x`."""
    found = _absorbed((*first, *second), shape)
    if len(found) < 2:
        return found
    again = negation(negation(found, shape), shape)
    return again if len(again) < len(found) else found


def negation(predicate: Predicate, shape: Shape) -> Predicate:
    found = ALWAYS
    for conjunction in predicate:
        options = (_conjunction([affine * -1 - Affine(1)], shape) for affine in conjunction)
        found = both(found, frozenset(option for option in options if option is not None), shape)
    return found


def _absorbed(conjunctions: Iterable[Conjunction], shape: Shape) -> Predicate:
    """Without those that imply another one."""
    kept: list[Conjunction] = []
    for one in sorted(set(conjunctions), key=len):
        if not any(all(_implied(affine, one, shape) for affine in other) for other in kept):
            kept.append(one)
    if len(kept) > MOST:
        raise UnreadError("it has too many cases")
    return frozenset(kept)


def _implied(affine: Affine, given: Iterable[Affine], shape: Shape) -> bool:
    """Whether one of the given constraints is never greater, so that this one holds where that one does."""
    return any(bounds(affine - other, shape)[0] >= 0 for other in given)


def _conjunction(constraints: Iterable[Affine], shape: Shape) -> Conjunction | None:
    """Constraints without those that the others or the extents imply; None where two contradict each other."""
    kept: list[Affine] = []
    for affine in constraints:
        reduced = _reduced(_narrowed(affine, shape))
        low, high = bounds(reduced, shape)
        if high < 0 or any(bounds(reduced + other, shape)[1] < 0 for other in kept):
            return None
        if low < 0 and not _implied(reduced, kept, shape):
            kept = [other for other in kept if not _implied(other, [reduced], shape)]
            kept.append(reduced)
    return frozenset(kept)


def _narrowed(affine: Affine, shape: Shape) -> Affine:
    """Without the indices that can only be 0."""
    if all(shape[dim] != 1 for dim, _ in affine.coefficients):
        return affine
    return Affine(affine.constant, tuple((dim, times) for dim, times in affine.coefficients if shape[dim] != 1))


def _reduced(affine: Affine) -> Affine:
    """The same constraint with the smallest whole coefficients."""
    divisor = gcd(*(times for _, times in affine.coefficients))
    if divisor < 2:
        return affine
    coefficients = tuple((dim, times // divisor) for dim, times in affine.coefficients)
    return Affine(affine.constant // divisor, coefficients)


def _pinned(predicate: Predicate, shape: Shape) -> dict[int, Affine]:
    """Indices that a predicate leaves one value."""
    if len(predicate) != 1:
        return {}
    low: dict[int, int] = {}
    high: dict[int, int] = {}
    for affine in next(iter(predicate)):
        if len(affine.coefficients) == 1:
            ((dim, times),) = affine.coefficients
            (low if times > 0 else high)[dim] = -affine.constant if times > 0 else affine.constant
    both_ends = {dim: (low.get(dim, 0), high.get(dim, shape[dim] - 1)) for dim in {*low, *high}}
    return {dim: Affine(first) for dim, (first, last) in both_ends.items() if first == last}


def merged(pieces: Iterable[tuple[Term, Predicate]], shape: Shape) -> Pieces:
    """Pieces in their shortest form: those that occur, each term once."""
    found: dict[tuple[str, Term], Predicate] = {}
    for term, predicate in pieces:
        if not predicate:
            continue
        if isinstance(term, Affine):
            term = _narrowed(term.at(_pinned(predicate, shape)), shape)
        key = (repr(term), term)  # by text too: 0.0 and -0.0 are equal, and so are True and 1.0
        found[key] = either(found.get(key, NEVER), predicate, shape)
    if len(found) > MOST:
        raise UnreadError("it has too many cases")
    if len(found) == 1:
        return constant(next(iter(found))[1])
    return tuple((term, predicate) for (_, term), predicate in found.items())


def substituted(pieces: Pieces, index: Mapping[int, Affine] | Callable[[Affine], Affine], shape: Shape) -> Pieces:
    """A value at other indices, `shape` being the extents of the new ones: views, slices and lookups."""
    change = index if callable(index) else lambda affine: affine.at(index)

    def predicate_at(predicate: Predicate) -> Predicate:
        found = (_conjunction(map(change, conjunction), shape) for conjunction in predicate)
        return _absorbed((one for one in found if one is not None), shape)

    changed = ((change(term) if isinstance(term, Affine) else term, predicate_at(p)) for term, p in pieces)
    return merged(changed, shape)
