"""Views: the same elements with dims merged, split, repeated or windowed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise, takewhile
from math import prod
from operator import eq, mul
from typing import Any

import torch

from autopar.rules.call import Call, takes_tensors
from autopar.rules.ops._names import Names, compound, text, whole, wrap
from autopar.rules.ops.elementwise import aligned
from autopar.rules.proof.samples import Draw, Sample, Tries, make_sample, sample_calls
from autopar.rules.table import OpFamily

__all__ = ["FAMILIES", "TABLE", "refine"]

Sizes = Sequence[int]


# -- views: the common refinement of two shapes -----------------------------------------------------------------------


def refine(left: Sizes, right: Sizes) -> tuple[list[str], list[str]]:
    """Return the dims of one tensor seen in two shapes, written with the factors that both have in common.

    Dims end where prefix products say. Two neighbouring ends, of either shape, enclose a factor if one divides the
    other; where some do not, the smallest run of dims with equal products is whole on both sides.
    """
    names = Names()
    # Products of shapes with a 0 are all 0 and tell nothing.
    if 0 in left:
        return _refine_empty(left, right, names)
    left_terms, right_terms = ["1"] * len(left), ["1"] * len(right)
    for left_run, right_run in _runs(left, right):
        left_dims, right_dims = _refine_run([left[i] for i in left_run], [right[i] for i in right_run], names)
        for terms, run, dims in ((left_terms, left_run, left_dims), (right_terms, right_run, right_dims)):
            for i, dim in zip(run, dims, strict=True):
                terms[i] = dim
    for i, j in _matching_ones(left, right):
        left_terms[i] = right_terms[j] = names.one()
    return left_terms, right_terms


def _runs(left: Sizes, right: Sizes) -> Iterable[tuple[list[int], list[int]]]:
    """Yield the smallest runs of dims, of sizes other than 1, that multiply to the same on both sides."""
    # Dims of size 1 divide everything and would end every run early.
    lefts, rights = ([i for i, size in enumerate(shape) if size != 1] for shape in (left, right))
    i = j = 0
    while i < len(lefts):
        start_i, start_j = i, j
        i, j = i + 1, j + 1
        left_product, right_product = left[lefts[start_i]], right[rights[start_j]]
        while left_product != right_product:
            if left_product < right_product:
                left_product *= left[lefts[i]]
                i += 1
            else:
                right_product *= right[rights[j]]
                j += 1
        yield lefts[start_i:i], rights[start_j:j]


def _refine_run(left: Sizes, right: Sizes, names: Names) -> tuple[list[str], list[str]]:
    left_ends, right_ends = list(accumulate(left, mul)), list(accumulate(right, mul))
    ends = sorted({*left_ends, *right_ends})
    # Ends that do not divide each other enclose elements of two dims: no factor spans them.
    if any(later % earlier for earlier, later in pairwise(ends)):
        return [names.whole() for _ in left], [names.whole() for _ in right]
    factors = names.some(len(ends))

    def dims(own: Sizes) -> list[str]:
        bounds = [0, *(ends.index(end) + 1 for end in own)]
        return [compound(factors[start:stop]) for start, stop in pairwise(bounds)]

    return dims(left_ends), dims(right_ends)


def _matching_ones(left: Sizes, right: Sizes) -> Iterable[tuple[int, int]]:
    """Yield dims of size 1 between the same other dims on both sides, where their numbers agree."""

    def places(shape: Sizes) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for i, size in enumerate(shape):
            if size == 1:
                found.setdefault(prod(shape[:i]), []).append(i)
        return found

    right_places = places(right)
    for place, ones in places(left).items():
        if len(ones) == len(right_places.get(place, ())):
            yield from zip(ones, right_places[place], strict=True)


def _refine_empty(left: Sizes, right: Sizes, names: Names) -> tuple[list[str], list[str]]:
    """Return dims of shapes without elements: equal leading and trailing dims keep their factors."""
    before = sum(1 for _ in takewhile(bool, map(eq, left, right)))
    after = sum(1 for _ in takewhile(bool, map(eq, left[before:][::-1], right[before:][::-1])))
    first, last = names.some(before), names.some(after)
    middles = ([names.whole() for _ in shape[before : len(shape) - after]] for shape in (left, right))
    left_middle, right_middle = middles
    return [*first, *left_middle, *last], [*first, *right_middle, *last]


def _view(call: Call) -> str:
    left, right = refine(call.operand(0).shape, call.output.shape)
    return text([left], [right])


def _view_as(call: Call) -> str:
    left, right = refine(call.operand(0).shape, call.output.shape)
    return text([left, right], [right])


VIEWS: tuple[tuple[Sizes, Sizes], ...] = (
    ((5, 12), (5, 3, 4)),
    ((5, 3, 4), (5, 12)),
    ((4, 24), (8, 12)),
    ((6, 4), (4, 6)),
    ((3, 6, 4, 5), (3, 4, 6, 5)),
    ((3, 1, 4), (12,)),
    ((1, 5, 6), (1, 5, 2, 3)),
    ((12, 5), (1, 3, 4, 1, 5)),
    ((3, 4, 5), (60,)),
    ((), (1, 1)),
    ((0, 4), (4, 0)),
)


def _view_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    argument = next(a.name for a in op._schema.arguments if str(a.type).startswith("List[int]"))
    for left, right in VIEWS:
        size = [-1, *right[1:]] if right and all(right) else list(right)
        arguments: dict[str, Any] = {argument: list(right) if "_reshape_alias" in str(op) else size}
        # This op takes strides too, and no -1.
        if "_reshape_alias" in str(op):
            arguments["stride"] = [prod(right[i + 1 :]) for i in range(len(right))]
        yield make_sample(op, [Draw(tuple(left))], arguments, tries)


# -- dims of size 1 ---------------------------------------------------------------------------------------------------


def _squeeze(call: Call) -> str:
    shape = call.operand(0).shape
    given = call.get("dim")
    chosen = range(len(shape)) if given is None else ([given] if isinstance(given, int) else given)
    gone = {wrap(dim, len(shape)) for dim in chosen}
    names = Names()
    left = ["1" if i in gone and size == 1 else names.one() for i, size in enumerate(shape)]
    return text([left], [[dim for dim in left if dim != "1"]])


def _squeeze_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    kind = str(op._schema.arguments[1].type) if len(op._schema.arguments) > 1 else None
    for shape, dim in (((3, 1, 5, 1), 1), ((3, 1, 5), -2), ((3, 1, 2), 0), ((1,), 0), ((), 0)):
        dims = {None: {}, "int": {"dim": dim}}.get(kind, {"dim": [dim]})
        yield make_sample(op, [Draw(shape)], dims, tries)


def _unsqueeze(call: Call) -> str:
    names = Names().some(call.operand(0).rank)
    out = list(names)
    out.insert(wrap(call["dim"], len(names) + 1), "1")
    return text([names], [out])


# -- elements shown several times -------------------------------------------------------------------------------------


def _expand(call: Call) -> str:
    """Write the rule: dims of size 1, and new ones, become factors that only the output has."""
    names = Names().some(call.output.rank)
    dims = aligned(call.operand(0).shape, names, call.output.shape)
    return text([dims, *([names] if len(call.operands) > 1 else [])], [names])


EXPANSIONS: tuple[tuple[Sizes, Sizes], ...] = (
    ((5, 1, 7), (5, 3, -1)),
    ((5, 1), (3, -1, 4)),
    ((), (5, 3)),
    ((5, 3), (5, 3)),
    ((1, 5), (1, 5)),
)


def _expand_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    for shape, size in EXPANSIONS:
        full = [shape[i - len(size)] if extent == -1 else extent for i, extent in enumerate(size)]
        if len(takes_tensors(op)) > 1:
            yield make_sample(op, [Draw(tuple(shape)), Draw(tuple(full))], {}, tries)
        else:
            yield make_sample(op, [Draw(tuple(shape))], {"size": list(size)}, tries)


def _repeat(call: Call) -> str:
    """Write the rule: copies are the major factor of each dim."""
    shape, out = call.operand(0).shape, call.output.shape
    new = len(out) - len(shape)
    names = Names()
    left: list[str] = []
    right = ["1" if count == 1 else names.one() for count in out[:new]]
    for size, extent in zip(shape, out[new:], strict=True):
        own, shown = _copied(size, extent, names, major=True)
        left.append(own)
        right.append(shown)
    return text([left], [right])


def _copied(size: int, extent: int, names: Names, *, major: bool) -> tuple[str, str]:
    """Return one dim and its form after a repetition of elements, or of the whole dim."""
    own = names.one()
    if size == extent:
        return own, own
    # No element tells how the copies are ordered.
    if 0 in (size, extent):
        return whole(own), names.whole()
    if size == 1:
        return "1", own
    return own, compound([names.one(), own] if major else [own, names.one()])


def _repeat_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    argument = op._schema.arguments[1].name
    for shape, counts in (((5, 3), (2, 3)), ((5, 3), (4, 1, 2)), ((1, 5, 1), (4, 1, 3)), ((), (3,)), ((5,), (1,))):
        yield make_sample(op, [Draw(shape)], {argument: list(counts)}, tries)


def _repeat_interleave(call: Call) -> str:
    """Write the rule: copies are the minor factor. Without a dim, all dims are merged first."""
    shape, out, dim = call.operand(0).shape, call.output.shape, call["dim"]
    names = Names()
    if dim is not None and shape:
        left = names.some(len(shape))
        right = list(left)
        chosen = wrap(dim, len(shape))
        left[chosen], right[chosen] = _copied(shape[chosen], out[chosen], names, major=False)
        return text([left], [right])
    merged = ["1" if size == 1 else names.one() for size in shape]
    if 0 in out:
        return text([[names.whole() for _ in shape]], [[names.whole()]])
    copies = [names.one()] if out[0] > prod(shape) else []
    factors = [name for name in merged if name != "1"] + copies
    return text([merged], [[compound(factors) if factors else "1"]])


# -- windows and pixels -----------------------------------------------------------------------------------------------


def _unfold(call: Call) -> str:
    """Write the rule: windows side by side split the dim, overlapping ones need the neighbours' edge."""
    shape = call.operand(0).shape
    size, step = call["size"], call["step"]
    if not shape:
        return text([[]], [["1"]])
    dim = wrap(call["dimension"], len(shape))
    names = Names()
    left = names.some(len(shape))
    right, window = list(left), names.one()
    # Windows that neither overlap nor leave a rest are a plain split of the dim.
    if size == step and shape[dim] % size == 0 and shape[dim] > 0:
        left[dim] = compound([left[dim], window])
        return text([left], [[*right, window]], f"localise size={window} step={window}")
    return text([left], [[*right, whole(window)]], f"halo {left[dim]} kernel={size} stride={step}")


