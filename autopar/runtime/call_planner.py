"""Who plans the calls of a parallel module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from autopar.errors import AutoparError
from autopar.ir.graph import NamedGraph
from autopar.sharding.assignment import Assignment
from autopar.sharding.level_sums import LevelSum
from autopar.sharding.reshard_insertion import InsertedReshard
from autopar.tracing.trace import Exporter

__all__ = ["FixedInputs", "Planner"]


class Planner(Protocol):
    """Protocol: make the named graph and the assignment of a call."""

    def trace(self, model: nn.Module, inputs: tuple[Any, ...] | Mapping[str, Any], export: Exporter) -> NamedGraph: ...

    def decide(self, graph: NamedGraph) -> Assignment | str:
        """Return an assignment, or text for `read` on all ranks; only the first rank calls this."""
        ...

    def read(self, graph: NamedGraph, text: str) -> tuple[NamedGraph, Assignment]:
        """Return the graph in the order of the plan in a text, and the assignment of the plan."""
        ...

    def check(self, graph: NamedGraph, assignment: Assignment, inserted: tuple[InsertedReshard, ...]) -> None:
        """Raise if the emitted graph breaks the contract of the user's layout."""
        ...

    def whole_shapes(self, graph: NamedGraph) -> Mapping[str, tuple[int, ...]]:
        """Return the global shapes of the inputs of a graph that was traced with the shards of one rank."""
        ...

    def level_sums(self, axes: tuple[str, ...]) -> Iterable[LevelSum]:
        """Return the all-reduces over some axes that run by level, for which buffers."""
        ...

    def facts(self) -> Mapping[str, str]:
        """Return the planner's own inputs as text: all ranks must have the same."""
        ...

    def of_parts(self, graph: NamedGraph) -> Planner:
        """Return the planner of calls of parts of the model, given the graph of a call of the whole model."""
        ...


@dataclass(frozen=True)
class FixedInputs:
    """Planner with one fixed graph and assignment, for calls of the signature that was traced."""

    graph: NamedGraph
    assignment: Assignment

    def trace(self, model: nn.Module, inputs: tuple[Any, ...] | Mapping[str, Any], export: Exporter) -> NamedGraph:
        return self.graph

    def decide(self, graph: NamedGraph) -> Assignment | str:
        return self.assignment

    def read(self, graph: NamedGraph, text: str) -> tuple[NamedGraph, Assignment]:
        raise AssertionError("the assignment is fixed")

    def check(self, graph: NamedGraph, assignment: Assignment, inserted: tuple[InsertedReshard, ...]) -> None:
        """Check nothing: the caller has checked its assignment."""

    def whole_shapes(self, graph: NamedGraph) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(graph.tensors[name].shape) for name in graph.inputs}

    def level_sums(self, axes: tuple[str, ...]) -> Iterable[LevelSum]:
        return ()

    def facts(self) -> Mapping[str, str]:
        return {}

    def of_parts(self, graph: NamedGraph) -> Planner:
        raise AutoparError(
            "this module runs one traced graph: a part of it cannot be called\n"
            "fix: autopar.parallelize(model, mesh, inputs, layout=...), which traces calls of parts"
        )
