"""Ops that put the dims of a tensor in another order, or take diagonals of two of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from autopar.rules.call import Call
from autopar.rules.ops._names import Names, as_list, text, wrap
from autopar.rules.proof.samples import Draw, Sample, Tries, make_sample
from autopar.rules.table import OpFamily

__all__ = ["FAMILIES", "TABLE"]


def _order(call: Call, way: str) -> list[int]:
    """Which input dim each output dim is."""
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
    """The diagonal of two dims comes last."""
    rank = call.operand(0).rank
    taken = {wrap(call["dim1"], rank), wrap(call["dim2"], rank)}
    names = Names()
    left = [names.whole() if dim in taken else names.one() for dim in range(rank)]
    return text([left], [[*(name for dim, name in enumerate(left) if dim not in taken), names.whole()]])


def _diagonal_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    for shape, offset, dim1, dim2 in (((5, 5), 0, 0, 1), ((3, 4, 5), 1, 0, -1), ((3, 7, 5), -1, 2, 1)):
        yield make_sample(op, [Draw(shape)], {"offset": offset, "dim1": dim1, "dim2": dim2}, tries)


def _diag_embed(call: Call) -> str:
    """The last dim becomes the diagonal of two dims."""
    rank = call.output.rank
    placed = {wrap(call["dim1"], rank), wrap(call["dim2"], rank)}
    names = Names()
    left = names.some(call.operand(0).rank - 1)
    rest = iter(left)
    right = [names.whole() if dim in placed else next(rest) for dim in range(rank)]
    return text([[*left, names.whole()]], [right])


def _diag_embed_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    for shape, offset, dim1, dim2 in (((5,), 0, -2, -1), ((3, 5), 1, 0, -1), ((3, 4), -1, 2, 1)):
        yield make_sample(op, [Draw(shape)], {"offset": offset, "dim1": dim1, "dim2": dim2}, tries)


def _rot90(call: Call) -> str:
    """A quarter turn swaps two dims and reverses one of them, which cannot be split."""
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


def _rot90_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    for turns in (0, 1, 2, -1):
        yield make_sample(op, [Draw((3, 4, 5))], {"k": turns, "dims": [0, 2]}, tries)


def _as_strided(call: Call) -> str:
    names = Names()
    return text([[names.whole() for _ in call.operand(0).shape]], [[names.whole() for _ in call.output.shape]])


def _as_strided_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    for shape, size, stride, offset in (((5, 3), [3, 4], [3, 2], 1), ((4, 5), [5, 4], [1, 5], 0)):
        yield make_sample(op, [Draw(shape)], {"size": size, "stride": stride, "storage_offset": offset}, tries)


FAMILIES = {
    "permute": OpFamily(_permute, _permute_samples),
    "diagonal": OpFamily(_diagonal, _diagonal_samples),
    "diag_embed": OpFamily(_diag_embed, _diag_embed_samples),
    "rot90": OpFamily(_rot90, _rot90_samples),
    "as_strided": OpFamily(_as_strided, _as_strided_samples),
}

TABLE = """
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
