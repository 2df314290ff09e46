"""Reductions, and ops that run along one dim: sums, norms, variances, sorts, scans, transforms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

import torch

from autopar.rules.bind_call import fresh_names
from autopar.rules.call import Call
from autopar.rules.ops._names import Names, text, whole, wrap
from autopar.rules.ops.elementwise import aligned_dims, broadcast_shape, dims_text
from autopar.rules.proof.samples import Draw, Sample, Tries, make_sample, sample_calls
from autopar.rules.table import OpFamily

__all__ = ["FAMILIES", "TABLE", "reduced_dims", "reduction_text"]


CONTRACTIONS = ("sum", "mean", "max", "min")


def reduced_dims(call: Call, rank: int) -> frozenset[int]:
    """Return the dims that a call reduces: those in `dim`, or all."""
    dim = call.get("dim")
    if dim is None:
        return frozenset(range(rank))
    dims = (dim,) if isinstance(dim, int) else dim
    if not dims and call.output.rank == rank and not call.get("keepdim"):
        return frozenset()  # `any(dim=[])` reduces nothing, `sum(dim=[])` everything
    return frozenset(d % max(rank, 1) for d in dims or range(rank)) if rank else frozenset()


def reduction_text(call: Call, kind: str, reduced: Iterable[int], names: Sequence[str], operands: str) -> str:
    """Return the rule of a reduction; `kind` is a contraction or `whole`."""
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
    """Yield each way to name dims that the op knows, with and without `keepdim`."""
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
    """Write the rule: leading dims are summed, and those that the size gives as 1."""
    shape, size = call.operand(0).shape, call.output.shape
    names = fresh_names(len(shape), set())
    kept = names[len(shape) - len(size) :]
    offset = len(shape) - len(size)
    output = ["1" if size[i] == 1 != shape[offset + i] else name for i, name in enumerate(kept)]
    return f"{dims_text(names)} -> {dims_text(output)}; linear 0; localise size"


def _norm(call: Call, argument: str) -> str:
    """Write the rule: norms of power 0 and 1 are sums, of infinity extremes; others need the whole."""
    power = call[argument]
    kinds = {0: "sum", 1: "sum", inf: "max", -inf: "min"}
    return _reduce(call, kinds.get(2 if power is None else power, "whole"))


def _norm_samples(op: torch._ops.OpOverload, tries: Tries, argument: str) -> Iterable[Sample]:
    dtype = ("dtype", torch.float64)
    for power in (2, 1, 0, 3.0, inf, -inf):
        samples = list(_reduce_samples(op, Tries(arguments=((argument, power), dtype)), "whole"))
        yield from samples if power == 2 else samples[:2]


def _linalg_norm(call: Call) -> str:
    """Write the rule of a norm of vectors (one dim, or all flattened) or of matrices, which need the whole."""
    dim, rank = call["dim"], call.operand(0).rank
    vectors = isinstance(dim, int) or (len(dim) == 1 if dim is not None else rank == 1)
    return _norm(call, "ord") if vectors else _reduce(call, "whole")


def _linalg_norm_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    for power in (None, 2, 1, inf, "fro"):
        if isinstance(power, str) == ("str" in op._overloadname):
            for shape, dim in (((5, 7), [-1]), ((5, 7), [0, 1]), ((3, 5, 7), [-2, -1]), ((5,), None), ((5, 7), None)):
                if power != "fro" or len(dim or shape) == 2:
                    yield make_sample(op, [Draw(shape)], {"ord": power, "dim": dim, "keepdim": dim == [-1]}, tries)


def _between(call: Call, dims: str, kind: str = "whole") -> str:
    """Write the rule of a measure of two broadcast tensors over dim `dim`, the `last`, or `all`."""
    shape = broadcast_shape(call)
    names = fresh_names(len(shape), set())
    operands = ", ".join(aligned_dims([spec.shape for spec in call.operands if spec], names, shape))
    if not shape:
        return f"{operands} -> ()"
    reduced = {"dim": [call.get("dim", 0) % len(shape)], "last": [len(shape) - 1], "all": range(len(shape))}[dims]
    return reduction_text(call, kind, reduced, names, operands)


def _between_samples(op: torch._ops.OpOverload, tries: Tries, dims: str, kind: str = "whole") -> Iterable[Sample]:
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
    """Yield calls without a dim, which cut 3 rows in shards: the op then takes the first dim of length 3."""
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


def _moments(call: Call) -> str:
    return _reduce(call, "whole")


def _moments_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    yield from _reduce_samples(op, tries, "whole")
    if any(argument.name == "unbiased" for argument in op._schema.arguments):
        yield from list(_reduce_samples(op, Tries(arguments=(("unbiased", False),)), "whole"))[:2]


# -- ops along one dim -------------------------------------------------------------------------------------------------


def _dims(call: Call, argument: str) -> set[int]:
    """Return the dims of the op: the last ones where it gives sizes, all where it gives nothing."""
    rank = call.operand(0).rank
    if argument.lstrip("-").isdigit():
        return {wrap(int(argument), rank)} if rank else set()
    given = call[argument]
    if given is None:
        sizes = call.get("s")
        return set(range(rank - len(sizes) if sizes else 0, rank))
    return {wrap(dim, rank) for dim in ([given] if isinstance(given, int) else given)} if rank else set()


def _along(call: Call, argument: str = "dim", *kinds: str) -> str:
    """Write the rule: the dims of the op are whole; in an output they stay, change their size, or go."""
    names = Names()
    shape = call.operand(0).shape
    dims = _dims(call, argument)
    left = [whole(name) if i in dims else name for i, name in enumerate(names.some(len(shape)))]
    operands: list[list[str] | None] = []
    for spec in call.operands:
        sizes = () if spec is None else spec.shape
        read = [_resized(left[i], shape[i], size, i in dims, names) for i, size in enumerate(sizes)]
        operands.append(None if spec is None else read)
    outputs = []
    for spec in call.outputs:
        assert spec is not None, f"{call.op} has no such output"
        if spec.rank < len(shape):
            outputs.append([name for i, name in enumerate(left) if i not in dims])
        else:
            outputs.append([_resized(left[i], shape[i], size, i in dims, names) for i, size in enumerate(spec.shape)])
    return text(operands, outputs)


def _resized(name: str, before: int, after: int, along: bool, names: Names) -> str:
    if not along or before == after:
        return name
    return "1" if after == 1 else names.whole()


def _along_samples(op: torch._ops.OpOverload, tries: Tries, argument: str = "dim", *kinds: str) -> Iterable[Sample]:
    names = {each.name: str(each.type) for each in op._schema.arguments}
    for shape, dim in (((5, 7), 0), ((3, 4, 5), -2), ((7,), 0), ((4, 6), -1)):
        if argument not in names:
            yield make_sample(op, [Draw(shape, tries.kind)], {}, tries)
        elif "List" in names[argument]:
            yield make_sample(op, [Draw(shape, tries.kind)], {argument: [dim]}, tries)
        else:
            yield make_sample(op, [Draw(shape, tries.kind)], {argument: dim}, tries)
    yield from _special(op, tries, names, argument)


def _special(op: torch._ops.OpOverload, tries: Tries, names: dict[str, str], argument: str) -> Iterable[Sample]:
    """Return the rule's clauses that some of these ops have besides a dim."""
    source = Draw((4, 6), tries.kind)
    if "prepend" in names:
        for n in (1, 2):
            tensors = [source, Draw((4, 2)), Draw((4, 1))]
            yield make_sample(op, tensors, {"n": n}, tries)
            yield make_sample(op, [source, Draw((4, 1)), None], {"n": n, "dim": 1}, tries)
    if "k" in names:
        yield make_sample(op, [source], {"k": 3, "dim": 0}, tries)
    if "n" in names and "norm" in names:
        for n in (4, 9):
            yield make_sample(op, [source], {"n": n, argument: 0, "norm": "ortho"}, tries)
    if "s" in names:
        yield make_sample(op, [Draw((3, 4, 6), tries.kind)], {"s": [5, 4], argument: [0, 2]}, tries)
        yield make_sample(op, [Draw((3, 4, 6), tries.kind)], {argument: [1, 2]}, tries)
        if "Optional" in names[argument]:
            yield make_sample(op, [Draw((4, 6), tries.kind)], {argument: None}, tries)
            yield make_sample(op, [Draw((3, 4, 6), tries.kind)], {"s": [5, 4], argument: None}, tries)


