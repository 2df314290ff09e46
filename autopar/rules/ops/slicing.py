"""Parts of dims and their order: slices, splits, concatenation, padding, transposes, diagonals.

Such a dim is whole, but for parts of one length n that lie side by side: then the dim is `(c! n)`, and n can be split
in all parts alike (the halves of a rotary embedding, a fused projection of queries, keys and values).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from autopar.rules.call import Call
from autopar.rules.ops._names import Names, as_list, compound, text, whole, wrap
from autopar.rules.proof.samples import Draw, Sample, Tries, make_sample, sample_calls
from autopar.rules.table import OpFamily

__all__ = ["FAMILIES", "TABLE"]


# A slice may be one of many parts by accident (one token of a sequence): beyond this it is not taken for a chunk.
MOST_CHUNKS = 8


# -- slices -----------------------------------------------------------------------------------------------------------


def _bounds(call: Call, dim: int, extent: int) -> tuple[int, int, int]:
    if call.get("length") is not None:  # narrow
        start = call["start"] % max(extent, 1)
        return start, start + int(call["length"]), 1
    return slice(call["start"], call["end"], call["step"]).indices(extent)


def _part(extent: int, start: int, stop: int, step: int, names: Names) -> tuple[str, str, str]:
    """Return a sliced dim, its part in the output, and clauses."""
    length = len(range(start, stop, step))
    name = names.one()
    if (start, length) == (0, extent):
        return name, name, ""
    chunks = extent // length if length > 1 else 0
    if step == 1 and 1 < chunks <= MOST_CHUNKS and extent % length == start % length == 0:
        return compound([names.whole(), name]), name, "localise start"
    return whole(name), "1" if length == 1 else names.whole(), ""


def _slice(call: Call) -> str:
    shape = call.operand(0).shape
    dim = wrap(call["dim"], len(shape))
    names = Names()
    left = names.some(len(shape))
    right = list(left)
    left[dim], right[dim], clause = _part(shape[dim], *_bounds(call, dim, shape[dim]), names)
    if left[dim] == right[dim] and call.get("length") is not None:
        clause = f"localise length={left[dim]}"
    elif clause and call.get("length") is not None:
        clause += f" length={right[dim]}"
    return text([left], [right], clause)


SLICES = ((1, 0, 4), (1, 4, 8), (-1, 8, 12), (1, 0, 12), (1, 2, 6), (0, 1, 2), (0, 0, 2), (1, 0, 11))


def _slice_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    for dim, start, end in SLICES:
        bounds = {"length": end - start} if "length" in str(op._schema) else {"end": end}
        yield make_sample(op, [Draw((5, 12))], {"dim": dim, "start": start, **bounds}, tries)
    if "end" in str(op._schema):
        for bound in ((None, None, 1), (-6, 2**63 - 1, 1), (0, -6, 1), (0, 12, 2), (-100, 100, 1), (0, 0, 1)):
            sliced = dict(zip(("start", "end", "step"), bound, strict=True))
            yield make_sample(op, [Draw((12, 5))], {"dim": 0, **sliced}, tries)


def _slice_scatter(call: Call) -> str:
    shape = call.operand(0).shape
    dim = wrap(call["dim"], len(shape))
    names = Names()
    left = names.some(len(shape))
    part = list(left)
    left[dim], part[dim], clause = _part(shape[dim], *_bounds(call, dim, shape[dim]), names)
    return text([left, part], [left], clause, "linear 1 0+1" if left[dim] == part[dim] else "linear 0+1")


def _slice_scatter_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    for dim, start, end in SLICES:
        part = [5, 12]
        part[dim] = end - start
        yield make_sample(op, [Draw((5, 12)), Draw(tuple(part))], {"dim": dim, "start": start, "end": end}, tries)


def _select(call: Call) -> str:
    names = Names()
    left = names.some(call.operand(0).rank)
    dim = wrap(call["dim"], len(left))
    right = [*left[:dim], *left[dim + 1 :]]
    left[dim] = whole(left[dim])
    if call.operands[1:]:
        return text([left, right], [left])
    return text([left], [right])


# -- parts ------------------------------------------------------------------------------------------------------------


def _split(call: Call) -> str:
    """Write the rule: all parts of a dim; parts of one length are one factor."""
    shape = call.operand(0).shape
    dim = wrap(call.get("dim", min(1, len(shape) - 1)), len(shape))
    lengths = [spec.shape[dim] for spec in call.outputs if spec is not None]
    names = Names()
    left = names.some(len(shape))
    right = [list(left) for _ in lengths]
    alike = len({*lengths}) == 1 and call.get("indices") is None
    if alike and (len(lengths) == 1 or lengths[0] > 1):
        lists = [name for name in ("split_size", "split_sizes") if call.get(name) is not None]
        if len(lengths) > 1:
            left[dim] = compound([names.whole(), left[dim]])
        return text([left], right, f"localise {lists[0]}" if lists else "")
    left[dim] = whole(left[dim])
    for part, length in zip(right, lengths, strict=True):
        part[dim] = "1" if length == 1 else names.whole()
    return text([left], right)


def _split_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    argument = op._schema.arguments[1]
    if argument.name == "indices":
        values: Sequence[object] = ([4, 8], [2, 5])
    elif str(argument.type).startswith("List"):
        values = ([4, 4, 4], [2, 10], [12], [1, 11])
    else:
        values = (1, 2, 3, 4, 5, 12) if argument.name == "split_size" else (1, 2, 3, 5)
        values = values[:3] if "hsplit" in op._schema.name else values  # it takes equal parts alone
    names = {other.name for other in op._schema.arguments}
    for value in values:
        for shape, dim in (((5, 12), 1), ((12, 3), 0), ((5, 12), -1)):
            if "dim" in names or dim == 1:
                yield make_sample(op, [Draw(shape)], {argument.name: value, **({"dim": dim} if "dim" in names else {})})


def _unbind(call: Call) -> str:
    names = Names()
    left = names.some(call.operand(0).rank)
    dim = wrap(call["dim"], len(left))
    part = [*left[:dim], *left[dim + 1 :]]
    left[dim] = whole(left[dim])
    return text([left], [part] * len(call.outputs))


# -- together ---------------------------------------------------------------------------------------------------------


def _cat(call: Call, across: str = "dim") -> str:
    """Write the rule: equal parts make a dim `(c! n)`. Operands of fewer dims are single rows, or empty."""
    rank = call.output.rank
    dim = {"rows": 0, "columns": min(1, rank - 1)}.get(across, 0)
    dim = wrap(call["dim"], rank) if across == "dim" else dim
    operands = [spec for spec in call.operands if spec is not None]
    lengths = [spec.shape[dim] for spec in operands if spec.rank == rank]
    names = Names()
    out = names.some(rank)
    alike = len({*lengths}) == 1 and len(lengths) == len(operands) and (len(lengths) == 1 or lengths[0] > 1)
    parts = []
    for spec in operands:
        part = list(out) if spec.rank == rank else out[1:]
        if spec.rank < rank and spec.shape == (0,):
            part = [names.whole()]
        elif spec.rank == rank and not alike:
            part[dim] = "1" if spec.shape[dim] == 1 else names.whole()
        parts.append(part)
    if not alike:
        out[dim] = whole(out[dim])
    elif len(lengths) > 1:
        out[dim] = compound([names.whole(), out[dim]])
    return text(parts, [out])


def _cat_samples(op: torch._ops.OpOverload, tries: Tries, across: str = "dim") -> Iterable[Sample]:
    lists: list[tuple[list[tuple[int, ...]], int]] = [
        ([(5, 4)] * 3, 1),
        ([(5, 4)] * 2, -2),
        ([(5, 4), (5, 7)], -1),
        ([(4, 5), (1, 5), (2, 5)], 0),
        ([(5, 1), (5, 1), (5, 1)], 1),
        ([(5, 4)], 0),
        ([(4,), (4,)], 0),
    ]
    wanted = {"columns": 1, "rows": 0}.get(across)
    for shapes, dim in lists:
        if wanted is None:
            yield make_sample(op, [[Draw(shape) for shape in shapes]], {"dim": dim})
        elif len(shapes[0]) < 2 or dim % 2 == wanted:
            yield make_sample(op, [[Draw(shape) for shape in shapes]], {})
    if wanted is not None:
        yield make_sample(op, [[Draw(()), Draw(())] if wanted else [Draw((1, 4)), Draw((4,))]], {})


def _stack(call: Call) -> str:
    names = Names()
    part = names.some(call.output.rank - 1)
    dim = wrap(call["dim"], call.output.rank)
    return text([part] * len(call.operands), [[*part[:dim], names.whole(), *part[dim:]]])


# -- edges ------------------------------------------------------------------------------------------------------------


def _pad(call: Call, argument: str, mode: str = "") -> str:
    """Write the rule: padded dims are whole; padding with zeros, or with the tensor's edge, is linear."""
    amounts = call[argument]
    pairs = [amounts[i : i + 2] for i in range(0, len(amounts), 2)][::-1]
    names = Names()
    left = names.some(call.operand(0).rank)
    right = list(left)
    for i, (before, after) in enumerate(pairs, len(left) - len(pairs)):
        if before or after:
            left[i], right[i] = whole(left[i]), names.whole()
    constant = (mode or call["mode"]) == "constant" and left != right
    return text([left], [right], "" if constant and call["value"] else "linear 0")


