"""All mesh shapes of a number of devices that may train a model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from autopar.ir.graph import NamedGraph
from autopar.ir.precision import Precision
from autopar.solver.mesh_shape import Shape, Split, divisors, stored_bytes
from autopar.solver.short_plans import BATCH

__all__ = ["ShapeSpace"]

# More ranks than this do not split one layer: groups of a few nodes are the largest in use.
MOST_MODEL_RANKS = 64
# No shape has fewer stages than this share of those whose parameters and gradients take half of the memory: what
# ZeRO-3 would send in each micro-batch takes longer than the stages wait.
FEWEST_STAGES = 4
# Rows of one micro-batch on a rank are this number or fewer, but for the whole batch.
MOST_ROWS = 8


@dataclass(frozen=True, eq=False)
class ShapeSpace:
    """Shapes of a graph on some devices with `limit` bytes each; `most_stages` is the number of its segments."""

    graph: NamedGraph
    precision: Precision
    devices: int
    limit: float
    most_stages: int

    def __iter__(self) -> Iterator[Shape]:
        batch = self.graph.dims[BATCH].size
        for stages in divisors(self.devices):
            ranks = self.devices // stages
            models = [model for model in divisors(ranks) if model <= MOST_MODEL_RANKS]
            splits = [Split(model, 1, context) for context in self._contexts for model in models]
            # Ranks that split the experts leave no layer that is too large for one rank.
            splits += [Split(1, expert) for expert in divisors(self._groups)[1:]]
            for split in splits:
                if ranks % prod(split):
                    continue
                model, expert, context = split
                data = ranks // prod(split)
                least = self.stages_for(split) // FEWEST_STAGES
                if not least <= stages <= self.most_stages or batch % (data * expert):
                    continue
                of_rank = batch // (data * expert)
                for rows in divisors(of_rank):
                    count = of_rank // rows
                    if ((rows <= MOST_ROWS and rows & (rows - 1) == 0) or count == 1) and (stages == 1 or count > 1):
                        yield Shape(stages, data, model, count, rows, expert, context)

    def stages_for(self, split: Split) -> int:
        """Return the least number of stages whose parameters and gradients take half of the memory."""
        whole, of_experts = self._stored_bytes
        least = (whole + of_experts / split.expert) / split.model / (self.limit / 2)
        ranks = self.devices // prod(split)
        return next((one for one in divisors(ranks) if one >= least), ranks)

    @cached_property
    def _stored_bytes(self) -> tuple[float, float]:
        return stored_bytes(self.graph, self.precision)

    @cached_property
    def _groups(self) -> int:
        """Return the number of experts that ranks may split; 1 for a model without."""
        return math.gcd(*(node.routed for node in self.graph.nodes if node.routed)) or 1

    @cached_property
    def _contexts(self) -> Sequence[int]:
        """Return numbers of ranks that split a sequence: a folded one, whose shards have equal work."""
        fold = self.graph.fold
        if fold is None:
            return (1,)
        positions = self.graph.dims[fold.dim].size
        return [one for one in divisors(math.gcd(positions, self.devices)) if one <= MOST_MODEL_RANKS]
