"""Ops that make tensors from sizes and numbers: their dims are born, so a shard makes its own part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from autopar.rules.call import Call, takes_tensors
from autopar.rules.ops._names import Names, text
from autopar.rules.proof.samples import Draw, Sample, Tries, make_sample
from autopar.rules.table import OpFamily

__all__ = ["FAMILIES", "TABLE"]


def _filled(call: Call) -> str:
    """Of a tensor that lends its dtype and device nothing is read: all its shards give the same."""
    names = Names()
    lent = [[names.one() for _ in spec.shape] for spec in call.operands if spec is not None]
    read = " ".join(name for dims in lent for name in dims)
    return text(lent, [names.some(call.output.rank)], f"max {read}" if read else "")


def _filled_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    lent = [Draw((4, 3))] if takes_tensors(op) else []
    for size in ([5, 3], [4], []):
        for dtype in (torch.float64, torch.int64, torch.bool):
            yield make_sample(op, lent, {"size": size, "dtype": dtype, "fill_value": 1, **_layout(op, size)}, tries)


def _layout(op: torch._ops.OpOverload, size: list[int]) -> dict[str, Any]:
    return {"physical_layout": list(range(len(size)))} if "permuted" in op._schema.name else {}


def _arange(call: Call) -> str:
    return "-> n; lower n arange_part"


RANGES = ((0, 7, 1), (2, 13, 1), (3, 20, 4), (5, -8, -2), (0.5, 3.0, 0.3), (1, 2, 0.1), (0.0, 6.0, 1.0))


def _arange_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    names = {argument.name for argument in op._schema.arguments}
    for start, end, step in RANGES:
        given = {"start": start, "end": end, "step": step}
        if all(given[name] == value for name, value in (("start", 0), ("step", 1)) if name not in names):
            arguments = {name: value for name, value in given.items() if name in names}
            fractions = any(isinstance(value, float) for value in arguments.values())
            for dtype in (torch.float64, *((torch.int64, None) if start == int(start) and step == int(step) else ())):
                if dtype is not None or not fractions:
                    yield make_sample(op, [], {**arguments, "dtype": dtype})


def _triangle(call: Call) -> str:
    names = Names().some(call.operand(0).rank)
    return text([names], [names])


def _triangle_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    for shape, diagonal in (((5, 7), 0), ((5, 4), -2), ((3, 4, 5), 1), ((1, 5), 2)):
        yield make_sample(op, [Draw(shape)], {"diagonal": diagonal})


FAMILIES = {
    "factory": OpFamily(_filled, _filled_samples),
    "arange": OpFamily(_arange, _arange_samples),
    "triangle": OpFamily(_triangle, _triangle_samples),
}

TABLE = """
aten.{zeros,ones,full}.default                       factory; localise size
aten.{empty.memory_format,empty_permuted.default}    factory; localise size
aten.{new_zeros,new_empty}.default                   factory; localise size; linear 0
aten.{new_ones,new_full}.default                     factory; localise size
aten.arange.{default,start,start_step}               arange
aten.scalar_tensor.default                           ->
aten.linspace.default                                -> n; lower n own_part; try steps=7
aten.eye.default                                     -> n m; lower n own_part; lower m own_part; try n=5
aten.eye.m                                           -> n m; lower n own_part; lower m own_part; try n=5 m=4
aten.{tril,triu}.default                             triangle; linear 0; localise diagonal
aten.{tril_indices,triu_indices}.default             -> c n; lower c own_part; lower n own_part; try row=4 col=5
aten.logspace.default                                -> n; lower n own_part; try start=0 end=1 steps=7
aten.{hann_window,hamming_window,blackman_window,bartlett_window}.default  -> n; lower n own_part; try window_length=7
aten.{hann_window,hamming_window,blackman_window,bartlett_window}.periodic  -> n; lower n own_part; try window_length=7
aten.{fft_fftfreq,fft_rfftfreq}.default              -> n; lower n own_part; try n=7
"""
