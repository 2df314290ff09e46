"""Tensors as exact, piecewise affine functions of their indices, for any extent.

`Pieces` are pairs of a term and the predicate of the indices at which the tensor has it. A term is affine in the
indices, or one number. A predicate is a disjunction of conjunctions of `affine >= 0`. Dims are counted from the right
(-1 is the last), so that broadcasting changes nothing. An index along a dim of extent 1 is 0 and is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from math import gcd

# Most pieces, or conjunctions of a predicate, of one tensor; masks have one to four.
MOST = 64


class UnreadError(Exception):
    """A value that is not piecewise affine; its text completes a sentence that begins with 'mask kept:'."""


@dataclass(frozen=True)
class Affine:
    """Affine expression `constant + sum(coefficient * index)`; coefficients by dim, none of them zero."""

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
        """Return the expression with other expressions in place of indices."""
        found = Affine(self.constant)
        for dim, times in self.coefficients:
            found = found + index.get(dim, Affine(0, ((dim, 1),))) * times
        return found


Shape = tuple[int, ...]
# All expressions are >= 0.
Conjunction = frozenset[Affine]
# At least one conjunction is true.
Predicate = frozenset[Conjunction]
# Integers are affine, all other numbers are themselves.
Term = Affine | float | bool
# Exactly one predicate is true at each index.
Pieces = tuple[tuple[Term, Predicate], ...]

ALWAYS: Predicate = frozenset({frozenset()})
NEVER: Predicate = frozenset()


def constant(term: Term) -> Pieces:
    return ((term, ALWAYS),)


def bounds(affine: Affine, shape: Shape) -> tuple[int, int]:
    """Return the least and the greatest value over all indices of a shape."""
    ends = [(0, times * (shape[dim] - 1)) for dim, times in affine.coefficients]
    return affine.constant + sum(map(min, ends)), affine.constant + sum(map(max, ends))


def at_least(affine: Affine, shape: Shape) -> Predicate:
    """Return the predicate `affine >= 0`."""
    found = _conjunction([affine], shape)
    return NEVER if found is None else frozenset({found})


def between(affine: Affine, low: int, high: int, shape: Shape) -> Predicate:
    """Return the predicate `low <= affine < high`."""
    found = _conjunction([affine - Affine(low), Affine(high - 1) - affine], shape)
    return NEVER if found is None else frozenset({found})


def both(first: Predicate, second: Predicate, shape: Shape) -> Predicate:
    if len(first) * len(second) > MOST:
        raise UnreadError("it has too many cases")
    found = (_conjunction([*one, *other], shape) for one, other in product(first, second))
    return _drop_implied((one for one in found if one is not None), shape)


def either(first: Predicate, second: Predicate, shape: Shape) -> Predicate:
    found = _drop_implied((*first, *second), shape)
    if len(found) < 2:
        return found
    # A double negation can shorten a disjunction: `x and y or x and not y` becomes `x`.
    negated_twice = negation(negation(found, shape), shape)
    return negated_twice if len(negated_twice) < len(found) else found


def negation(predicate: Predicate, shape: Shape) -> Predicate:
    found = ALWAYS
    for conjunction in predicate:
        options = (_conjunction([affine * -1 - Affine(1)], shape) for affine in conjunction)
        found = both(found, frozenset(option for option in options if option is not None), shape)
    return found


def _drop_implied(conjunctions: Iterable[Conjunction], shape: Shape) -> Predicate:
    """Return the conjunctions that imply no other one."""
    kept: list[Conjunction] = []
    for one in sorted(set(conjunctions), key=len):
        if not any(all(_is_implied(affine, one, shape) for affine in other) for other in kept):
            kept.append(one)
    if len(kept) > MOST:
        raise UnreadError("it has too many cases")
    return frozenset(kept)


def _is_implied(affine: Affine, given: Iterable[Affine], shape: Shape) -> bool:
    """Return True if one of the given constraints is never greater, and so implies this one."""
    return any(bounds(affine - other, shape)[0] >= 0 for other in given)


def _conjunction(constraints: Iterable[Affine], shape: Shape) -> Conjunction | None:
    """Return the constraints that neither others nor the extents imply; None for a contradiction."""
    kept: list[Affine] = []
    for affine in constraints:
        reduced = _without_zero_indices(affine, shape)
        # Dividing by the common divisor and rounding down keeps the integer solutions.
        divisor = gcd(*(times for _, times in reduced.coefficients))
        if divisor > 1:
            coefficients = tuple((dim, times // divisor) for dim, times in reduced.coefficients)
            reduced = Affine(reduced.constant // divisor, coefficients)
        low, high = bounds(reduced, shape)
        if high < 0 or any(bounds(reduced + other, shape)[1] < 0 for other in kept):
            return None
        if low < 0 and not _is_implied(reduced, kept, shape):
            kept = [other for other in kept if not _is_implied(other, [reduced], shape)]
            kept.append(reduced)
    return frozenset(kept)


def _without_zero_indices(affine: Affine, shape: Shape) -> Affine:
    """Return the expression without indices along dims of extent 1, which are always 0."""
    if all(shape[dim] != 1 for dim, _ in affine.coefficients):
        return affine
    return Affine(affine.constant, tuple((dim, times) for dim, times in affine.coefficients if shape[dim] != 1))


def _fixed_indices(predicate: Predicate, shape: Shape) -> dict[int, Affine]:
    """Return the indices to which a predicate leaves one value."""
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


def merge(pieces: Iterable[tuple[Term, Predicate]], shape: Shape) -> Pieces:
    """Return the pieces with a satisfiable predicate, each term once."""
    found: dict[tuple[str, Term], Predicate] = {}
    for term, predicate in pieces:
        if not predicate:
            continue
        if isinstance(term, Affine):
            term = _without_zero_indices(term.at(_fixed_indices(predicate, shape)), shape)
        # The text distinguishes 0.0 from -0.0 and True from 1.0, which compare equal.
        key = (repr(term), term)
        found[key] = either(found.get(key, NEVER), predicate, shape)
    if len(found) > MOST:
        raise UnreadError("it has too many cases")
    if len(found) == 1:
        return constant(next(iter(found))[1])
    return tuple((term, predicate) for (_, term), predicate in found.items())


def substitute(pieces: Pieces, index: Mapping[int, Affine] | Callable[[Affine], Affine], shape: Shape) -> Pieces:
    """Return a value at other indices, with `shape` the extents of the new ones: views, slices, lookups."""
    change = index if callable(index) else lambda affine: affine.at(index)

    def predicate_at(predicate: Predicate) -> Predicate:
        found = (_conjunction(map(change, conjunction), shape) for conjunction in predicate)
        return _drop_implied((one for one in found if one is not None), shape)

    changed = ((change(term) if isinstance(term, Affine) else term, predicate_at(p)) for term, p in pieces)
    return merge(changed, shape)
