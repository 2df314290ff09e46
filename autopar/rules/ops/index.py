"""Lookups by position: embeddings, bags of rows, indexing, gather, bounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from autopar.rules.call import Call, TensorSpec
from autopar.rules.ops._names import Names, text, whole, wrap
from autopar.rules.ops.elementwise import aligned_dims
from autopar.rules.proof.samples import Draw, Sample, Tries, make_sample, sample_calls
from autopar.rules.shard_call.local_call import FactorSlice, LocalCall
from autopar.rules.table import OpFamily

__all__ = [
    "FAMILIES",
    "INDICES",
    "MASKS",
    "MAX",
    "MEAN",
    "SUM",
    "TABLE",
    "all_whole",
    "broadcast_shape",
    "index_draws",
    "index_place",
    "indexed_dims",
    "is_mask",
    "own_bags",
    "own_rows",
    "words",
]


def _embedding(call: Call) -> str:
    """Write the rule; gradients scaled by the frequency of a row need all lookups at once."""
    names = Names("vd")
    lookups = names.some(call.operand(1).rank)
    if call["scale_grad_by_freq"]:
        lookups = [whole(name) for name in lookups]
        return text([["v!", "d"], lookups], [[*lookups, "d"]], "index 1 v")
    localised = "localise padding_idx" + (" sparse" if call["sparse"] else "")
    return text([["v", "d"], lookups], [[*lookups, "d"]], "index 1 v", "lower v masked_lookup", localised)


# -- indexing with tensors --------------------------------------------------------------------------------------------


def is_mask(spec: TensorSpec | None) -> bool:
    return spec is not None and spec.dtype in (torch.bool, torch.uint8)


def indexed_dims(call: Call, indices: Sequence[TensorSpec | None]) -> list[list[int]]:
    """Return the dims of the indexed tensor that each index covers; a mask covers as many as it has."""
    covered: list[list[int]] = []
    dim = 0
    for spec in indices:
        width = spec.rank if spec is not None and is_mask(spec) else 1
        covered.append(list(range(dim, dim + width)) if spec is not None else [])
        dim += width
    return covered


def index_place(covered: Sequence[Sequence[int]]) -> int | None:
    """Return the place of the indices' dims in the result; None where they come first, being no neighbours."""
    used = [i for i, dims in enumerate(covered) if dims]
    neighbours = used == list(range(used[0], used[-1] + 1))
    return covered[used[0]][0] if neighbours else None


def broadcast_shape(indices: Sequence[TensorSpec | None]) -> tuple[int, ...]:
    shapes = [spec.shape[::-1] for spec in indices if spec is not None]
    return tuple(next((size for size in sizes if size != 1), 1) for sizes in zip_longest(*shapes, fillvalue=1))[::-1]


def _index(call: Call) -> str:
    """Write the rule: indexed dims are looked up, the broadcast dims of the indices are parallel."""
    shape, indices = call.operand(0).shape, call.operands[1:]
    names = Names()
    left = names.some(len(shape))
    covered = indexed_dims(call, indices)
    taken = {dim for dims in covered for dim in dims}
    rest = [name for dim, name in enumerate(left) if dim not in taken]
    place = index_place(covered) or 0
    masked = any(map(is_mask, indices))
    found = names.some(call.output.rank - len(rest))
    if masked:
        found = [whole(name) for name in found]
        read = [None if spec is None else [names.whole() for _ in spec.shape] for spec in indices]
    else:
        present = [spec.shape for spec in indices if spec is not None]
        dims = iter(aligned_dims(present, found, broadcast_shape(indices)))
        read = [None if spec is None else words(next(dims)) for spec in indices]
    clauses = []
    for position, dims_of in enumerate(covered):
        for dim in dims_of:
            if masked or call.operand(0).dtype is torch.bool:
                left[dim] = whole(left[dim])
            else:
                clauses += [f"index {position + 1} {left[dim]}", f"lower {left[dim]} masked_lookup"]
    return text([left, *read], [[*rest[:place], *found, *rest[place:]]], *clauses)


def words(dims: str) -> list[str]:
    return [] if dims == "()" else dims.split()


