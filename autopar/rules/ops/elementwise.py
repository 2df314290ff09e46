"""Elementwise ops with broadcasting."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from itertools import zip_longest

import torch

from autopar.rules.bind_call import fresh_names
from autopar.rules.call import Call, takes_tensors
from autopar.rules.proof.samples import Draw, Sample, Tries, make_sample, sample_calls
from autopar.rules.table import OpFamily

__all__ = [
    "FAMILIES",
    "TABLE",
    "aligned",
    "aligned_dims",
    "broadcast_samples",
    "broadcast_shape",
    "dims_text",
    "pointwise",
]


def dims_text(dims: Sequence[str]) -> str:
    """Return one operand in the notation; `()` is a scalar."""
    return " ".join(dims) or "()"


def aligned(shape: Sequence[int], names: Sequence[str], out: Sequence[int]) -> list[str]:
    """Return the dims of one tensor that broadcasts to `out`, aligned to the right."""
    offset = len(out) - len(shape)
    return ["1" if size == 1 != out[offset + i] else names[offset + i] for i, size in enumerate(shape)]


def aligned_dims(shapes: Iterable[tuple[int, ...]], names: Sequence[str], out: Sequence[int]) -> list[str]:
    """Return dims of operands that broadcast to `out`, whose dims are `names`; `1` where one is broadcast."""
    return [dims_text(aligned(shape, names, out)) for shape in shapes]


def broadcast_shape(call: Call) -> tuple[int, ...]:
    """Return the shape that all operands broadcast to."""
    present = (reversed(spec.shape) for spec in call.operands if spec is not None)
    columns = zip_longest(*present, fillvalue=1)
    return tuple(next((size for size in column if size != 1), 1) for column in columns)[::-1]


def pointwise(call: Call, *kinds: str) -> str:
    """Return a family whose operands broadcast to the output; `kinds` are those of its samples' operands."""
    out = call.output.shape
    names = fresh_names(len(out), set())
    present = [spec.shape for spec in call.operands if spec is not None]
    texts = iter(aligned_dims(present, names, out))
    operands = ", ".join("?" if spec is None else next(texts) for spec in call.operands)
    return f"{operands} -> {', '.join([dims_text(names)] * len(call.outputs))}"


def broadcast_samples(op: torch._ops.OpOverload, tries: Tries, *kinds: str) -> Iterable[Sample]:
    """Yield all operands of one shape, then each operand in turn broadcast, absent if it may be, or a number."""
    names = list(takes_tensors(op))
    wanted = kinds if len(kinds) == len(names) else (kinds or (tries.kind,)) * len(names)
    optional = {argument.name for argument in op._schema.arguments if str(argument.type).startswith("Optional")}
    for shape in ((5, 7),) if len(names) == 1 else ((5, 7), (3, 4, 5)):
        yield make_sample(op, [Draw(shape, kind) for kind in wanted], {}, tries)
    for narrow, name in enumerate(names if len(names) > 1 else ()):
        for narrow_shape in ((5, 1), ()):
            tensors = [Draw(narrow_shape if i == narrow else (5, 7), kind) for i, kind in enumerate(wanted)]
            yield make_sample(op, tensors, {}, tries)
        if name in optional:
            yield make_sample(op, [None if i == narrow else Draw((5, 7), k) for i, k in enumerate(wanted)], {}, tries)


def _number_samples(op: torch._ops.OpOverload, tries: Tries, *kinds: str) -> Iterable[Sample]:
    """Yield also calls with a plain number in place of a tensor, and with an integer tensor."""
    yield from broadcast_samples(op, tries, *kinds)
    yield make_sample(op, [Draw((5, 7)), 0.7], {}, tries)
    yield make_sample(op, [Draw((5, 7)), Draw((7,), "count")], {}, tries)
    yield make_sample(op, [Draw((5, 7), "count"), Draw((5, 7))], {}, tries)


def _linear_when(call: Call, argument: str, value: str, other: str, groups: str, *kinds: str) -> str:
    """Return a family that is linear for one value of an argument; samples also use `other`."""
    clause = f"; linear {groups.replace('|', ' ')}" if call[argument] == ast.literal_eval(value) else ""
    return pointwise(call) + clause