def _pad_samples(op: torch._ops.OpOverload, tries: Tries, argument: str, mode: str = "") -> Iterable[Sample]:
    if mode == "edge":
        spatial = int(op._schema.name[-2])
        for leading in ((3,), (2, 3)):
            yield make_sample(
                op, [Draw((*leading, *(5, 6, 7)[:spatial]))], {argument: [1, 2, 0, 0, 1, 1][: 2 * spatial]}
            )
        return
    for amounts in ([1, 2], [0, 0], [0, 0, 1, 0], [-1, 2], [0, 0, 0, 0]):
        for value in (0.0, 0.7):
            yield make_sample(op, [Draw((3, 4, 5))], {argument: amounts, "value": value})
    if not mode:
        for way in ("reflect", "replicate", "circular"):
            yield make_sample(op, [Draw((3, 4, 5))], {argument: [1, 2], "mode": way})
            yield make_sample(op, [Draw((2, 3, 4, 5))], {argument: [0, 0, 2, 1], "mode": way})


def _roll(call: Call) -> str:
    """Write the rule; without dims the flattened tensor is rolled."""
    shape = call.operand(0).shape
    names = Names()
    dims = {wrap(dim, len(shape)): shift for dim, shift in zip(call["dims"], call["shifts"], strict=False)}
    still = [bool(call["dims"]) and dims.get(i, 0) == 0 for i in range(len(shape))]
    terms = [names.one() if parallel else names.whole() for parallel in still]
    return text([terms], [terms])


