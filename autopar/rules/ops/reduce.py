"""Ops that reduce dims: sums, means, extremes, norms, variances, and the positions of extremes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

import torch

from autopar.rules.bind_call import fresh_names
from autopar.rules.call import Call
from autopar.rules.ops.elementwise import aligned_dims, broadcast_shape, dims_text
from autopar.rules.proof.samples import Draw, Sample, Tries, make_sample
from autopar.rules.table import OpFamily

__all__ = ["FAMILIES", "TABLE", "reduced_dims", "reduction_text"]

CONTRACTIONS = ("sum", "mean", "max", "min")


def reduced_dims(call: Call, rank: int) -> frozenset[int]:
    """The dims that a call reduces: those in `dim`, or all."""
    dim = call.get("dim")
    if dim is None:
        return frozenset(range(rank))
    dims = (dim,) if isinstance(dim, int) else dim
    if not dims and call.output.rank == rank and not call.get("keepdim"):
        return frozenset()  # `any(dim=[])` reduces nothing, `sum(dim=[])` everything
    return frozenset(d % max(rank, 1) for d in dims or range(rank)) if rank else frozenset()


def reduction_text(call: Call, kind: str, reduced: Iterable[int], names: Sequence[str], operands: str) -> str:
    """The rule of a reduction; `kind` is a contraction or `whole`."""
    gone = {names[d] for d in reduced}
    kept = [name for name in names if name not in gone or call.get("keepdim")]
    output = dims_text(["1" if name in gone else name for name in kept])
    if kind == "whole":
        operands = " ".join(word + "!" if word in gone else word for word in operands.replace(",", " ,").split())
    clause = f"; {kind} {' '.join(name for name in names if name in gone)}" if kind in CONTRACTIONS and gone else ""
    return f"{operands} -> {', '.join([output] * len(call.outputs))}{clause}"


def _reduce(call: Call, kind: str, *kinds: str) -> str:
    rank = call.operand(0).rank
    names = fresh_names(rank, set())
    return reduction_text(call, kind, reduced_dims(call, rank), names, dims_text(names))


def _reduce_samples(op: torch._ops.OpOverload, tries: Tries, word: str, kind: str = "normal") -> Iterable[Sample]:
    """Each way to name dims that the op knows, with and without `keepdim`."""
    types = {argument.name: str(argument.type) for argument in op._schema.arguments}
    dims: list[object] = [None]
    if "dim" in types:
        dims = [1, -1, 0] if "List" not in types["dim"] else [[1], [0, -1], [-2]]
        if types["dim"].startswith("Optional"):
            dims.append(None)
    for dim in dims:
        for keepdim in (False, True) if "keepdim" in types else (False,):
            arguments = {name: value for name, value in (("dim", dim), ("keepdim", keepdim)) if name in types}
            yield make_sample(op, [Draw((5, 7, 4), kind)], arguments, tries)
    if "dim" in types and "List" in types["dim"]:
        yield make_sample(op, [Draw((5, 7), kind)], {"dim": []}, tries)
        yield make_sample(op, [Draw((5, 1, 7), kind)], {"dim": [1, 2]}, tries)


def _sum_to_size(call: Call) -> str:
    """Sums the leading dims, and those that the size says are 1."""
    shape, size = call.operand(0).shape, call.output.shape
    names = fresh_names(len(shape), set())
    kept = names[len(shape) - len(size) :]
    offset = len(shape) - len(size)
    output = ["1" if size[i] == 1 != shape[offset + i] else name for i, name in enumerate(kept)]
    return f"{dims_text(names)} -> {dims_text(output)}; linear 0; localise size"


def _sum_to_size_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    for size in ((7, 4), (1, 4), (5, 1, 4), (5, 7, 4)):
        yield make_sample(op, [Draw((5, 7, 4))], {"size": size}, tries)


def _norm(call: Call, argument: str) -> str:
    """|x|^p sums over p-th powers; only p of 0 and 1 are sums themselves, and those of infinity extremes."""
    power = call[argument]
    kinds = {0: "sum", 1: "sum", inf: "max", -inf: "min"}
    return _reduce(call, kinds.get(2 if power is None else power, "whole"))


def _norm_samples(op: torch._ops.OpOverload, tries: Tries, argument: str) -> Iterable[Sample]:
    dtype = ("dtype", torch.float64)
    for power in (2, 1, 0, 3.0, inf, -inf):
        samples = list(_reduce_samples(op, Tries(arguments=((argument, power), dtype)), "whole"))
        yield from samples if power == 2 else samples[:2]


def _linalg_norm(call: Call) -> str:
    """A norm of vectors (one dim, or all of them flattened) or of matrices, of which any split needs the whole."""
    dim, rank = call["dim"], call.operand(0).rank
    vectors = isinstance(dim, int) or (len(dim) == 1 if dim is not None else rank == 1)
    return _norm(call, "ord") if vectors else _reduce(call, "whole")


def _linalg_norm_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    for power in (None, 2, 1, inf, "fro"):
        if isinstance(power, str) == ("str" in op._overloadname):
            for shape, dim in (((5, 7), [-1]), ((5, 7), [0, 1]), ((3, 5, 7), [-2, -1]), ((5,), None), ((5, 7), None)):
                if power != "fro" or len(dim or shape) == 2:
                    yield make_sample(op, [Draw(shape)], {"ord": power, "dim": dim, "keepdim": dim == [-1]}, tries)


def _index_of(call: Call) -> str:
    """The position of an extreme; of a flattened tensor when no dim is named."""
    return _reduce(call, "whole")


def _index_of_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    return _reduce_samples(op, tries, "whole")


def _between(call: Call, dims: str) -> str:
    """A measure between two tensors that broadcast: over dim `dim`, the `last`, or `all`."""
    shape = broadcast_shape(call)
    names = fresh_names(len(shape), set())
    operands = ", ".join(aligned_dims([spec.shape for spec in call.operands if spec], names, shape))
    if not shape:
        return f"{operands} -> ()"
    reduced = {"dim": [call.get("dim", 0) % len(shape)], "last": [len(shape) - 1], "all": range(len(shape))}[dims]
    return reduction_text(call, "whole", reduced, names, operands)


def _vecdot(call: Call) -> str:
    shape = broadcast_shape(call)
    names = fresh_names(len(shape), set())
    operands = ", ".join(aligned_dims([spec.shape for spec in call.operands if spec], names, shape))
    return reduction_text(call, "sum", [call["dim"] % len(shape)], names, operands) + "; linear 0 1"


def _between_samples(op: torch._ops.OpOverload, tries: Tries, dims: str = "dim") -> Iterable[Sample]:
    options: list[dict[str, object]] = [{"dim": 1}, {"dim": -1}, {"dim": 0}] if dims == "dim" else [{}]
    if any(argument.name == "keepdim" for argument in op._schema.arguments):
        options.append({"keepdim": True})
    for arguments in options:
        yield make_sample(op, [Draw((5, 7, 4)), Draw((5, 7, 4))], arguments, tries)
        yield make_sample(op, [Draw((5, 7, 4)), Draw((7, 4) if dims != "dim" else (1, 7, 4))], arguments, tries)


def _cross(call: Call) -> str:
    shape = call.output.shape
    names = fresh_names(len(shape), set())
    dim = call["dim"]
    position = call.operand(0).shape.index(3) if dim is None else dim % len(shape)
    names[position] += "!"
    operands = ", ".join(aligned_dims([spec.shape for spec in call.operands if spec], names, shape))
    return f"{operands} -> {' '.join(names)}; linear 0 1{'; localise cross_dim' if dim is None else ''}"


def _cross_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    """Without a dim it is the first of length 3: shards of 3 rows are cut along the rows here, in 2 and in 3."""
    for shape, dim in (((5, 3), -1), ((3, 5), 0), ((5, 3, 4), 1)):
        yield make_sample(op, [Draw(shape), Draw(shape)], {"dim": dim}, tries)
    if op._schema.arguments[2].default_value is None:
        for first, second in (((6, 3), (6, 3)), ((9, 4, 3), (9, 4, 3)), ((1, 3), (3, 3))):
            yield make_sample(op, [Draw(first), Draw(second)], {"dim": None}, tries)


def _softmax(call: Call) -> str:
    names = fresh_names(call.operand(0).rank, set())
    if names:
        names[call["dim"] % len(names)] += "!"
    return f"{dims_text(names)} -> {dims_text(names)}"


def _softmax_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    for shape, dim in (((5, 7), -1), ((5, 7, 4), 1), ((5, 7), 0)):
        yield make_sample(op, [Draw(shape)], {"dim": dim}, tries)


def _moments(call: Call) -> str:
    return _reduce(call, "whole")


def _moments_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    yield from _reduce_samples(op, tries, "whole")
    if any(argument.name == "unbiased" for argument in op._schema.arguments):
        yield from list(_reduce_samples(op, Tries(arguments=(("unbiased", False),)), "whole"))[:2]


FAMILIES = {
    "reduce": OpFamily(_reduce, _reduce_samples),
    "sum_to_size": OpFamily(_sum_to_size, _sum_to_size_samples),
    "norm": OpFamily(_norm, _norm_samples),
    "linalg_norm": OpFamily(_linalg_norm, _linalg_norm_samples),
    "index_of": OpFamily(_index_of, _index_of_samples),
    "moments": OpFamily(_moments, _moments_samples),
    "between": OpFamily(_between, _between_samples),
    "vecdot": OpFamily(_vecdot, _between_samples),
    "cross": OpFamily(_cross, _cross_samples),
    "softmax": OpFamily(_softmax, _softmax_samples),
}

TABLE = """
# sums and means
aten.sum.{default,dim_IntList}                              reduce sum; linear 0
aten.mean.{default,dim}                                     reduce mean; linear 0
aten.nansum.default                                         reduce sum holes
aten.nanmean.default                                        reduce whole holes   # each shard has its own count
aten.count_nonzero.{default,dim_IntList}                    reduce sum int
aten.prod.{default,dim_int}                                 reduce whole above_one
aten.sum_to_size.default                                    sum_to_size
aten.trace.default                                          a! b! ->; linear 0

