"""What has been decided about a graph: the layout of every tensor, the choice of every op."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.sharding.choices import Choice
from autopar.sharding.layout.gather_policy import Holding, Recompute
from autopar.sharding.sharding import Layout

__all__ = ["Decisions", "OpDecision"]


@dataclass(frozen=True)
class OpDecision:
    """How one op runs: its choice, the layouts it takes, those it gives, and those its results are brought into."""

    choice: Choice
    operands: tuple[Layout | None, ...]
    produced: tuple[Layout | None, ...]
    results: tuple[Layout | None, ...]


@dataclass(frozen=True)
class Decisions:
    """A layout without holes: where every tensor is, and how every op runs."""

    axes: Mapping[str, int]
    stored: Mapping[str, Layout]
    """Inputs, parameters and buffers as they are held."""
    ops: Mapping[str, OpDecision]
    """By the name of the op."""
    values: Mapping[str, Layout]
    """Every value as its consumers find it."""
    holdings: Mapping[str, Holding] = field(default_factory=dict)
    """How parameters are held between uses."""
    recompute: Mapping[str, Recompute] = field(default_factory=dict)
    """What repeated layers compute again in the backward, by their module paths; nothing where it is not said."""
