"""Factories, views, lookups and sums of positions, as functions of the indices of their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from math import isnan, prod
from typing import Any

import torch
from torch.fx import Node

from autopar.tracing.indices.piecewise import (
    ALWAYS,
    Affine,
    Pieces,
    Predicate,
    Shape,
    Term,
    UnreadError,
    at_least,
    between,
    both,
    bounds,
    constant,
    merge,
    negation,
    substitute,
)

# Returns the pieces of an operand.
Of = Callable[[Any], Pieces]
# Returns the pieces of a node with these arguments.
Reader = Callable[[Of, Node, Mapping[str, Any]], Pieces]


def shape_of(node: Node) -> Shape:
    return tuple(node.meta["val"].shape)


def term_of(number: bool | int | float) -> Term:
    if isinstance(number, float) and isnan(number):
        raise UnreadError("it contains NaN")
    return Affine(number) if isinstance(number, int) and not isinstance(number, bool) else number


def whole(number: Any) -> Affine:
    """Return a number without a fraction as an affine term."""
    if isinstance(number, Affine):
        return number
    if isinstance(number, bool | int) or (isinstance(number, float) and number.is_integer()):
        return Affine(int(number))
    raise UnreadError("compares positions with a number that is not whole")


# -- factories --------------------------------------------------------------------------------------------------------


def _filled(node: Node, number: Any) -> Pieces:
    if not isinstance(number, bool | int | float):
        raise UnreadError("depends on an argument that is no number")
    return constant(term_of(torch.full((), number, dtype=node.meta["val"].dtype, device="cpu").item()))


def _arange(of: Of, node: Node, arguments: Mapping[str, Any]) -> Pieces:
    start, step = arguments.get("start", 0), arguments.get("step", 1)
    if not isinstance(start, int) or not isinstance(step, int):
        raise UnreadError("depends on arange of numbers that are not whole")
    return constant(Affine.of(start, {-1: step}))


def _eye(of: Of, node: Node, arguments: Mapping[str, Any]) -> Pieces:
    shape = shape_of(node)
    one, zero = _filled(node, 1), _filled(node, 0)
    diagonal = between(Affine.of(0, {-2: 1, -1: -1}), 0, 1, shape)
    return merge([(one[0][0], diagonal), (zero[0][0], negation(diagonal, shape))], shape)


# -- views and lookups ------------------------------------------------------------------------------------------------


def _read_at(of: Of, node: Node, source: Node, index: Mapping[int, Affine]) -> Pieces:
    """Return a source read at `index`: for each of its dims an expression in the result's indices, else 0."""
    dims = range(-len(shape_of(source)), 0)
    return substitute(of(source), {dim: index.get(dim, Affine(0)) for dim in dims}, shape_of(node))


def _index(dim: int, shape: Shape) -> Affine:
    return Affine.of(0, {dim: 1} if shape[dim] != 1 else {})


def _reshape(of: Of, node: Node, arguments: Mapping[str, Any]) -> Pieces:
    source = arguments["self"]
    old, new = shape_of(source), shape_of(node)
    if source.meta["val"].dtype != node.meta["val"].dtype:
        raise UnreadError("depends on bits read as another dtype")
    index: dict[int, Affine] = {}
    for old_dims, new_dims in _equal_extents(old, new):
        # The index of joined dims is a quotient, which no affine term expresses.
        if len(old_dims) > 1 and any(_uses(affine, old_dims) for affine in _affines(of(source))):
            raise UnreadError(f"depends on a reshape of {list(old)} to {list(new)}")
        place = Affine(0)
        for dim in new_dims:
            place = place * new[dim] + _index(dim, new)
        index.update({dim: place if len(old_dims) == 1 else Affine(0) for dim in old_dims})
    return _read_at(of, node, source, index)


def _equal_extents(old: Shape, new: Shape) -> list[tuple[list[int], list[int]]]:
    """Return the shortest runs of dims with equal extent in both shapes, without dims of extent 1."""
    old_dims = [dim for dim in range(-len(old), 0) if old[dim] != 1]
    new_dims = [dim for dim in range(-len(new), 0) if new[dim] != 1]
    groups = []
    while old_dims and new_dims:
        left, right = [old_dims.pop(0)], [new_dims.pop(0)]
        while (left_extent := prod(old[d] for d in left)) != (right_extent := prod(new[d] for d in right)):
            if left_extent < right_extent:
                left.append(old_dims.pop(0))
            else:
                right.append(new_dims.pop(0))
        groups.append((left, right))
    return groups


def _affines(pieces: Pieces) -> list[Affine]:
    terms = [term for term, _ in pieces if isinstance(term, Affine)]
    return [*terms, *(affine for _, predicate in pieces for one in predicate for affine in one)]


def _uses(affine: Affine, dims: list[int]) -> bool:
    return any(dim in dims for dim, _ in affine.coefficients)