def _samples_both_ways(
    op: torch._ops.OpOverload, tries: Tries, argument: str, value: str, other: str, groups: str, *kinds: str
) -> Iterable[Sample]:
    for text in (value, other):
        arguments = (*tries.arguments, (argument, ast.literal_eval(text)))
        yield from list(broadcast_samples(op, Tries(tries.kind, arguments), *kinds))[:4]


def _cast_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    """Yield casts from and to integers; of floats float64 alone, whose precision the proof needs."""
    for kind, dtype in (
        ("normal", torch.float64),
        ("int", torch.float64),
        ("normal", torch.int64),
        ("bool", torch.float64),
        ("normal", torch.bool),
        ("normal", torch.complex128),
    ):
        arguments = {"dtype": dtype, "device": torch.device("cpu")}
        yield make_sample(op, [Draw((5, 7), kind)], arguments, tries)


def _cast_like(call: Call) -> str:
    """Write the rule: the second operand gives its dtype alone, so shards may take any of its shards."""
    first, other = call.operand(0), call.operand(1)
    names = fresh_names(first.rank + other.rank, set())
    dims = dims_text(names[: first.rank])
    read = names[first.rank :]
    # All shards of the second operand give the same result, and a maximum of equal numbers is exact.
    clause = f"; max {' '.join(read)}" if read else ""
    return f"{dims}, {dims_text(read)} -> {dims}; linear 0 0+1{clause}"


def _glu(call: Call) -> str:
    """Write the rule: the first half of the dim gates the second, so the halves are one factor and stay together."""
    rank = call.operand(0).rank
    names = fresh_names(rank, {"halves"})
    left = list(names)
    # A plain split of this dim would give the gates to one shard and the values to another.
    left[call["dim"] % rank] = f"(halves! {names[call['dim'] % rank]})"
    return f"{' '.join(left)} -> {' '.join(names)}"


def _prelu(call: Call) -> str:
    """Write the rule: one weight for all channels, or one for each along dim 1."""
    rank = call.operand(0).rank
    names = fresh_names(rank, set())
    shared = rank < 2 or call.operand(1).shape != (call.operand(0).shape[1],)
    weight = "1" * call.operand(1).rank or "()" if shared else names[1]
    return f"{dims_text(names)}, {weight} -> {dims_text(names)}"


def _filled(call: Call) -> str:
    """Write the rule: the last operand is one number as a tensor."""
    *others, value = call.operands
    names = fresh_names(call.output.rank, set())
    texts = aligned_dims([spec.shape for spec in others if spec], names, call.output.shape)
    return f"{', '.join([*texts, '?' if value is None else dims_text('1' * value.rank)])} -> {dims_text(names)}"


def _filled_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    masks = [Draw((5, 7), "bool"), Draw((5, 1), "bool"), Draw((7,), "bool")] if len(takes_tensors(op)) > 2 else [None]
    for mask in masks:
        yield make_sample(op, [Draw((5, 7)), *([mask] if mask else []), Draw(())], {}, tries)


def _pairs(call: Call) -> str:
    names = fresh_names(call.output.rank, {"parts"})
    return f"{' '.join([*names, 'parts!'])} -> {dims_text(names)}"


def _isin(call: Call) -> str:
    """Write the rule: a maximum (inverted: a minimum) over the test elements."""
    operands = call.operands if len(call.operands) == 2 else (None, *call.operands)
    out, tested = call.output.rank, operands[1]
    assert tested is not None
    names = fresh_names(out + tested.rank, set())
    read = names[out:]
    # An element is in the set if it is in the part of any shard.
    clause = f"; {'min' if call['invert'] else 'max'} {' '.join(read)}" if read else ""
    first = f"{dims_text(names[:out])}, " if operands[0] is not None else ""
    return f"{first}{dims_text(read)} -> {dims_text(names[:out])}{clause}"


def _isin_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    tensors = len(takes_tensors(op))
    for invert in (False, True):
        shapes = [(5, 7), (4,)][2 - tensors :]
        yield make_sample(op, [Draw(shape, "int") for shape in shapes], {"invert": invert}, tries)