INDICES: tuple[tuple[tuple[int, ...], tuple[tuple[int, ...] | None, ...]], ...] = (
    ((7, 5), ((4,),)),
    ((7, 5), ((),)),
    ((7, 5), ((3, 4),)),
    ((5, 7), (None, (4,))),
    ((7, 5), ((3, 1, 1), (1, 4, 1))),
    ((7, 5, 4), ((6,), (6,))),
    ((7, 5, 4), ((6,), None, (6,))),
    ((3, 7, 5), (None, (4, 1), (6,))),
)
MASKS: tuple[tuple[tuple[int, ...], tuple[tuple[int, ...] | None, ...]], ...] = (
    ((5, 4), ((5, 4),)),
    ((5, 4, 3), ((5, 4),)),
    ((3, 5), (None, (5,))),
)


def _index_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    for kind in ("normal", "int"):
        for shape, indices in INDICES:
            yield make_sample(op, [Draw(shape, kind), index_draws(shape, indices)], {})
    for shape, masks in MASKS if "unsafe" not in op._schema.name else ():
        yield make_sample(op, [Draw(shape), [None if mask is None else Draw(mask, "bool") for mask in masks]], {})
    yield make_sample(op, [Draw((7, 5), "bool"), index_draws((7, 5), ((4,),))], {})


def index_draws(shape: tuple[int, ...], indices: Sequence[tuple[int, ...] | None]) -> list[Draw | None]:
    """Return positions in the indexed dims, some counted from the end."""
    return [
        None if index is None else Draw(index, "index", extent, also=(-1,))
        for index, extent in zip(indices, shape, strict=False)
    ]


# -- along one dim ----------------------------------------------------------------------------------------------------


def _index_select(call: Call) -> str:
    names = Names()
    left = names.some(call.operand(0).rank)
    found = names.some(call.operand(1).rank)
    if not left:
        return text([[], found], [[]])
    dim = wrap(call["dim"], len(left))
    right = [*left[:dim], *(found or ["1"]), *left[dim + 1 :]]
    return text([left, found], [right], *_looked_up(call, left, dim))


def _looked_up(call: Call, left: list[str], dim: int) -> list[str]:
    if call.operand(0).dtype is torch.bool:
        left[dim] = whole(left[dim])
        return []
    return [f"index 1 {left[dim]}", f"lower {left[dim]} masked_lookup"]


def _gather(call: Call) -> str:
    """Write the rule: other dims are parallel where their sizes are equal; a shorter index keeps them whole."""
    shape, index = call.operand(0).shape, call.operand(1).shape
    names = Names()
    if len(shape) != len(index) or not shape:
        found = [names.whole() for _ in index]
        return text([[names.whole() for _ in shape], found], [found])
    dim = wrap(call["dim"], len(shape))
    left = names.some(len(shape))
    right = list(left)
    for i, (size, extent) in enumerate(zip(shape, index, strict=True)):
        if i == dim:
            right[i] = names.one()
        elif size != extent:
            left[i], right[i] = whole(left[i]), names.whole()
    return text([left, right], [right], *_looked_up(call, left, dim))


def _take_along_dim(call: Call) -> str:
    """Write the rule of a gather whose other dims broadcast; without a dim both tensors are flattened."""
    shape, index, out = call.operand(0).shape, call.operand(1).shape, call.output.shape
    names = Names()
    if call["dim"] is None:
        return text([[names.whole() for _ in dims] for dims in (shape, index)], [[names.whole()]])
    dim = wrap(call["dim"], len(shape))
    found = names.some(len(out))
    read = words(aligned_dims([index], found, out)[0])
    left = ["1" if size == 1 != extent else name for name, size, extent in zip(found, shape, out, strict=True)]
    left[dim] = names.one()
    return text([left, read], [found], *_looked_up(call, left, dim))


# -- the rest ---------------------------------------------------------------------------------------------------------


def all_whole(call: Call) -> str:
    names = Names()

    def dims(specs: Iterable[TensorSpec | None]) -> list[list[str] | None]:
        return [None if spec is None else [names.whole() for _ in spec.shape] for spec in specs]

    return text(dims(call.operands), dims(call.outputs))