def _unsqueeze(of: Of, node: Node, arguments: Mapping[str, Any]) -> Pieces:
    rank = len(shape_of(node))
    added = arguments["dim"] % rank - rank
    source = arguments["self"]
    dims = range(-len(shape_of(source)), 0)
    return _read_at(of, node, source, {d: _index(d if d > added else d - 1, shape_of(node)) for d in dims})


def _expand(of: Of, node: Node, arguments: Mapping[str, Any]) -> Pieces:
    source = arguments["self"]
    old = shape_of(source)
    index = {dim: _index(dim, shape_of(node)) for dim in range(-len(old), 0) if old[dim] != 1}
    return _read_at(of, node, source, index)


def _repeat(of: Of, node: Node, arguments: Mapping[str, Any]) -> Pieces:
    # The index within a copy is a remainder: only a value that does not depend on it can be read.
    source, times = arguments["self"], arguments["repeats"]
    old = shape_of(source)
    tiled = [dim for dim in range(-len(old), 0) if times[dim] != 1]
    if any(_uses(affine, tiled) for affine in _affines(of(source))):
        raise UnreadError("depends on repeat")
    index = {dim: _index(dim, shape_of(node)) for dim in range(-len(old), 0) if dim not in tiled}
    return _read_at(of, node, source, index)


def _permute(of: Of, node: Node, arguments: Mapping[str, Any]) -> Pieces:
    rank = len(shape_of(node))
    order = list(range(rank))
    if "dims" in arguments:
        order = [dim % rank for dim in arguments["dims"]]
    elif rank > 1:
        first, second = arguments.get("dim0", -2) % rank, arguments.get("dim1", -1) % rank
        order[first], order[second] = order[second], order[first]
    index = {dim - rank: _index(place - rank, shape_of(node)) for place, dim in enumerate(order)}
    return _read_at(of, node, arguments["self"], index)


def _slice(of: Of, node: Node, arguments: Mapping[str, Any]) -> Pieces:
    source, shape = arguments["self"], shape_of(node)
    rank = len(shape)
    dim = arguments["dim"] % rank
    extent = shape_of(source)[dim]
    start, step = arguments.get("start") or 0, arguments.get("step", 1)
    if not isinstance(start, int) or not isinstance(step, int):
        raise UnreadError("depends on a slice with unknown bounds")
    start = min(max(start + extent if start < 0 else start, 0), extent)
    index = {d: _index(d, shape) for d in range(-rank, 0)}
    index[dim - rank] = index[dim - rank] * step + Affine(start)
    return _read_at(of, node, source, index)


def _select(of: Of, node: Node, arguments: Mapping[str, Any]) -> Pieces:
    source = arguments["self"]
    old = shape_of(source)
    chosen = arguments["dim"] % len(old) - len(old)
    if not isinstance(arguments["index"], int):
        raise UnreadError("depends on an unknown index")
    index = {d: _index(d + 1 if d < chosen else d, shape_of(node)) for d in range(-len(old), 0) if d != chosen}
    index[chosen] = Affine(arguments["index"] % old[chosen])
    return _read_at(of, node, source, index)


def _flip(of: Of, node: Node, arguments: Mapping[str, Any]) -> Pieces:
    shape = shape_of(node)
    rank = len(shape)
    flipped = {dim % rank - rank for dim in arguments["dims"]}
    index = {d: _index(d, shape) for d in range(-rank, 0)}
    index.update({d: Affine(shape[d] - 1) - index[d] for d in flipped})
    return _read_at(of, node, arguments["self"], index)


def _lookup(of: Of, node: Node, arguments: Mapping[str, Any]) -> Pieces:
    """Return `x[i, j]` with an affine index for every dim."""
    source, indices = arguments["self"], arguments["indices"]
    old = shape_of(source)
    pieces = of(source)
    if not any(affine.coefficients for affine in _affines(pieces)):
        return pieces
    if len(indices) != len(old) or any(not isinstance(index, Node) for index in indices):
        raise UnreadError("depends on a lookup")
    index: dict[int, Affine] = {}
    for dim, at in zip(range(-len(old), 0), indices, strict=True):
        found = of(at)
        term = found[0][0]
        if len(found) > 1 or not isinstance(term, Affine):
            raise UnreadError("depends on a lookup")
        low, high = bounds(term, shape_of(node))
        if low < 0 and high < 0:
            term = term + Affine(old[dim])
            low, high = low + old[dim], high + old[dim]
        if low < 0 or high >= old[dim]:
            raise UnreadError("depends on a lookup")
        index[dim] = term
    return _read_at(of, node, source, index)


# -- along one dim ----------------------------------------------------------------------------------------------------


def _cat(of: Of, node: Node, arguments: Mapping[str, Any]) -> Pieces:
    rank = len(shape_of(node))
    return _concatenation(of, arguments["tensors"], arguments["dim"] % rank - rank, shape_of(node))


