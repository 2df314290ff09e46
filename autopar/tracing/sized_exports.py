"""Exports of one model at many sizes: the first by a trace, later ones from a capture with symbolic sizes.

A second size makes the dims that differ symbolic, as `torch.compile` does. The capture is accepted if it gives exactly
the graph of a trace at another size. Sizes that its guards exclude are traced, and so is a model that has no capture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from autopar.ir.call_arguments import bind, flatten_arguments, signature_of
from autopar.ir.exported import Exported
from autopar.ir.pytree import Flattened
from autopar.tracing.export.export import export
from autopar.tracing.export.symbolic import NotSymbolicError, SymbolicExport, export_symbolic, same_export

__all__ = ["SizedExports"]

Sizes = tuple[tuple[int, ...], ...]

# Captures that were refused, after which a model is traced at each size.
MOST_REFUSED = 2
# Captures of one model, one for each side of its branches on sizes.
MOST_CAPTURES = 8


@dataclass
class SizedExports:
    """Exports of one model for calls that differ in the sizes of their tensors alone.

    `dynamic`: as in `torch.compile`. None captures symbolic sizes at the second size, True at the first, False never.
    """

    dynamic: bool | None = None
    captures: list[SymbolicExport] = field(default_factory=list)
    # Reason of each capture that was refused.
    refused: list[str] = field(default_factory=list)
    # Number of exports by a whole trace.
    traces: int = 0
    # Traced sizes that no capture serves yet, with their exports; the last few.
    _traced: dict[Sizes, Exported] = field(default_factory=dict)
    # First sizes of each pattern of dims of size 0 and 1, and the dims that differed from them: input and dim.
    _first: dict[Sizes, Sizes] = field(default_factory=dict)
    _varying: set[tuple[int, int]] = field(default_factory=set)

    def export(self, model: nn.Module, inputs: tuple[Any, ...] | Mapping[str, Any]) -> Exported:
        """Return the export of a call, as `export` does."""
        owner = type(model).__name__
        flat = flatten_arguments(bind(signature_of(model), owner, inputs), owner)
        serving = self.serving(flat)
        if serving is not None:
            return serving.at(model, flat)
        sizes: Sizes = tuple(tuple(tensor.shape) for tensor in flat.tensors)
        if not self._may_capture(flat):
            return self._trace(model, inputs)
        if sizes in self._traced:
            return self._traced[sizes]
        self._varying |= _differences(sizes, self._first.setdefault(_pattern(sizes), sizes))
        if self.dynamic and not self._traced:
            self._varying |= {(number, dim) for number, shape in enumerate(sizes) for dim in range(len(shape))}
            self._traced[sizes] = self._trace(model, inputs)
        found = self._capture(model, inputs, flat, sizes)
        if found is None:
            if sizes not in self._traced:
                self._traced[sizes] = self._trace(model, inputs)
            found = self._traced[sizes]
            while len(self._traced) > MOST_CAPTURES:
                del self._traced[next(iter(self._traced))]
        return found

    def serving(self, flat: Flattened) -> SymbolicExport | None:
        """Return the capture that serves a call with these inputs, if there is one."""
        return next((made for made in self.captures if made.serves(flat)), None)

    def _trace(self, model: nn.Module, inputs: tuple[Any, ...] | Mapping[str, Any]) -> Exported:
        self.traces += 1
        return export(model, inputs)

    def _may_capture(self, flat: Flattened) -> bool:
        if self.dynamic is False or len(self.refused) >= MOST_REFUSED or len(self.captures) >= MOST_CAPTURES:
            return False
        return all(tensor.layout is torch.strided for tensor in flat.tensors)

    def _capture(
        self, model: nn.Module, inputs: tuple[Any, ...] | Mapping[str, Any], flat: Flattened, sizes: Sizes
    ) -> Exported | None:
        """Capture the model around these sizes, check it at those of a trace; return the export at these."""
        near = next((other for other in reversed(self._traced) if _pattern(sizes) == _pattern(other)), None)
        if near is None:
            return None
        varying = [
            {dim for dim, size in enumerate(shape) if (number, dim) in self._varying and size > 1}
            for number, shape in enumerate(sizes)
        ]
        try:
            made = export_symbolic(model, inputs, varying)
            return self._checked(made, model, inputs, flat, near)
        except NotSymbolicError as error:
            self.refused.append(str(error))
            return None

    def _checked(
        self,
        made: SymbolicExport,
        model: nn.Module,
        inputs: tuple[Any, ...] | Mapping[str, Any],
        flat: Flattened,
        near: Sizes,
    ) -> Exported:
        """Accept a capture that gives the graph of a trace; return its export at the sizes of `flat`."""
        pairs = zip(flat.tensors, near, strict=True)
        other = replace(flat, tensors=tuple(torch.empty(size, dtype=x.dtype, device="meta") for x, size in pairs))
        found = made.at(model, flat)
        if made.serves(other):
            agrees = same_export(made.at(model, other), self._traced[near])
        else:
            # The traced size is on the other side of a branch.
            agrees = same_export(found, self._trace(model, inputs))
        if not agrees:
            raise NotSymbolicError("the graph differs from that of a trace")
        self.captures.append(made)
        self._traced.pop(near, None)
        return found


def _pattern(sizes: Sizes) -> Sizes:
    """Return which dims have size 0 or 1: these are never symbolic."""
    return tuple(tuple(min(size, 2) for size in shape) for shape in sizes)


def _differences(sizes: Sizes, others: Sizes) -> set[tuple[int, int]]:
    """Return the dims in which two calls differ: number of the input, and dim."""
    return {
        (number, dim)
        for number, shapes in enumerate(zip(sizes, others, strict=True))
        for dim, (size, other) in enumerate(zip(*shapes, strict=True))
        if size != other
    }