# -- transposes and diagonals ------------------------------------------------------------------------------------------


def _order(call: Call, way: str) -> list[int]:
    """Return the input dim of each output dim."""
    rank = call.operand(0).rank
    order = list(range(rank))
    if way == "dims":
        return [wrap(dim, rank) for dim in call["dims"]]
    if way == "reversed" or rank < 2:
        return order[::-1]
    if way == "matrix":
        return [*order[:-2], order[-1], order[-2]]
    first, second = call.arguments[1][1], call.arguments[2][1]
    if way == "swap":
        first, second = wrap(first, rank), wrap(second, rank)
        order[first], order[second] = order[second], order[first]
        return order
    sources = [wrap(dim, rank) for dim in as_list(first, 1)]
    targets = [wrap(dim, rank) for dim in as_list(second, 1)]
    rest = (dim for dim in range(rank) if dim not in sources)
    return [sources[targets.index(i)] if i in targets else next(rest) for i in range(rank)]


def _permute(call: Call, way: str) -> str:
    names = Names().some(call.operand(0).rank)
    return text([names], [[names[dim] for dim in _order(call, way)]])


def _permute_samples(op: torch._ops.OpOverload, tries: Tries, way: str) -> Iterable[Sample]:
    plain: list[tuple[Sequence[int], Sequence[object]]] = [((4, 5), []), ((3, 4, 5), [])]
    cases: dict[str, list[tuple[Sequence[int], Sequence[object]]]] = {
        "dims": [((3, 4, 5), [[2, 0, 1]]), ((3, 4, 5), [[0, -1, -2]]), ((), [[]])],
        "swap": [((3, 4, 5), [0, 2]), ((3, 4, 5), [-1, 1]), ((5, 3), [1, 1]), ((), [0, -1])],
        "move": [((3, 4, 5), [0, 2]), ((3, 4, 5), [-1, 0])],
        "moves": [((3, 4, 5, 2), [[0, 1], [-1, 0]]), ((3, 4, 5), [[2], [0]])],
        "matrix": [*plain, ((3, 1, 4, 5), [])],
        "reversed": plain[:1] if "numpy" in str(op) else [plain[0], ((5,), []), ((), [])],
    }
    for shape, values in cases[way]:
        names = [argument.name for argument in op._schema.arguments[1:]]
        yield make_sample(op, [Draw(tuple(shape))], dict(zip(names, values, strict=False)), tries)


