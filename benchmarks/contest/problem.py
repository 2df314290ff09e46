"""The abstract problem: choose one strategy per node, at the least cost, within limits on usage.

Sets
    nodes 0 .. n-1; each has strategies 0 .. |costs[i]|-1
    edges: pairs of different nodes
    limits 0 .. m-1: in a problem over time, one per point in time

Variables
    x[i], the strategy of node i

Objective: minimise
    Σ_i costs[i][x[i]]  +  Σ_(i,j) costs_ij[x[i], x[j]]
    a cost of +inf means impossible

Constraints: for every limit k
    Σ of usage.amounts[x[usage.node]] over the usages with start <= k < end  <=  limits[k]

A usage covers a half-open range of limits, and a node may have several of them, so the same words state memory over
time, memory per device, or both. Amounts and limits are whole numbers; costs are floats, exact for whole numbers up to
2^53.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.errors import AutoparError
from autopar.solver import Floats, Ints

__all__ = ["Edge", "Problem", "ProblemError", "Usage", "cost_of", "excess_of", "loads_of"]


class ProblemError(AutoparError):
    """An instance is not one of the format, or its numbers are out of range; names the file and the place."""


@dataclass(frozen=True, eq=False)
class Edge:
    """A cost per pair of strategies of two nodes; rows belong to `first`, columns to `second`."""

    first: int
    second: int
    costs: Floats


@dataclass(frozen=True, eq=False)
class Usage:
    """Usage of each strategy of a node on the limits `start` .. `end`-1."""

    node: int
    start: int
    end: int
    amounts: Ints


@dataclass(frozen=True, eq=False)
class Problem:
    """The problem of the module's docstring; checked when it is made."""

    costs: tuple[Floats, ...]
    edges: tuple[Edge, ...] = ()
    usages: tuple[Usage, ...] = ()
    limits: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    name: str = ""

    def __post_init__(self) -> None:
        sizes = [len(costs) for costs in self.costs]
        for node, costs in enumerate(self.costs):
            if costs.ndim != 1 or not sizes[node]:
                raise ProblemError(f"node {node} has no strategy; each node needs at least one")
        for position, edge in enumerate(self.edges):
            _check_edge(position, edge, sizes)
        for usage in self.usages:
            _check_usage(usage, sizes, len(self.limits))

    @property
    def node_count(self) -> int:
        return len(self.costs)

    @property
    def strategy_counts(self) -> list[int]:
        return [len(costs) for costs in self.costs]


def _check_edge(position: int, edge: Edge, sizes: Sequence[int]) -> None:
    for node in (edge.first, edge.second):
        if not 0 <= node < len(sizes):
            raise ProblemError(f"edge {position} names node {node}; there are nodes 0 to {len(sizes) - 1}")
    if edge.first == edge.second:
        raise ProblemError(f"edge {position} joins node {edge.first} to itself; add its diagonal to the node's costs")
    expected = (sizes[edge.first], sizes[edge.second])
    if edge.costs.shape != expected:
        raise ProblemError(
            f"edge {position} has costs of shape {edge.costs.shape}; its nodes have {expected} strategies"
        )


def _check_usage(usage: Usage, sizes: Sequence[int], limits: int) -> None:
    if not 0 <= usage.node < len(sizes):
        raise ProblemError(f"a usage names node {usage.node}; there are nodes 0 to {len(sizes) - 1}")
    if len(usage.amounts) != sizes[usage.node]:
        raise ProblemError(
            f"a usage of node {usage.node} has {len(usage.amounts)} amounts; "
            f"the node has {sizes[usage.node]} strategies"
        )
    if not 0 <= usage.start <= usage.end <= limits:
        raise ProblemError(
            f"a usage of node {usage.node} covers limits {usage.start} to {usage.end}; there are {limits}"
        )


def cost_of(problem: Problem, strategies: Sequence[int]) -> float:
    """Return the objective."""
    _check_strategies(problem, strategies)
    total = sum(float(costs[strategies[node]]) for node, costs in enumerate(problem.costs))
    return total + sum(float(edge.costs[strategies[edge.first], strategies[edge.second]]) for edge in problem.edges)


def loads_of(problem: Problem, strategies: Sequence[int]) -> Ints:
    """Return the usage of every limit."""
    _check_strategies(problem, strategies)
    steps = np.zeros(len(problem.limits) + 1, dtype=np.int64)
    for usage in problem.usages:
        amount = usage.amounts[strategies[usage.node]]
        steps[usage.start] += amount
        steps[usage.end] -= amount
    return np.asarray(np.cumsum(steps[:-1]))


def excess_of(problem: Problem, strategies: Sequence[int]) -> int:
    """Return the excess over the worst violated limit; 0 if all are kept."""
    if not len(problem.limits):
        return 0
    return max(0, int(np.max(loads_of(problem, strategies) - problem.limits)))


def _check_strategies(problem: Problem, strategies: Sequence[int]) -> None:
    if len(strategies) != problem.node_count:
        raise ProblemError(f"{len(strategies)} strategies are given for {problem.node_count} nodes")
    for node, (strategy, count) in enumerate(zip(strategies, problem.strategy_counts, strict=True)):
        if not 0 <= strategy < count:
            raise ProblemError(f"node {node} is given strategy {strategy}; it has {count}")
