"""Shape of a mesh: its stages, the ranks that split batch, experts, sequence and model, and its micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from autopar.solver.segments import STAGES
from autopar.solver.short_plans import CONTEXT, DATA, EXPERT, MODEL

__all__ = ["Shape", "Split"]


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
