"""The rate at which a device multiplies numbers of a dtype, and what stands in where its file has none.

A rate that is missing is taken from the dtype nearest in width: of a wider one as it is, as narrow numbers are no
slower; of a narrower one half for each doubling of the width. Integers and truths count as float32: matrix units are
for floats. A product of complex numbers is four of real ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from autopar.cost.hardware.cluster import Device
from autopar.errors import ClusterError
from autopar.ir.analysis.contractions import ATTENTION, RECURRENT, contractions
from autopar.ir.graph import NamedGraph

__all__ = ["Rate", "peak_of", "rate_notes", "rate_of"]

COMPLEX = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
FLOATS = {"float64": 8.0, "float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float8": 1.0, "float4": 0.5}
"""Floats that files give rates of, and their bytes; each kind of `float8` has the rate of all."""


@dataclass(frozen=True)
class Rate:
    """Products and sums per second, and the dtype whose rate it is made of."""

    flops_per_second: float
    dtype: str
    taken_from: str
    """The same dtype, where the device has a rate for it."""

    @property
    def is_known(self) -> bool:
        return self.dtype == self.taken_from

    def __str__(self) -> str:
        return f"{self.dtype} at {self.flops_per_second / 1e12:.4g} TFLOP/s, from the rate of {self.taken_from}"


def rate_of(device: Device, dtype: torch.dtype) -> Rate:
    """The rate of a dtype on a device: its own, or one made of the nearest."""
    if dtype in COMPLEX:
        real = rate_of(device, COMPLEX[dtype])
        return Rate(real.flops_per_second / 4, real.dtype, real.taken_from)
    name = _name(dtype)
    if name in device.peak_flops:
        return Rate(device.peak_flops[name], name, name)
    known = [other for other in FLOATS if other in device.peak_flops]
    if not known:
        raise ClusterError(
            f"device '{device.name}' has no rate for {name}, which the model computes in, and none of a float\n"
            f"fix: add {name} or float32 under [peak] of the device; it has {', '.join(device.peak_flops) or 'none'}"
        )
    width = FLOATS.get(name, FLOATS["float32"])
    wider = [other for other in known if FLOATS[other] >= width]
    nearest = min(wider, key=FLOATS.__getitem__) if wider else max(known, key=FLOATS.__getitem__)
    share = min(1.0, FLOATS[nearest] / width)
    return Rate(device.peak_flops[nearest] * share, name, nearest)


def peak_of(device: Device, dtype: torch.dtype) -> float:
    """Products and sums of numbers of a dtype per second."""
    return rate_of(device, dtype).flops_per_second


def rate_notes(graph: NamedGraph, device: Device) -> tuple[str, ...]:
    """The rates that products of a graph are priced at and that the device's file does not have."""
    rates = (rate_of(device, dtype) for dtype in _multiplied_dtypes(graph))
    return tuple(dict.fromkeys(str(rate) for rate in rates if not rate.is_known))


def _multiplied_dtypes(graph: NamedGraph) -> Iterable[torch.dtype]:
    for node in graph.nodes:
        if node.op == ATTENTION or node.op in RECURRENT or contractions(node):
            names = [name for name in node.operands if name is not None]
            yield graph.tensors[names[0]].dtype


def _name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return next((short for short in ("float8", "float4") if name.startswith(short)), name)
