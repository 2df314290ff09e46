"""A plan: everything that is decided about one graph on one mesh, and nothing that follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch

from autopar.ir.graph import NamedGraph
from autopar.sharding.decisions import Decisions
from autopar.sharding.layout.gather_policy import Recompute
from autopar.sharding.layout.language import Layout
from autopar.sharding.propagation import Known, complete
from autopar.sharding.reshard_insertion import Outputs

__all__ = ["Plan", "Recompute"]

_NONE: Mapping[str, Recompute] = MappingProxyType({})


@dataclass(frozen=True)
class Plan:
    """How one graph runs on one mesh; the graph is that of one micro-batch."""

    graph: str
    """The fingerprint of the graph that it is for."""
    decisions: Decisions
    outputs: Outputs = "sharded"
    local_inputs: bool = False
    optimizer: str = "adamw"
    micro_batches: int = 1
    recompute: Mapping[str, Recompute] = field(default_factory=lambda: _NONE)
    """By the module path of a repeated layer."""
    regather: frozenset[str] = frozenset()
    """Parameters whose gathered copies are let go of after the forward and gathered again in the backward."""
    resident: frozenset[str] = frozenset()
    """Parameters whose gathered copies live until the optimizer steps: gathered once, not in every micro-batch."""
    accumulated: frozenset[str] = frozenset()
    """Parameters whose gradients add up locally and are reduced in the last micro-batch alone."""
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
        if dict(self.recompute) != dict(self.decisions.recompute):
            object.__setattr__(self, "decisions", replace(self.decisions, recompute=dict(self.recompute)))

    @property
    def axes(self) -> Mapping[str, int]:
        return self.decisions.axes

    @staticmethod
    def of(graph: NamedGraph, layout: Layout, axes: Mapping[str, int], known: Known | None = None) -> Plan:
        """What a layout without holes comes to; `dataclasses.replace` sets the rest."""
        return Plan.decided(graph, complete(graph, layout, axes, known))

    @staticmethod
    def decided(graph: NamedGraph, decisions: Decisions) -> Plan:
        """What decisions come to."""
        holdings = decisions.holdings
        return Plan(
            graph.fingerprint,
            decisions,
            regather=frozenset(name for name, holding in holdings.items() if holding.again),
            resident=frozenset(name for name, holding in holdings.items() if holding.lasting),
            accumulated=frozenset(name for name, holding in holdings.items() if holding.deferred),
            recompute=decisions.recompute,
        )