def _pixel_shuffle(call: Call, direction: str) -> str:
    """Write the rule: channels `(c p q)` become pixels `(y p) (x q)`, or the reverse."""
    names = Names("cpqyx")
    leading = names.some(call.operand(0).rank - 3)
    deep, flat = [*leading, "(c p! q!)", "y", "x"], [*leading, "c", "(y p!)", "(x q!)"]
    return text([deep], [flat]) if direction == "shuffle" else text([flat], [deep])


def _pixel_shuffle_samples(op: torch._ops.OpOverload, tries: Tries, direction: str) -> Iterable[Sample]:
    shape = (12, 4, 5) if direction == "shuffle" else (3, 8, 10)
    for leading in ((), (3,)):
        yield make_sample(op, [Draw((*leading, *shape))], {op._schema.arguments[1].name: 2}, tries)


FAMILIES = {
    "view": OpFamily(_view, _view_samples),
    "view_as": OpFamily(_view_as, sample_calls("", *VIEWS[:5])),
    "flatten": OpFamily(
        _view,
        sample_calls("start_dim end_dim", ((3, 4, 5), 0, -1), ((3, 4, 5), 1, 2), ((3, 4, 5), -2, -2), ((), 0, -1)),
    ),
    "unflatten": OpFamily(
        _view, sample_calls("dim sizes", ((5, 12), 1, [3, 4]), ((12, 5), -2, [3, -1]), ((5, 3), 1, [1, 3]))
    ),
    "squeeze": OpFamily(_squeeze, _squeeze_samples),
    "unsqueeze": OpFamily(_unsqueeze, sample_calls("dim", ((), 0), ((5,), -1), ((5, 3), 1), ((5, 3), -3))),
    "expand": OpFamily(_expand, _expand_samples),
    "repeat": OpFamily(_repeat, _repeat_samples),
    "repeat_interleave": OpFamily(
        _repeat_interleave,
        sample_calls(
            "repeats dim output_size",
            ((5, 3), 4, 1, 12),
            ((5, 3), 4, -2, None),
            ((5, 1, 3), 4, 1, None),
            ((5, 3), 4, None, None),
            ((5, 3), 1, 0, None),
            ((), 3, None, None),
        ),
    ),
    "unfold": OpFamily(
        _unfold,
        sample_calls(
            "dimension size step", ((5, 12), 1, 3, 3), ((13, 5), 0, 3, 2), ((5, 11), -1, 2, 3), ((5, 11), -1, 3, 3)
        ),
    ),
    "pixel_shuffle": OpFamily(_pixel_shuffle, _pixel_shuffle_samples),
}