# extremes
aten.{amax,max}.default                                     reduce max
aten.{amin,min}.default                                     reduce min
aten.any.{default,dim,dims}                                 reduce max one_true
aten.all.{default,dim,dims}                                 reduce min one_false
aten._is_any_true.default                                   reduce max one_true
aten._is_all_true.default                                   reduce min one_false
aten.{max,min,median,nanmedian}.dim                         reduce whole
aten.{median,nanmedian}.default                             reduce whole
aten.{mode,kthvalue}.default                                reduce whole int; try k=2
aten.aminmax.default                                        reduce whole
aten.{argmax,argmin}.default                                index_of
aten.{quantile,nanquantile}.scalar                          reduce whole; try q=0.3

# variances, norms, soft extremes
aten.{var,std,var_mean,std_mean}.{default,dim,correction}   moments
aten.linalg_vector_norm.default                             norm ord
aten.linalg_norm.{default,ord_str}                          linalg_norm
aten.norm.{Scalar,ScalarOpt_dim}                            norm p
aten.norm.{ScalarOpt_dtype,ScalarOpt_dim_dtype}             norm p
aten.{logsumexp,special_logsumexp}.default                  reduce whole
aten.{softmax,log_softmax}.int                              softmax
aten.{_softmax,_log_softmax,_safe_softmax}.default          softmax

# between two tensors
aten.cosine_similarity.default                              between dim
aten.pairwise_distance.default                              between last
aten.dist.default                                           between all
aten.linalg_vecdot.default                                  vecdot
aten.{linalg_cross,cross}.default                           cross
"""
