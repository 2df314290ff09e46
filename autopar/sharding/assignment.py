"""A plan: everything that is decided about one graph on one mesh, and nothing that follows from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from types import MappingProxyType

import torch

from autopar.ir.graph import NamedGraph
from autopar.mesh import SubMesh
from autopar.sharding.choices import Choice
from autopar.sharding.layout.parameter_storage import GatherPolicy
from autopar.sharding.options import Outputs, PlanOptions, Recompute
from autopar.sharding.sharding import Sharding


@dataclass(frozen=True)
class OpAssignment:
    """How one op runs: its choice, the layouts it takes, those it gives, and those its results are brought into."""

    choice: Choice
    operands: tuple[Sharding | None, ...]
    produced: tuple[Sharding | None, ...]
    results: tuple[Sharding | None, ...]


@dataclass(frozen=True)
class Assignment:
    """A layout without holes: where every tensor is, and how every op runs."""

    axes: SubMesh
    stored: Mapping[str, Sharding]
    """Inputs, parameters and buffers as they are held."""
    ops: Mapping[str, OpAssignment]
    """By the name of the op."""
    values: Mapping[str, Sharding]
    """Every value as its consumers find it."""
    gather_policies: Mapping[str, GatherPolicy] = field(default_factory=dict)
    """How parameters are held between uses."""
    recompute: Mapping[str, Recompute] = field(default_factory=dict)
    """What repeated layers compute again in the backward, by their module paths; nothing where it is not said."""


_NONE: Mapping[str, Recompute] = MappingProxyType({})


@dataclass(frozen=True)
class StepPlan:
    """How one graph runs on one mesh; the graph is that of one micro-batch."""

    graph: str
    """The fingerprint of the graph that it is for."""
    assignment: Assignment
    outputs: Outputs = "sharded"
    local_inputs: bool = False
    optimizer: str = "adamw"
    micro_batches: int = 1
    recompute: Mapping[str, Recompute] = field(default_factory=lambda: _NONE)
    """By the module path of a repeated layer."""
    master_dtype: torch.dtype | None = None
    """What the optimizer updates, where that is not the dtype that the graph computes in."""
    gradient_dtype: torch.dtype | None = None
    """What gradients are added up in, where that is not the dtype of what the optimizer updates."""
    compiled: bool = False
    """Whether the module runs under `torch.compile`."""
    links: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """The level of the cluster that an axis was put on by hand: `{"dp": "network"}`."""

    def __post_init__(self) -> None:
        # Decisions are what is written and what is run: they say the same.
        if dict(self.recompute) != dict(self.assignment.recompute):
            object.__setattr__(self, "assignment", replace(self.assignment, recompute=dict(self.recompute)))

    @property
    def axes(self) -> SubMesh:
        return self.assignment.axes

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
        """Parameters whose gathered copies are freed after the forward and gathered again in the backward."""
        return frozenset(name for name, policy in self.assignment.gather_policies.items() if policy.regather)

    def with_regather(self, names: Collection[str]) -> StepPlan:
        """Return the plan that regathers exactly these parameters."""
        policies = self.assignment.gather_policies.items()
        changed = {name: replace(policy, regather=name in names) for name, policy in policies}
        return replace(self, assignment=replace(self.assignment, gather_policies=changed))

    def with_options(self, options: PlanOptions) -> StepPlan:
        """Return a plan of the same decisions with these options."""
        return replace(self, **{each.name: getattr(options, each.name) for each in fields(options)})

    @staticmethod
    def decided(graph: NamedGraph, assignment: Assignment) -> StepPlan:
        """What decisions come to."""
        return StepPlan(graph.fingerprint, assignment, recompute=assignment.recompute)
