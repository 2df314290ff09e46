"""Quantities as cluster files write them: `"600 GB/s"`, `"80 GiB [datasheet]"`; a number, a unit, and a source.

What a quantity measures follows from the name of the field that holds it: `memory_bytes` is in bytes, and the file
calls it `memory`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["COUNT", "Measure", "Quantity", "measure_of", "parse_quantity"]

_DECIMAL = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


@dataclass(frozen=True)
class Measure:
    """What can be measured: the units and their sizes, and which values make sense."""

    what: str
    suffix: str
    units: Mapping[str, float]
    example: str
    zero: bool = False
    most: float = math.inf

    @property
    def bounds(self) -> str:
        return ("0 or more" if self.zero else "more than 0") + ("" if math.isinf(self.most) else " and at most 100 %")


def _with_prefixes(unit: str, prefixes: Mapping[str, float], size: float = 1.0) -> dict[str, float]:
    return {f"{prefix}{unit}": factor * size for prefix, factor in prefixes.items()}


_BYTES = _with_prefixes("B", _DECIMAL) | _with_prefixes("B", _BINARY)
_RATES = {f"{unit}/s": size for unit, size in (_BYTES | _with_prefixes("b", _DECIMAL, 1 / 8)).items()}

COUNT = Measure("a count", "", MappingProxyType({"": 1.0}), '"8 [datasheet]"')
_MEASURES = (
    # The longest suffix first: the first that fits is taken.
    Measure("a bandwidth", "_bytes_per_second", MappingProxyType(_RATES), '"450 GB/s"'),
    Measure("a size", "_bytes", MappingProxyType(_BYTES), '"80 GiB"'),
    Measure("a time", "_seconds", MappingProxyType(_SECONDS), '"2.5 us"', zero=True),
    Measure("a rate of computing", "_flops", MappingProxyType(_with_prefixes("FLOP/s", _DECIMAL)), '"989 TFLOP/s"'),
    Measure("a share", "_fraction", MappingProxyType({"%": 0.01}), '"92 %"', most=1.0),
)


def measure_of(name: str) -> tuple[Measure, str] | None:
    """What a field holds, by its name, and how the file calls it; None when it holds no quantity."""
    for measure in _MEASURES:
        if name.endswith(measure.suffix):
            return measure, name.removesuffix(measure.suffix)
    return None


@dataclass(frozen=True)
class Quantity:
    """A number in base units (bytes, seconds, FLOP/s) and the name of its source."""

    value: float
    source: str | None = None


_FORM = re.compile(
    r"\s*(?P<number>[-+]?[0-9][0-9_]*(\.[0-9]+)?([eE][-+]?[0-9]+)?)\s*(?P<unit>[^\s\[\]]*)\s*(?P<rest>.*)"
)
_SOURCE = re.compile(r"\[\s*(?P<source>[\w.-]+)\s*\]\s*")


def parse_quantity(text: str, measure: Measure) -> Quantity | str:
    """The quantity, or what is wrong with the text."""
    match = _FORM.fullmatch(text)
    if match is None:
        return f"'{text}' is not {measure.what}"
    unit = match["unit"]
    if unit not in measure.units:
        units = ", ".join(unit for unit in measure.units if unit)
        told = f"the units are {units}" if units else "it has no unit"
        return f"'{text}' is not {measure.what}: {told}" if unit or units else f"'{text}' is not {measure.what}"
    source = _SOURCE.fullmatch(match["rest"])
    if match["rest"] and source is None:
        return f"'{text}' is not {measure.what}: after the unit stands only the name of a source, in brackets"
    value = float(match["number"]) * measure.units[unit]
    if not math.isfinite(value) or value < 0 or (value == 0 and not measure.zero) or value > measure.most:
        return f"'{text}' is impossible: {measure.what} is {measure.bounds}"
    return Quantity(value, source["source"] if source else None)
