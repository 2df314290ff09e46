"""Assignments: everything that a plan decides about one graph on one mesh, and nothing that follows from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.mesh import SubMesh
from autopar.sharding.choices import Choice
from autopar.sharding.layout.parameter_storage import GatherPolicy
from autopar.sharding.layout.syntax import MicroBatches, PartPin, Recompute
from autopar.sharding.options import TrainingOptions
from autopar.sharding.replicas import Drift
from autopar.sharding.schedules import Schedule
from autopar.sharding.sharding import Sharding


@dataclass(frozen=True)
class OpAssignment:
    """Choice of one op, the shardings that it takes and produces, and those that its results are resharded to."""

    choice: Choice
    operands: tuple[Sharding | None, ...]
    produced: tuple[Sharding | None, ...]
    results: tuple[Sharding | None, ...]


@dataclass(frozen=True)
class Pipelining:
    """Pipeline over the ranks of one axis: its schedule, and what each stage runs and stores."""

    axis: str
    # All axes, those of the stages too.
    mesh: SubMesh
    schedule: Schedule
    # Parts of each stage; part p runs on stage p modulo `stages`.
    chunks: int
    # Micro-batches in flight beyond those of the schedule.
    more: int
    # By op of the micro-batches that follows from parameters.
    parts: Mapping[str, int]
    # By parameter; None if all stages store it.
    held: Mapping[str, int | None]
    # Statements about ops that stand elsewhere than the cuts say.
    pinned: tuple[PartPin, ...] = ()

    @property
    def stages(self) -> int:
        return self.mesh[self.axis]


@dataclass(frozen=True)
class Assignment:
    """Shardings of all tensors and choices of all ops of a graph, with the recomputation of its layers."""

    axes: SubMesh
    # Inputs, parameters and buffers between steps.
    stored: Mapping[str, Sharding]
    ops: Mapping[str, OpAssignment]
    # Tensors as consumers find them: parameters gathered, results after their reshard.
    values: Mapping[str, Sharding]
    gather_policies: Mapping[str, GatherPolicy] = field(default_factory=dict)
    # By the module path of a layer; layers that recompute nothing are left out.
    recompute: Mapping[str, Recompute] = field(default_factory=dict)
    pipelining: Pipelining | None = None
    # Each micro-batch runs as two halves side by side, which are parts along the axis of time.
    halves: bool = False


@dataclass(frozen=True)
class StepPlan:
    """Assignment of a graph, with the options of the step that runs it."""

    graph: str  # a fingerprint: a plan is never run on another graph
    # Along the axes of the mesh alone, but for those of stages.
    assignment: Assignment
    options: TrainingOptions = field(default_factory=TrainingOptions)
    # Micro-batches within a call; those of the options are calls.
    micro: MicroBatches | None = None
    # Replicas of this plan that drift; all else is that of one of them.
    drift: Drift | None = None

    @property
    def axes(self) -> SubMesh:
        return self.assignment.axes

    @property
    def mesh(self) -> SubMesh:
        """All axes, those of stages too."""
        pipelining = self.assignment.pipelining
        return self.axes if pipelining is None else pipelining.mesh

    @property
    def recompute(self) -> Mapping[str, Recompute]:
        return self.assignment.recompute

    # Cached, because the cost model looks parameters up in these sets at every step of a simulation.
    @cached_property
    def keep_gathered(self) -> frozenset[str]:
        """Parameters that are gathered once per optimizer step, not in every micro-batch."""
        return frozenset(name for name, policy in self.assignment.gather_policies.items() if policy.keep_gathered)

    @cached_property
    def defer_reduction(self) -> frozenset[str]:
        """Parameters whose gradients add up locally and are reduced in the last micro-batch alone."""
        return frozenset(name for name, policy in self.assignment.gather_policies.items() if policy.defer_reduction)

    @cached_property
    def regather(self) -> frozenset[str]:
        """Parameters that the backward gathers again, and whose copies are freed before."""
        return frozenset(name for name, policy in self.assignment.gather_policies.items() if policy.regather)

    def keeps_between(self, name: str) -> bool:
        """Return whether all micro-batches read one copy of a parameter, or the parameter itself."""
        own = self.assignment
        return name in self.keep_gathered or own.values[name].splits == own.stored[name].splits

    def with_regather(self, names: Collection[str]) -> StepPlan:
        """Return the plan that regathers exactly these parameters."""
        policies = self.assignment.gather_policies.items()
        changed = {name: replace(policy, regather=name in names) for name, policy in policies}
        return replace(self, assignment=replace(self.assignment, gather_policies=changed))

    def with_recompute(self, levels: Mapping[str, Recompute]) -> StepPlan:
        """Return the plan that recomputes exactly these layers, given by their module paths."""
        return replace(self, assignment=replace(self.assignment, recompute=levels))

    def seen(self, coordinate: Mapping[str, int]) -> StepPlan:
        """Return the plan with the shards of the rank at a coordinate; without one, with the longest shards."""
        axes = self.axes.seen(coordinate)
        return self if axes == self.axes else replace(self, assignment=replace(self.assignment, axes=axes))

    def with_options(self, options: TrainingOptions) -> StepPlan:
        """Return a plan of the same assignment with these options."""
        return replace(self, options=options)