def _embedding_bag_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    for mode in (0, 1, 2):
        tensors = [Draw((7, 5)), Draw((9,), "index", 7), torch.tensor([0, 4, 6])]
        yield make_sample(op, tensors, {"mode": mode, **({"padding_idx": None} if "padding_idx" in str(op) else {})})


def _one_hot(call: Call) -> str:
    """Write the rule; a number of classes that is not given is the largest of the whole tensor."""
    names = Names("c")
    if call["num_classes"] == -1:
        dims = [names.whole() for _ in range(call.operand(0).rank)]
        return text([dims], [[*dims, "c!"]])
    dims = names.some(call.operand(0).rank)
    return text([dims], [[*dims, "c"]], "lower c own_part")


def _buckets(call: Call) -> str:
    """Write the rule: a count of lower bounds is a sum over parts of the bounds; a sorter keeps them whole."""
    names = Names()
    bounds_first = "searchsorted" in call.op
    values, bounds = call.operands[:2][:: -1 if bounds_first else 1]
    assert values is not None, call.op
    assert bounds is not None, call.op
    out = names.some(values.rank)
    searched = names.one()
    sorter = call.operands[2] if len(call.operands) > 2 else None
    searched = whole(searched) if sorter is not None else searched
    line = [*(out[:-1] if bounds.rank > 1 else []), searched]
    operands = [line, out] if bounds_first else [out, line]
    return text([*operands, *([None if sorter is None else line] if len(call.operands) > 2 else [])], [out])


def _bucket_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    line = torch.tensor([-3, -2, 0, 1, 3, 5, 6])
    for shape in ((5,), (3, 4), ()):
        for right in (False, True):
            values = Draw(shape, "int")
            tensors = [line, values] if "searchsorted" in str(op) else [values, line]
            yield make_sample(op, tensors, {"right": right})
    if "searchsorted" in str(op):
        yield make_sample(op, [torch.stack([line, line * 2 + 1]), Draw((2, 4), "int")], {})
        yield make_sample(op, [line.flip(0), Draw((4,), "int"), torch.arange(6, -1, -1)], {})


# -- bags of rows ------------------------------------------------------------------------------------------------------


SUM, MEAN, MAX = 0, 1, 2


def bags(table: Tensor, ids: Tensor, begins: Tensor, weights: Tensor | None, mode: int, last: bool) -> Tensor:
    """Return sums or means of rows: table `[v, d]`, ids `[n]`, `begins[b]`, weights; `last`: `begins` has the end."""
    found: Tensor = torch.embedding_bag(
        table, ids, begins, mode=mode, per_sample_weights=weights, include_last_offset=last
    )[0]
    return found


def own_rows(local: LocalCall, piece: FactorSlice) -> LocalCall:
    """Keep the shard's rows of the table; ids of other rows get weight zero."""
    ids = local.arguments["ids"] - piece.start
    inside = (ids >= 0) & (ids < piece.length)
    return _weighted(local, inside).with_arguments(ids=torch.where(inside, ids, 0))


def own_bags(local: LocalCall, piece: FactorSlice) -> LocalCall:
    """Keep the shard's bags; ids of other bags get weight zero."""
    ids, begins = local.arguments["ids"], local.arguments["begins"]
    place = torch.arange(ids.shape[0], device=begins.device, dtype=begins.dtype)
    inside = place >= begins[piece.start]
    if piece.stop < begins.shape[0]:
        inside = inside & (place < begins[piece.stop])
    own = begins[piece.start : piece.stop].clone()
    own[:1] = 0
    return _weighted(local, inside).with_arguments(begins=own, last=False)


def _weighted(local: LocalCall, inside: Tensor) -> LocalCall:
    weights, table = local.arguments["weights"], local.arguments["table"]
    kept = inside.to(table.dtype)
    return local.with_arguments(weights=kept if weights is None else weights * kept)


