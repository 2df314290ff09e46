"""Writes by position: index_put, scatter, index_add and their like.

A dim that is written to is split by dropping what falls elsewhere; the positions, only where what they write adds up.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from autopar.rules.call import Call
from autopar.rules.ops._names import Names, text, whole, wrap
from autopar.rules.ops.elementwise import aligned_dims
from autopar.rules.ops.index import (
    INDICES,
    MASKS,
    all_whole,
    broadcast_shape,
    index_draws,
    index_place,
    indexed_dims,
    is_mask,
    words,
)
from autopar.rules.proof.samples import Draw, Sample, Tries, make_sample, sample_calls
from autopar.rules.table import OpFamily

__all__ = ["FAMILIES", "TABLE"]


def _index_put(call: Call) -> str:
    """Write the rule: added values are summed over the indices; the order of overwrites keeps them whole."""
    shape, indices, values = call.operand(0).shape, call.operands[1:-1], call.operand(len(call.operands) - 1)
    names = Names()
    left = names.some(len(shape))
    covered = indexed_dims(call, indices)
    taken = {dim for dims in covered for dim in dims}
    rest = [dim for dim in range(len(shape)) if dim not in taken]
    place = index_place(covered) or 0
    if any(map(is_mask, indices)):
        return _masked_put(call, left, covered, place, names)
    extents = broadcast_shape(indices)
    found = names.some(len(extents))
    written = [*(left[dim] for dim in rest[:place]), *found, *(left[dim] for dim in rest[place:])]
    sizes = [*(shape[dim] for dim in rest[:place]), *extents, *(shape[dim] for dim in rest[place:])]
    source = words(aligned_dims([values.shape], written, sizes)[0])
    marks = {name: name if call["accumulate"] and name in source else whole(name) for name in found}
    present = iter(aligned_dims([spec.shape for spec in indices if spec is not None], found, extents))
    read = [None if spec is None else [marks.get(name, name) for name in words(next(present))] for spec in indices]
    clauses = [f"linear 0+{len(indices) + 1}"]
    for position, dims in enumerate(covered):
        clauses += [clause for dim in dims for clause in _written(position + 1, left[dim])]
    return text([left, *read, [marks.get(name, name) for name in source]], [left], *clauses)


def _written(operand: int, name: str) -> tuple[str, str]:
    return f"index {operand} {name}", f"lower {name} masked_write"


def _masked_put(call: Call, left: list[str], covered: list[list[int]], place: int, names: Names) -> str:
    """Write the rule: one mask with values that broadcast writes each element alone."""
    indices, values = call.operands[1:-1], call.operand(len(call.operands) - 1)
    shape = call.operand(0).shape
    taken = [dim for dims in covered for dim in dims]
    rest = [(left[dim], shape[dim]) for dim in range(len(shape)) if dim not in taken]
    count = names.whole()
    targets = [*rest[:place], (count, 0), *rest[place:]]
    aligned = zip(targets[len(targets) - values.rank :], values.shape, strict=True)
    source = ["1" if size == 1 != extent else name for (name, extent), size in aligned]
    alone = sum(spec is not None for spec in indices) == 1 and count not in source
    if not alone:
        left = [whole(name) if dim in taken else name for dim, name in enumerate(left)]
    read = [
        None if spec is None else [left[dim] for dim in dims] if alone else [names.whole() for _ in spec.shape]
        for spec, dims in zip(indices, covered, strict=True)
    ]
    return text([left, *read, source], [left], f"linear 0+{len(indices) + 1}")


def _index_put_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    for accumulate in (True, False):
        for shape, indices in INDICES:
            found = torch.empty(shape, device="meta")
            meta = [
                None if index is None else torch.empty(index, device="meta", dtype=torch.int64) for index in indices
            ]
            full = tuple(torch.ops.aten.index.Tensor(found, meta).shape)
            for values in (full, full[1:]):
                tensors = [Draw(shape), index_draws(shape, indices), Draw(values)]
                yield make_sample(op, tensors, {"accumulate": accumulate})
    if "unsafe" not in op._schema.name:
        yield from _mask_samples(op)


def _mask_samples(op: torch._ops.OpOverload) -> Iterable[Sample]:
    for accumulate in (True, False):
        for shape, masks in MASKS:
            for values in ((), (1,), shape[2:]):
                drawn = [None if mask is None else Draw(mask, "bool") for mask in masks]
                yield make_sample(op, [Draw(shape), drawn, Draw(values)], {"accumulate": accumulate})
    mask = torch.tensor([True, False, True, True, False])
    yield make_sample(op, [Draw((5, 4)), [mask], Draw((3, 4))], {})


# -- along one dim ----------------------------------------------------------------------------------------------------


def _scatter(call: Call) -> str:
    """Write the rule: a shard of `self` drops writes outside it; the index splits only where writes add up."""
    shape, index = call.operand(0).shape, call.operand(1).shape
    source = call.operand(2).shape if len(call.operands) > 2 else index
    names = Names()
    if len(shape) != len(index) or not shape:
        read = [[names.whole() for _ in spec.shape] for spec in call.operands[1:] if spec is not None]
        left = [names.whole() for _ in shape]
        return text([left, *read], [left], *_scatter_clauses(call))
    dim, combined = wrap(call["dim"], len(shape)), ""
    left = names.some(len(shape))
    taken, given = list(left), list(left)
    for i, (size, extent, length) in enumerate(zip(shape, index, source, strict=True)):
        if i == dim:
            name = names.one()
            kind = _combined(call) if extent == length and len(call.operands) > 2 else None
            taken[i] = name if kind else whole(name)
            given[i] = taken[i] if extent == length else names.whole()
            combined = f"{kind} {name}" if kind in ("max", "min") else ""
        elif not size == extent == length:
            left[i], taken[i] = whole(left[i]), names.whole()
            given[i] = taken[i] if extent == length else names.whole()
    written = _written(1, left[dim])
    return text([left, taken, given][: len(call.operands)], [left], combined, *_scatter_clauses(call), *written)


def _combined(call: Call) -> str | None:
    """Return the contraction that joins writes of several shards; None where none does."""
    if "scatter_add" in call.op:
        return "sum"
    ways = {"add": "sum", "sum": "sum", "amax": "max", "amin": "min"}
    return ways.get(call.get("reduce", "")) if call.get("include_self", True) else None


def _scatter_clauses(call: Call) -> list[str]:
    """Return the clauses of the operands in which the op is linear."""
    way = call.get("reduce", "add")
    if call.get("src") is not None or call.get("source") is not None:
        if way in ("add", "sum") or (way == "mean" and call.operand(0).differentiable):
            return ["linear 0+2"]
        return ["linear 0"] if way in ("multiply", "prod") and call.get("include_self", True) else []
    return ["linear 0"] if call["value"] == 0 or way == "multiply" else []


def _scatter_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    names = {argument.name for argument in op._schema.arguments}
    ways: tuple[dict[str, object], ...] = ({},)
    if "include_self" in names:
        kinds = ("sum", "mean", "amax", "amin", "prod")
        ways = tuple({"reduce": kind, "include_self": own} for kind in kinds for own in (True, False))
    elif "reduce" in names:
        ways = ({"reduce": "add"}, {"reduce": "multiply"})
    values = ({"value": 2}, {"value": 0}) if "value" in names else ({},)
    for way in ways:
        for shape, dim, index, source in (
            ((7, 5), 0, (4, 5), (4, 5)),
            ((5, 7), -1, (5, 9), (5, 9)),
            ((7, 5), 0, (4, 3), (4, 5)),
            ((7, 5), 0, (4, 5), (6, 5)),
            ((3, 7, 5), 1, (3, 4, 5), (3, 4, 5)),
        ):
            for value in values:
                kind = "normal" if index == source else "int"  # the derivative wants a source as long as the index
                tensors = [Draw(shape, kind), Draw(index, "index", 7), Draw(source, kind)]
                yield make_sample(op, tensors, {"dim": dim, **way, **value})


def _index_write(call: Call) -> str:
    """Write the rule of slices written at positions of one dim."""
    names = Names()
    left = names.some(call.operand(0).rank)
    positions = names.some(call.operand(1).rank)
    kind = "sum" if "index_add" in call.op else None
    positions = positions if kind else [whole(name) for name in positions]
    dim = wrap(call["dim"], len(left))
    sources = [spec for spec in call.operands[2:] if spec is not None]
    given = [*left[:dim], *(positions or ["1"]), *left[dim + 1 :]]
    if not left or any(spec.rank not in (0, len(left)) for spec in sources):
        left = [whole(name) for name in left]
        read = [[names.whole() for _ in spec.shape] for spec in call.operands[1:] if spec is not None]
        return text([left, *read], [left], *_scatter_clauses(call))
    read = [given if spec.rank else [] for spec in sources]
    clauses = ["linear 0+2"] if sources else _scatter_clauses(call)
    return text([left, positions, *read], [left], *clauses, *_written(1, left[dim]))


def _index_write_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    fill = "index_fill" in str(op)
    for shape, dim, count in (((7, 5), 0, 4), ((5, 7), -1, 9), ((3, 7, 5), 1, 4)):
        source = list(shape)
        source[dim] = count
        third = Draw(()) if fill else Draw(tuple(source))
        for value in ({"value": 2}, {"value": 0}) if "Scalar" in str(op) else ({},):
            yield make_sample(op, [Draw(shape), Draw((count,), "index", 7), third], {"dim": dim, **value})
        if "alpha" in str(op._schema):
            yield make_sample(op, [Draw(shape), Draw((count,), "index", 7), third], {"dim": dim, "alpha": 2})


FAMILIES = {
    "index_put": OpFamily(_index_put, _index_put_samples),
    "scatter": OpFamily(_scatter, _scatter_samples),
    "index_write": OpFamily(_index_write, _index_write_samples),
    "masked_scatter": OpFamily(
        all_whole, sample_calls("", ((5, 4), Draw((5, 4), "bool"), (30,)), ((5, 4), Draw((5, 1), "bool"), (30,)))
    ),
}

TABLE = """
aten.{index_put,_unsafe_index_put}.default           index_put
aten.scatter.{src,value,reduce,value_reduce}         scatter
aten.scatter_add.default                             scatter
aten.scatter_reduce.two                              scatter
aten.{index_add,index_copy}.default                  index_write
aten.index_fill.{int_Scalar,int_Tensor}              index_write
aten.masked_scatter.default                          masked_scatter; linear 0+2
"""
