"""A plan as the generated graph runs it: what is converted where, in which buckets, and what is computed again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from autopar.ir.graph import NamedGraph
from autopar.sharding.assignment import StepPlan
from autopar.sharding.buckets import Bucket, buckets_of
from autopar.sharding.options import Recompute
from autopar.sharding.recompute import RecomputeRegion, computed_again, layered, regions_of
from autopar.sharding.reshard_insertion import ReshardPlan, insert_reshards

__all__ = ["LoweredStep"]


@dataclass(frozen=True, eq=False)
class LoweredStep:
    """Each is worked out once, for the time and the memory of the plan alike."""

    graph: NamedGraph
    plan: StepPlan

    @cached_property
    def reshard_plan(self) -> ReshardPlan:
        return insert_reshards(self.graph, self.plan.assignment, self.plan.outputs, self.plan.local_inputs)

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        return buckets_of(self.graph, self.plan, self.reshard_plan)

    @cached_property
    def layers(self) -> Mapping[str, tuple[int, Recompute]]:
        """For each op of a layer that computes something again, the layer and what; layers may have one path."""
        return layered(self._regions)

    @cached_property
    def again(self) -> frozenset[str]:
        """The ops that are computed again in the backward."""
        return computed_again(self.graph, self._regions)

    @cached_property
    def _regions(self) -> tuple[RecomputeRegion, ...]:
        return regions_of(self.graph, self.plan.recompute)