def _bags(call: Call) -> str:
    """Write the rule; only sums take weights."""
    weighted = call.operands[3] is not None
    weights = ", n!" if weighted else ", ?"
    if call["mode"] == SUM:
        rest = f"; linear 0{' 3' if weighted else ''}; index 1 v; lower v own_rows; lower o own_bags"
        return f"v d, n!, b!{weights} -> o d{rest}"
    return f"v! d, n!, b!{weights} -> o! d; index 1 v{'; linear 0' if call['mode'] == MEAN else ''}"


def _samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    begins = torch.tensor([0, 0, 4, 6, 6])
    for mode in (SUM, MEAN, MAX):
        for last in (False, True):
            ends = torch.cat([begins, torch.tensor([9])]) if last else begins
            tensors = [Draw((7, 5)), Draw((9,), "index", 7), ends, None]
            yield make_sample(op, tensors, {"mode": mode, "last": last}, tries)
    yield make_sample(
        op, [Draw((7, 5)), Draw((9,), "index", 7), begins, Draw((9,))], {"mode": SUM, "last": False}, tries
    )


# Autograd and shapes come from the op inside.
torch.library.define(
    "autopar::bags", "(Tensor table, Tensor ids, Tensor begins, Tensor? weights, int mode, bool last) -> Tensor"
)
torch.library.impl("autopar::bags", "CompositeImplicitAutograd", bags)

TABLE = """
aten.embedding.default                               embedding; linear 0
aten.{index,_unsafe_index}.Tensor                    index; linear 0
aten.index_select.default                            index_select; linear 0
aten.gather.default                                  gather; linear 0
aten.take_along_dim.default                          take_along_dim; linear 0
aten.embedding_bag.{default,padding_idx}             embedding_bag
aten._embedding_bag.default                          embedding_bag
aten.one_hot.default                                 one_hot
aten.{bucketize,searchsorted}.Tensor                 buckets
autopar.bags.default                                        bags; try @autopar.rules.ops.index
"""

FAMILIES = {
    "embedding": OpFamily(
        _embedding,
        sample_calls(
            "padding_idx scale_grad_by_freq sparse",
            ((7, 5), Draw((), "index", 7), -1, False, False),
            ((7, 5), Draw((4, 3), "index", 7), -1, False, False),
            ((7, 5), Draw((4, 9), "index", 7), 2, False, False),
            ((7, 5), Draw((4, 9), "index", 7), 0, True, False),
            ((7, 5), Draw((4, 9), "index", 7), 2, False, True),
        ),
    ),
    "index": OpFamily(_index, _index_samples),
    "index_select": OpFamily(
        _index_select,
        sample_calls(
            "dim",
            ((7, 5), Draw((4,), "index", 7), 0),
            ((3, 7, 5), Draw((4,), "index", 7), -2),
            ((7,), Draw((9,), "index", 7), 0),
            ((5, 7), Draw((), "index", 7), 1),
            (Draw((7, 5), "bool"), Draw((4,), "index", 7), 0),
        ),
    ),
    "gather": OpFamily(
        _gather,
        sample_calls(
            "dim",
            ((7, 5), Draw((4, 5), "index", 7), 0),
            ((5, 7), Draw((5, 4), "index", 7), -1),
            ((7, 5), Draw((4, 3), "index", 7), 0),
            ((3, 7, 5), Draw((3, 4, 5), "index", 7), 1),
            ((7,), Draw((4,), "index", 7), 0),
            (Draw((7, 5), "bool"), Draw((4, 5), "index", 7), 0),
        ),
    ),
    "take_along_dim": OpFamily(
        _take_along_dim,
        sample_calls(
            "dim",
            ((7, 5), Draw((4, 5), "index", 7), 0),
            ((5, 7), Draw((1, 4), "index", 7), -1),
            ((3, 7, 1), Draw((1, 4, 5), "index", 7), 1),
            ((7,), Draw((4,), "index", 7), None),
        ),
    ),
    "embedding_bag": OpFamily(all_whole, _embedding_bag_samples),
    "one_hot": OpFamily(
        _one_hot,
        sample_calls(
            "num_classes", *((Draw(shape, "index", 7), classes) for shape in ((), (5,), (4, 5)) for classes in (7, -1))
        ),
    ),
    "buckets": OpFamily(_buckets, _bucket_samples),
    "bags": OpFamily(_bags, _samples),
}
