"""Ops that treat every element alone, with broadcasting."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from autopar.rules.binding import fresh_names
from autopar.rules.call import Call, takes_tensors
from autopar.rules.samples import Draw, Sample, Tries, make_sample
from autopar.rules.table import Family

__all__ = ["FAMILIES", "TABLE", "aligned_dims", "broadcast_samples"]


def aligned_dims(shapes: Iterable[tuple[int, ...]], names: list[str], out: tuple[int, ...]) -> list[str]:
    """Dims of operands that broadcast to `out`, whose dims are `names`: `1` where an operand is broadcast."""
    texts = []
    for shape in shapes:
        offset = len(out) - len(shape)
        dims = ["1" if size == 1 != out[offset + i] else names[offset + i] for i, size in enumerate(shape)]
        texts.append(" ".join(dims))
    return texts


def _pointwise(call: Call) -> str:
    out = call.output.shape
    names = fresh_names(len(out), set())
    present = [spec.shape for spec in call.operands if spec is not None]
    texts = iter(aligned_dims(present, names, out))
    operands = ", ".join("?" if spec is None else next(texts) for spec in call.operands)
    return f"{operands} -> {', '.join([' '.join(names)] * len(call.outputs))}"


def broadcast_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    """All operands of one shape, then each operand in turn broadcast along some dims."""
    count = len(takes_tensors(op))
    for shape in ((), (5,), (5, 7), (3, 4, 5)):
        yield make_sample(op, [Draw(shape, tries.kind)] * count, {}, tries)
    for narrow in range(count if count > 1 else 0):
        for shape in ((1, 7), (7,), (5, 1)):
            tensors = [Draw(shape if i == narrow else (5, 7), tries.kind) for i in range(count)]
            yield make_sample(op, tensors, {}, tries)


FAMILIES = {"pointwise": Family(_pointwise, broadcast_samples)}

TABLE = """
aten.{add,sub}.Tensor                               pointwise; linear 0+1
aten.{mul}.Tensor                                   pointwise; linear 0 1
aten.{mul,div}.Scalar                               pointwise; linear 0
aten.div.Tensor                                     pointwise; linear 0
aten.{neg,clone}.default                            pointwise; linear 0
aten.{relu,exp,tanh}.default                        pointwise
aten.{log,rsqrt}.default                            pointwise; try positive
aten.pow.Tensor_Scalar                              pointwise; try exponent=2.0
"""