FAMILIES = {
    "pointwise": OpFamily(pointwise, broadcast_samples),
    "arithmetic": OpFamily(pointwise, _number_samples),
    "linear_when": OpFamily(_linear_when, _samples_both_ways),
    "cast": OpFamily(pointwise, _cast_samples),
    "cast_like": OpFamily(
        _cast_like,
        sample_calls("", ((5, 7), (4,)), (Draw((5, 7), "int"), (4,)), ((5, 7), Draw((4,), "int")), ((5, 7), ())),
    ),
    "glu": OpFamily(_glu, sample_calls("dim", ((5, 14), -1), ((10, 7, 4), 0), ((5, 6, 7), 1))),
    "prelu": OpFamily(
        _prelu, sample_calls("", ((5, 7), (7,)), ((3, 4, 5), (4,)), ((5, 7), (1,)), ((7,), (1,)), ((), (1,)))
    ),
    "filled": OpFamily(_filled, _filled_samples),
    "pairs": OpFamily(_pairs, sample_calls("", ((2,),), ((5, 2),), ((5, 7, 2),))),
    "isin": OpFamily(_isin, _isin_samples),
}

TABLE = """
# arithmetic
aten.{add,sub,subtract}.Tensor                              arithmetic; linear 0+1
aten.rsub.Tensor                                            pointwise; linear 0+1
aten.{mul,multiply}.Tensor                                  arithmetic; linear 0 1
aten.{div,divide,true_divide}.Tensor                        arithmetic normal positive; linear 0
aten.{mul,multiply,div,divide,true_divide}.Scalar           pointwise; linear 0
aten.{add,sub,subtract,rsub,fmod}.Scalar                    pointwise
aten.{div,divide}.Tensor_mode                               linear_when rounding_mode None 'floor' 0 normal positive
aten.{div,divide}.Scalar_mode                               linear_when rounding_mode None 'floor' 0
aten.floor_divide.{default,Scalar}                          pointwise count
aten.heaviside.default                                      pointwise int
aten.{fmod,remainder}.Tensor                                pointwise
aten.remainder.Scalar                                       pointwise
aten.remainder.Scalar_Tensor                                pointwise count
aten.{neg,negative,positive}.default                        pointwise; linear 0
aten.{deg2rad,rad2deg}.default                              pointwise; linear 0
aten.addcmul.default                                        pointwise; linear 0+1 0+2
aten.addcdiv.default                                        pointwise; linear 0+1
aten.lerp.{Scalar,Tensor}                                   pointwise; linear 0+1
aten.{maximum,minimum,fmax,fmin}.default                    pointwise
aten.{max,min}.other                                        pointwise
aten.ldexp.Tensor                                           pointwise normal int; linear 0
aten.{hypot,atan2,arctan2,logaddexp,logaddexp2}.default     pointwise
aten.copysign.{Tensor,Scalar}                               pointwise
aten.xlogy.Tensor                                           pointwise normal int   # not linear: 0 * log 0 is 0
aten.xlogy.Scalar_Other                                     pointwise; try other=0
aten.xlogy.Scalar_Self                                      pointwise positive
aten.special_xlog1py.self_scalar                            pointwise positive
aten.{gcd,lcm}.default                                      pointwise int

# powers
aten.{pow,float_power}.Tensor_Scalar                        linear_when exponent 1 2.0 0 positive
aten.{pow,float_power}.{Scalar,Tensor_Tensor}               pointwise positive
aten.{square,exp,exp2,expm1,special_exp2,special_expm1}.default  pointwise
aten.{sqrt,rsqrt,reciprocal}.default                        pointwise positive
aten.{log,log2,log10,log1p,special_log1p}.default           pointwise positive

# rounding and parts of numbers
aten.{floor,ceil,round,trunc,fix,frac,special_round}.default  pointwise
aten.round.decimals                                         pointwise; try decimals=1
aten.{abs,absolute,sign,sgn,signbit}.default                pointwise
aten.{isnan,isinf,isfinite,isposinf,isneginf,isreal,nan_to_num}.default  pointwise holes
aten.frexp.Tensor                                           pointwise

# trigonometry and special functions
aten.{sin,cos,tan,sinh,cosh,tanh,asinh,atan,arcsinh,arctan,sinc,special_sinc}.default  pointwise
aten.{asin,acos,atanh,arcsin,arccos,arctanh,erfinv,special_erfinv}.default  pointwise unit
aten.{acosh,arccosh}.default                                pointwise above_one
aten.{erf,erfc,i0,special_erf,special_erfc,special_erfcx}.default  pointwise
aten.{special_i0,special_i0e,special_i1,special_i1e,special_ndtr,special_log_ndtr}.default  pointwise
aten.{lgamma,digamma,special_gammaln,special_digamma,special_psi,special_entr}.default  pointwise positive
aten.special_ndtri.default                                  pointwise probability
aten.{logit,special_logit}.default                          pointwise probability
aten.{polygamma,special_polygamma}.default                  pointwise positive; try n=1
aten.{mvlgamma,special_multigammaln}.default                pointwise above_one; try p=2

# activations
aten.{relu,relu6,selu,silu,mish,sigmoid,special_expit,log_sigmoid}.default  pointwise
aten.{elu,celu,gelu,hardsigmoid,hardswish,hardtanh,hardshrink,softshrink}.default  pointwise
aten.{softplus,leaky_relu}.default                          pointwise
aten.threshold.default                                      pointwise; try threshold=0.1 value=0.3
aten.glu.default                                            glu
aten.prelu.default                                          prelu

# bounds
aten.{clamp,clip}.default                                   pointwise; try min=-0.5 max=0.5
aten.{clamp_min,clamp_max}.default                          pointwise
aten.{clamp,clip}.Tensor                                    pointwise
aten.{clamp_min,clamp_max}.Tensor                           pointwise

# comparisons and logic
aten.{eq,ne,lt,le,gt,ge,not_equal,less,less_equal,greater,greater_equal}.Tensor  pointwise int
aten.{eq,ne,lt,le,gt,ge,not_equal,less,less_equal,greater,greater_equal}.Scalar  pointwise int; try other=2
aten.isclose.default                                        pointwise
aten.{logical_and,logical_or,logical_xor,logical_not}.default  pointwise
aten.{__and__,__or__,__xor__,bitwise_and,bitwise_or,bitwise_xor}.Tensor  pointwise int
aten.{__and__,__or__,__xor__,bitwise_and,bitwise_or,bitwise_xor}.Scalar  pointwise int; try other=3
aten.{bitwise_and,bitwise_or,bitwise_xor}.Scalar_Tensor     pointwise int; try self=3
aten.bitwise_not.default                                    pointwise bool
aten.{__lshift__,__rshift__,bitwise_left_shift,bitwise_right_shift}.Tensor  pointwise count
aten.{__lshift__.Scalar,__rshift__.Scalar}                  pointwise count; try other=2
aten.{bitwise_left_shift,bitwise_right_shift}.Tensor_Scalar  pointwise count; try other=2
aten.{bitwise_left_shift,bitwise_right_shift}.Scalar_Tensor  pointwise count; try self=2
aten.isin.{Tensor_Tensor,Scalar_Tensor}                     isin
aten.isin.Tensor_Scalar                                     pointwise int; try test_element=2

# choices
aten.where.self                                             pointwise bool normal normal; linear 1+2
aten.where.ScalarOther                                      linear_when other 0 0.7 1 bool normal
aten.where.ScalarSelf                                       linear_when self 0 0.7 1 bool normal
aten.where.Scalar                                           pointwise bool
aten.masked_fill.Scalar                                     linear_when value 0 0.7 0 normal bool
aten.masked_fill.Tensor                                     filled; linear 0+2

# copies and casts
aten.{clone,alias,detach,contiguous,lift_fresh,lift_fresh_copy,alias_copy}.default  pointwise; linear 0
aten.{resolve_conj,resolve_neg,_neg_view,_lazy_clone,lift}.default  pointwise; linear 0
aten._to_copy.default                                       cast; linear 0
aten.to.{dtype,device}                                      cast; linear 0
aten.to.other                                               cast_like
aten.type_as.default                                        cast_like
aten.fill.Scalar                                            linear_when value 0 0.7 0
aten.fill.Tensor                                            filled; linear 1 0+1
aten.zero.default                                           pointwise; linear 0

# tensors of the same dims
aten.zeros_like.default                                     pointwise; linear 0
aten.ones_like.default                                      pointwise
aten.full_like.default                                      linear_when fill_value 0 0.7 0
aten.empty_like.default                                     pointwise

# complex numbers
aten.{conj,conj_physical,_conj,_conj_physical,real}.default  pointwise complex; linear 0
aten.imag.default                                           pointwise complex; linear 0
aten.angle.default                                          pointwise complex
aten.complex.default                                        pointwise; linear 0+1
aten.polar.default                                          pointwise   # its gradient is not linear
aten.view_as_{real,real_copy}.default                       ... -> ... parts!; linear 0; try complex
aten.view_as_complex.default                                pairs; linear 0
"""