def _concatenation(of: Of, sources: list[Node], dim: int, shape: Shape) -> Pieces:
    found: list[tuple[Term, Predicate]] = []
    start = 0
    for source in sources:
        stop = start + shape_of(source)[dim]
        here = between(Affine.of(0, {dim: 1}), start, stop, shape)
        at = {dim: Affine.of(-start, {dim: 1}) if stop - start > 1 else Affine(0)}
        for term, predicate in _shift(of(source), at):
            found.append((term, both(here, predicate, shape)))
        start = stop
    return merge(found, shape)


def _shift(pieces: Pieces, at: Mapping[int, Affine]) -> Pieces:
    """Return pieces at other indices, not merged: the caller must first exclude indices out of range."""
    return tuple(
        (
            term.at(at) if isinstance(term, Affine) else term,
            frozenset(frozenset(affine.at(at) for affine in one) for one in predicate),
        )
        for term, predicate in pieces
    )


def _diff(of: Of, node: Node, arguments: Mapping[str, Any]) -> Pieces:
    sources = [arguments[name] for name in ("prepend", "self", "append") if arguments[name] is not None]
    shape = shape_of(node)
    rank = len(shape)
    dim = arguments["dim"] % rank - rank
    if arguments["n"] != 1 or node.meta["val"].dtype is torch.bool:
        raise UnreadError("depends on diff")
    longer = (*shape[:dim], shape[dim] + 1, *shape[rank + dim + 1 :])
    before = _concatenation(of, sources, dim, longer)
    after = substitute(before, {dim: Affine.of(1, {dim: 1})}, shape)
    before = substitute(before, {dim: Affine.of(0, {dim: 1})}, shape)
    found: list[tuple[Term, Predicate]] = []
    for (first, one), (second, other) in product(before, after):
        found.append((whole(second) - whole(first), both(one, other, shape)))
    return merge(found, shape)


def _cumsum(of: Of, node: Node, arguments: Mapping[str, Any]) -> Pieces:
    pieces = of(arguments["self"])
    rank = len(shape_of(node))
    added = whole(pieces[0][0])
    if len(pieces) > 1 or added.coefficients or not rank:
        raise UnreadError("depends on cumsum")
    along = Affine.of(1, {arguments["dim"] % rank - rank: 1}) if shape_of(node)[arguments["dim"]] > 1 else Affine(1)
    return constant(along * added.constant)


def _triangle(of: Of, node: Node, arguments: Mapping[str, Any]) -> Pieces:
    # `tril` keeps `column - row <= diagonal`, `triu` keeps `column - row >= diagonal`.
    shape = shape_of(node)
    below = _index(-2, shape) - _index(-1, shape) + Affine(arguments["diagonal"])
    lower = str(node.target) == "aten.tril.default"
    kept = at_least(below if lower else below * -1, shape)
    found = [(term, both(predicate, kept, shape)) for term, predicate in of(arguments["self"])]
    return merge([*found, (_filled(node, 0)[0][0], negation(kept, shape))], shape)


def _pad(of: Of, node: Node, arguments: Mapping[str, Any]) -> Pieces:
    shape = shape_of(node)
    old = shape_of(arguments["self"])
    pad = arguments["pad"]
    if arguments.get("mode", "constant") != "constant":
        raise UnreadError("depends on pad")
    inside: Predicate = ALWAYS
    at: dict[int, Affine] = {}
    for place in range(len(pad) // 2):
        dim = -1 - place
        before = pad[2 * place]
        inside = both(inside, between(_index(dim, shape), before, before + old[dim], shape), shape)
        at[dim] = _index(dim, shape) - Affine(before) if old[dim] > 1 else Affine(0)
    found = [(term, both(inside, p, shape)) for term, p in _shift(of(arguments["self"]), at)]
    return merge([*found, (_filled(node, arguments["value"] or 0)[0][0], negation(inside, shape))], shape)


# Readers by the name of the op in ATen; a new one is a function of its operands' pieces and its arguments.
READERS: dict[str, Reader] = {
    "arange": _arange,
    "eye": _eye,
    **dict.fromkeys(("zeros", "zeros_like"), lambda of, node, arguments: _filled(node, 0)),
    **dict.fromkeys(("ones", "ones_like"), lambda of, node, arguments: _filled(node, 1)),
    **dict.fromkeys(("full", "full_like"), lambda of, node, arguments: _filled(node, arguments["fill_value"])),
    "scalar_tensor": lambda of, node, arguments: _filled(node, arguments["s"]),
    **dict.fromkeys(("reshape", "squeeze", "flatten", "view", "_unsafe_view"), _reshape),
    "unsqueeze": _unsqueeze,
    **dict.fromkeys(("expand", "expand_as"), _expand),
    "repeat": _repeat,
    **dict.fromkeys(("permute", "transpose", "t"), _permute),
    **dict.fromkeys(("slice", "narrow"), _slice),
    "select": _select,
    "flip": _flip,
    **dict.fromkeys(("index", "_unsafe_index"), _lookup),
    "cat": _cat,
    "diff": _diff,
    "cumsum": _cumsum,
    **dict.fromkeys(("tril", "triu"), _triangle),
    **dict.fromkeys(("constant_pad_nd", "pad"), _pad),
}
