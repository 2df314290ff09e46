"""Peak FLOP/s of a device for each dtype, with substitutes for dtypes that its file lacks.

A missing rate comes from the dtype nearest in width. The rate of a wider dtype is taken unchanged, since narrow numbers
are no slower; that of a narrower dtype is halved for each doubling of the width. Integers and booleans have the rate of
float32, since matrix units are for floats. A product of complex numbers counts as four real products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autopar.cost.hardware.cluster import Device
from autopar.errors import ClusterError
from autopar.ir.analysis.contractions import ATTENTIONS, RECURRENT, contractions
from autopar.ir.graph import NamedGraph

COMPLEX = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
# Bytes of the floats in device files; all formats of `float8` share one rate.
FLOATS = {"float64": 8.0, "float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float8": 1.0, "float4": 0.5}


@dataclass(frozen=True)
class Rate:
    """FLOP/s of a dtype, and the dtype of the file from which it is derived."""

    flops_per_second: float
    dtype: str
    # Equal to `dtype` where the file of the device has it.
    taken_from: str

    @property
    def is_known(self) -> bool:
        return self.dtype == self.taken_from

    def __str__(self) -> str:
        return f"{self.dtype} at {self.flops_per_second / 1e12:.4g} TFLOP/s, from the rate of {self.taken_from}"


def rate_of(device: Device, dtype: torch.dtype) -> Rate:
    """Return the rate of a dtype on a device: its own, or one derived from the nearest dtype."""
    if dtype in COMPLEX:
        real = rate_of(device, COMPLEX[dtype])
        return Rate(real.flops_per_second / 4, real.dtype, real.taken_from)
    name = str(dtype).removeprefix("torch.")
    name = next((short for short in ("float8", "float4") if name.startswith(short)), name)
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
    """Return the FLOP/s of a dtype on a device."""
    return rate_of(device, dtype).flops_per_second


def rate_notes(graph: NamedGraph, device: Device) -> tuple[str, ...]:
    """Return a note for each substituted rate that prices a product of the graph."""
    multiplying = (node for node in graph.nodes if node.op in (*ATTENTIONS, *RECURRENT) or contractions(node))
    first_operands = (next(name for name in node.operands if name is not None) for node in multiplying)
    rates = (rate_of(device, graph.tensors[name].dtype) for name in first_operands)
    return tuple(dict.fromkeys(str(rate) for rate in rates if not rate.is_known))
