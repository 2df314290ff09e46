"""Shape of a mesh: its stages, the ranks that split batch, experts, sequence and model, and its micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from autopar.ir.graph import NamedGraph
from autopar.ir.precision import Precision
from autopar.sharding.layout.syntax import MicroBatches
from autopar.solver.segments import STAGES
from autopar.solver.short_plans import BATCH, CONTEXT, DATA, EXPERT, MODEL

__all__ = ["Shape", "Split", "divisors", "stored_bytes"]


class Split(NamedTuple):
    """Ranks that split the model, the experts and the sequence: shapes of one split share plans."""

    model: int
    expert: int = 1
    context: int = 1


@dataclass(frozen=True)
class Shape:
    """Mesh and micro-batches of a step."""

    stages: int
    data: int
    model: int
    count: int
    # Rows of a micro-batch on a rank.
    rows: int
    # Ranks that split batch and experts.
    expert: int = 1
    # Ranks that split the sequence.
    context: int = 1
    # Each micro-batch runs as two halves side by side.
    halves: bool = False

    @property
    def axes(self) -> dict[str, int]:
        """Axes of each stage."""
        others = {EXPERT: self.expert, CONTEXT: self.context}
        return {DATA: self.data, **{axis: size for axis, size in others.items() if size > 1}, MODEL: self.model}

    @property
    def split(self) -> Split:
        return Split(self.model, self.expert, self.context)

    @property
    def mesh(self) -> dict[str, int]:
        return {STAGES: self.stages, **self.axes} if self.stages > 1 else self.axes

    @property
    def micro(self) -> MicroBatches | None:
        return MicroBatches(self.count, BATCH, self.halves) if self.count > 1 or self.halves else None

    def in_halves(self) -> Iterator[Shape]:
        """Yield the same mesh with micro-batches in halves: as many of them, and half as many of twice the rows."""
        if self.rows % 2 == 0:
            yield replace(self, halves=True)
        if self.count % 2 == 0 and (self.stages == 1 or self.count > 2):
            yield replace(self, count=self.count // 2, rows=2 * self.rows, halves=True)


def divisors(number: int) -> Sequence[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def stored_bytes(graph: NamedGraph, precision: Precision) -> tuple[float, float]:
    """Return the bytes of parameters and gradients, those of experts apart."""
    found, routed, made = [0.0, 0.0], set[str](), dict[str, str]()
    for node in graph.nodes:
        operands = [made.get(name, name) for name in node.operands if name is not None]
        if node.routed:
            routed.update(operands)
        elif len(set(operands)) == 1:  # a parameter in another form
            made.update((name, operands[0]) for name in node.outputs if name is not None)
    for one in graph.parameters:
        each = one.dtype.itemsize * one.requires_grad + precision.stored(one.dtype, one.frozen).itemsize
        found[one.name in routed] += prod(one.shape) * each
    return found[0], found[1]
