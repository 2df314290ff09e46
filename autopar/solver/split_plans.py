"""Plans of a short graph for each split of a model: those that were searched, and those lent to other splits.

Shapes whose ranks split the model alike, on as many rows at a time, share the plans: only what is stored and what is
sent once a step differs. On other numbers of ranks for the experts the best plans are hardly others, so the plans of
the first such number are lent to the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod

from autopar.cost.hardware.cluster import Cluster
from autopar.ir.short_graph import ShortGraph
from autopar.mesh import SubMesh
from autopar.sharding.assignment import StepPlan
from autopar.sharding.layout.syntax import MicroBatches
from autopar.sharding.options import TrainingOptions
from autopar.solver.mesh_shape import Shape, Split, divisors
from autopar.solver.shape_space import ShapeSpace
from autopar.solver.short_plans import BATCH, DATA, short_plans

__all__ = ["SplitPlans"]


@dataclass
class SplitPlans:
    """Plans of a short graph by model, expert and sequence ranks, at several prices of memory."""

    short: ShortGraph
    cluster: Cluster
    options: TrainingOptions
    space: ShapeSpace
    found: dict[Split, tuple[StepPlan, ...]] = field(default_factory=dict)
    # Splits whose plans were found for another number of ranks for the experts.
    lent: set[Split] = field(default_factory=set)

    def of(self, shape: Shape) -> tuple[StepPlan, ...]:
        """Return the plans of a shape's split; the first shape decides on which ranks they are searched."""
        split = shape.split
        if split not in self.found:
            lent = self._lent(shape)
            if lent:
                self.lent.add(split)
            self.found[split] = lent or self._searched(shape)
        return self.found[split]

    def search_again(self, shape: Shape) -> None:
        """Search plans of a split that has lent ones."""
        self.lent.discard(shape.split)
        self.found[shape.split] = self._searched(shape)

    def for_halves(self, shape: Shape) -> tuple[StepPlan, ...]:
        """Return plans that were made for a shape in halves, on its own axes."""
        assert shape.micro is not None, "halves are those of micro-batches"
        return self._plans(shape, shape.micro)

    def _lent(self, shape: Shape) -> tuple[StepPlan, ...]:
        """Return the plans of another number of ranks for the experts; none where they leave parameters whole."""
        if shape.expert == 1:
            return ()
        for split, plans in self.found.items():
            if split.expert > 1 and plans and (plans[0].axes.get(DATA, 1) > 1 or shape.data == 1):
                return plans
        return ()

    def _searched(self, shape: Shape) -> tuple[StepPlan, ...]:
        batch = self.short.graph.dims[BATCH].size
        # As many stages as memory asks for, and at least two micro-batches of one row for each rank.
        stages, expert = self.space.stages_for(shape.split), shape.expert
        ranks = max(1, self.space.devices // prod(shape.split) // stages)
        data = max(
            (each for each in divisors(ranks) if batch // expert % each == 0 and batch // expert // each > 1),
            default=1,
        )
        return self._plans(replace(shape, data=data), MicroBatches(batch // (data * expert), BATCH))

    def _plans(self, shape: Shape, micro: MicroBatches) -> tuple[StepPlan, ...]:
        """Return plans on the axes of a shape, with the micro-batches in flight that memory asks for."""
        in_flight = min(self.space.stages_for(shape.split), micro.count)
        return tuple(short_plans(self.short, self.cluster, self.options, micro, SubMesh(shape.axes), in_flight))