def _histc(call: Call) -> str:
    """Write the rule: counts are summed if the range does not come from the tensor."""
    names = Names()
    dims = names.some(call.operand(0).rank)
    if call["min"] == call["max"]:
        dims = [whole(name) for name in dims]
    return text([dims], [[names.whole()]])


def _histc_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    numbers = torch.arange(20, dtype=torch.float64) % 7
    for shape in ((20,), (4, 5)):
        for low, high in ((0, 6), (1, 4), (0, 0)):
            yield make_sample(op, [numbers.reshape(shape)], {"bins": 7, "min": low, "max": high})


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
aten.{argmax,argmin}.default                                reduce whole
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
aten.linalg_vecdot.default                                  between dim sum; linear 0 1
aten.{linalg_cross,cross}.default                           cross
aten.cumsum.default                                         along; linear 0
aten.{cumprod,logcumsumexp,cummax,cummin}.default           along
aten.{sort,argsort}.{default,stable}                        along
aten.topk.default                                           along
aten.msort.default                                          along 0
aten.diff.default                                           along; linear 0+1+2
aten.{trapz,trapezoid,cumulative_trapezoid}.dx              along; linear 0
aten.gradient.scalarint                                     along; linear 0; try spacing=0.5
aten.flip.default                                           along dims; linear 0
aten.fliplr.default                                         a b! ... -> a b! ...; linear 0
aten.flipud.default                                         along 0; linear 0
aten.{fft_fft,fft_ifft}.default                             along; linear 0; try complex
aten.{fft_rfft,fft_ihfft}.default                           along; linear 0
aten.{fft_irfft,fft_hfft}.default                           along; linear 0; try complex
aten.{fft_fft2,fft_ifft2,fft_fftn,fft_ifftn}.default        along; linear 0; try complex
aten.{fft_rfft2,fft_rfftn}.default                          along; linear 0
aten.{fft_irfft2,fft_irfftn}.default                        along; linear 0; try complex
aten.{fft_fftshift,fft_ifftshift}.default                   along; linear 0
aten.histc.default                                          histc
aten.bincount.default                                       n!, n!? -> k!; try count
"""

FAMILIES = {
    "reduce": OpFamily(_reduce, _reduce_samples),
    "sum_to_size": OpFamily(
        _sum_to_size, sample_calls("size", *(((5, 7, 4), size) for size in ((7, 4), (1, 4), (5, 1, 4), (5, 7, 4))))
    ),
    "norm": OpFamily(_norm, _norm_samples),
    "linalg_norm": OpFamily(_linalg_norm, _linalg_norm_samples),
    "moments": OpFamily(_moments, _moments_samples),
    "between": OpFamily(_between, _between_samples),
    "cross": OpFamily(_cross, _cross_samples),
    "softmax": OpFamily(_softmax, sample_calls("dim", ((5, 7), -1), ((5, 7, 4), 1), ((5, 7), 0))),
    "along": OpFamily(_along, _along_samples),
    "histc": OpFamily(_histc, _histc_samples),
}