TABLE = """
aten.{reshape,view_copy}.default                     view; linear 0; localise as_reshape
aten.{view,_unsafe_view,_reshape_alias}.default      view; linear 0; localise as_reshape
aten.view_as.default                                 view_as; linear 0 0+1; localise as_reshape
aten.reshape_as.default                              view_as; linear 0 0+1
aten.flatten.using_ints                              flatten; linear 0
aten.unflatten.int                                   unflatten; linear 0; localise as_reshape
aten.{squeeze,squeeze_copy}.{default,dim,dims}       squeeze; linear 0; localise as_reshape
aten.{unsqueeze,unsqueeze_copy}.default              unsqueeze; linear 0
aten.{expand,expand_copy,broadcast_to}.default       expand; linear 0; localise size
aten.expand_as.default                               expand; linear 0 0+1
aten.repeat.default                                  repeat; linear 0; localise repeats
aten.tile.default                                    repeat; linear 0; localise dims
aten.repeat_interleave.self_int                      repeat_interleave; linear 0; localise repeats output_size
aten.{unfold,unfold_copy}.default                    unfold; linear 0
aten.pixel_shuffle.default                           pixel_shuffle shuffle; linear 0
aten.pixel_unshuffle.default                         pixel_shuffle unshuffle; linear 0
aten.channel_shuffle.default                         b c! ... -> b c! ...; linear 0; try groups=7
"""