def _diagonal(call: Call) -> str:
    """Write the rule: the diagonal of two dims comes last."""
    rank = call.operand(0).rank
    taken = {wrap(call["dim1"], rank), wrap(call["dim2"], rank)}
    names = Names()
    left = [names.whole() if dim in taken else names.one() for dim in range(rank)]
    return text([left], [[*(name for dim, name in enumerate(left) if dim not in taken), names.whole()]])


def _diag_embed(call: Call) -> str:
    """Write the rule: the last dim becomes the diagonal of two dims."""
    rank = call.output.rank
    placed = {wrap(call["dim1"], rank), wrap(call["dim2"], rank)}
    names = Names()
    left = names.some(call.operand(0).rank - 1)
    rest = iter(left)
    right = [names.whole() if dim in placed else next(rest) for dim in range(rank)]
    return text([[*left, names.whole()]], [right])


def _rot90(call: Call) -> str:
    """Write the rule: a quarter turn swaps two dims and reverses one of them, which is whole."""
    rank, turns = call.operand(0).rank, call["k"] % 4
    first, second = (wrap(dim, rank) for dim in call["dims"])
    names = Names()
    left = names.some(rank)
    for dim, reversed_by in ((first, (2, 3)), (second, (1, 2))):
        if turns in reversed_by:
            left[dim] += "!"
    right = list(left)
    if turns % 2:
        right[first], right[second] = left[second], left[first]
    return text([left], [right])


def _as_strided(call: Call) -> str:
    names = Names()
    return text([[names.whole() for _ in call.operand(0).shape]], [[names.whole() for _ in call.output.shape]])


TABLE = """
aten.{slice,slice_copy}.Tensor                              slice; linear 0
aten.{narrow,narrow_copy}.default                           slice; linear 0
aten.slice_scatter.default                                  slice_scatter
aten.{select,select_copy}.int                               select; linear 0
aten.select_scatter.default                                 select; linear 0+1
aten.{split,unsafe_split,split_copy}.Tensor                 split; linear 0
aten.split.sizes                                            split; linear 0
aten.{split_with_sizes,split_with_sizes_copy,unsafe_split_with_sizes}.default  split; linear 0
aten.{chunk,unsafe_chunk}.default                           split; linear 0
aten.tensor_split.{sections,indices}                        split; linear 0
aten.hsplit.{int,array}                                     split; linear 0
aten.{unbind,unbind_copy}.int                               unbind; linear 0
aten.{cat,concat,concatenate}.default                       cat; linear *
aten.hstack.default                                         cat columns; linear *
aten.{vstack,row_stack}.default                             cat rows; linear *
aten.stack.default                                          stack; linear *
aten.pad.default                                            pad pad
aten.constant_pad_nd.default                                pad pad constant
aten.{reflection_pad1d,reflection_pad2d,reflection_pad3d}.default  pad padding edge
aten.{replication_pad1d,replication_pad2d,replication_pad3d}.default  pad padding edge
aten.roll.default                                           roll; linear 0
aten.{permute,permute_copy}.default                  permute dims; linear 0
aten.{transpose,transpose_copy}.int                  permute swap; linear 0
aten.{swapaxes,swapdims}.default                     permute swap; linear 0
aten.{movedim,moveaxis}.int                          permute move; linear 0
aten.{movedim,moveaxis}.intlist                      permute moves; linear 0
aten.{t,t_copy,numpy_T}.default                      permute reversed; linear 0
aten.{mT,adjoint}.default                            permute matrix; linear 0
aten.{diagonal,diagonal_copy}.default                diagonal; linear 0
aten.linalg_diagonal.default                         diagonal; linear 0
aten.diag_embed.default                              diag_embed; linear 0
aten.rot90.default                                   rot90; linear 0
aten.{as_strided,as_strided_copy}.default            as_strided; linear 0
"""

FAMILIES = {
    "slice": OpFamily(_slice, _slice_samples),
    "slice_scatter": OpFamily(_slice_scatter, _slice_scatter_samples),
    "select": OpFamily(
        _select,
        sample_calls(
            "dim index", ((5, 7), (7,), 0, 0), ((5, 7), (5,), 1, -1), ((3, 5, 7), (3, 7), -2, 3), ((5,), (), 0, 2)
        ),
    ),
    "split": OpFamily(_split, _split_samples),
    "unbind": OpFamily(_unbind, sample_calls("dim", ((3, 5), 0), ((5, 7, 3), -1), ((4,), 0))),
    "cat": OpFamily(_cat, _cat_samples),
    "stack": OpFamily(_stack, sample_calls("dim", ([(5, 4)] * 3, 1), ([(5, 4)] * 2, -1), ([()] * 3, 0), ([(5,)], 0))),
    "pad": OpFamily(_pad, _pad_samples),
    "roll": OpFamily(
        _roll,
        sample_calls(
            "shifts dims", *(((5, 4, 3), *row) for row in (([1], [0]), ([-1, 2], [0, -1]), ([2], []), ([5, 0], [0, 1])))
        ),
    ),
    "permute": OpFamily(_permute, _permute_samples),
    "diagonal": OpFamily(
        _diagonal, sample_calls("offset dim1 dim2", ((5, 5), 0, 0, 1), ((3, 4, 5), 1, 0, -1), ((3, 7, 5), -1, 2, 1))
    ),
    "diag_embed": OpFamily(
        _diag_embed, sample_calls("offset dim1 dim2", ((5,), 0, -2, -1), ((3, 5), 1, 0, -1), ((3, 4), -1, 2, 1))
    ),
    "rot90": OpFamily(_rot90, sample_calls("k dims", *(((3, 4, 5), turns, [0, 2]) for turns in (0, 1, 2, -1)))),
    "as_strided": OpFamily(
        _as_strided,
        sample_calls("size stride storage_offset", ((5, 3), [3, 4], [3, 2], 1), ((4, 5), [5, 4], [1, 5], 0)),
    ),
}
