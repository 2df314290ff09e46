"""The planner's problem for one graph, one mesh and one cluster.

Sets
    ops, each with options: a choice (which axes split which factors, what passes through the others) and the layouts
        of operands and results that follow from it
    held tensors (inputs, parameters, buffers), each with the layouts in which it may be stored
    repeated layers
    shared values: results that several ops take, that are handed out, or of which the user's layout speaks; each with
        the layouts that its producer gives and that its consumers want. All other values stay as they are produced.

Variables
    o[n], the option of op n
    s[t], how held tensor t is stored
    v[t], the layout in which shared value t is kept, into which it is brought once, forward and backward
    m[l], which ops of repeated layer l are computed again, where memory is short: none, what is cheap, all

Constraints
    the user's layout: what it demands of a tensor or an op leaves only options that agree

Objective: minimise the seconds of `evaluate`, a convex function (`totals`) of sums over
    every op's work and what it sends by itself                                   m[l], o[n]
    every conversion of a result into the layout it is kept in, and of a value    m[l], o[producer], v[t], o[consumer]
        from that into the layout in which an op takes it
    every parameter's gathering and the reduction of its gradient                 s[t], o[consumer]
    the optimizer's work                                                          s[t]

Where two ops want one value in one layout that is not the one it is kept in, `evaluate` converts it once and the sums
here count it twice; buckets of parameters are counted at the rate of a full one. Whatever is found is priced by
`evaluate` in the end, and what is claimed is its price.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np

from autopar.sharding.options import Recompute
from autopar.solver.arrays import Floats, Ints
from autopar.solver.model.cost_tables import CostTable, Parts
from autopar.solver.model.objective import Sum
from autopar.solver.setting import PlanningProblem

__all__ = ["Costs", "EqualTerms", "Factor", "FactorByMode", "Model", "TermGroup", "Variable", "distinct_rows"]


@dataclass(frozen=True, eq=False)
class Variable:
    """Something to decide: an op, a held tensor, a shared value, a layer; `parts` are what a state takes by itself."""

    kind: str
    name: str
    states: tuple[Any, ...]
    parts: tuple[Parts, ...]

    def at(self, state: int) -> Floats:
        found = np.zeros(len(Sum))
        for parts in self.parts:
            for key, values in parts.items():
                found[key] += values[state]
        return found


@dataclass(frozen=True, eq=False)
class FactorByMode:
    """What two decisions cost together, for each mode of a layer."""

    each: tuple[CostTable, ...]

    def weighted(self, weights: Floats) -> Floats:
        return np.stack([table.weighted(weights) for table in self.each])

    def at(self, mode: int, row: int, column: int) -> Floats:
        return self.each[mode].at(row, column)


Costs = CostTable | FactorByMode


@dataclass(frozen=True, eq=False)
class Factor:
    """What some decisions cost together: an axis of the table for each of them."""

    scope: tuple[int, ...]
    table: Costs

    def at(self, chosen: Sequence[int]) -> Floats:
        return self.table.at(*(chosen[node] for node in self.scope))


@dataclass(frozen=True, eq=False)
class Model:
    setting: PlanningProblem
    variables: tuple[Variable, ...]
    factors: tuple[Factor, ...]
    place: dict[tuple[str, str], int]
    """By kind and name, the number of a variable."""
    recompute: Mapping[str, Recompute]
    """What is settled of layers."""

    @cached_property
    def costs(self) -> EqualTerms:
        """What variables cost by themselves."""
        own = [(tuple(map(id, variable.parts)), variable) for variable in self.variables]
        return EqualTerms.of(own, [(node,) for node in range(len(own))])

    @cached_property
    def tables(self) -> EqualTerms:
        """What they cost together."""
        return EqualTerms.of(
            [(id(factor.table), factor.table) for factor in self.factors], [f.scope for f in self.factors]
        )

    def sums(self, chosen: Sequence[int]) -> Floats:
        total = np.zeros(len(Sum))
        for alike in (self.costs, self.tables):
            for group in alike.groups:
                rows = np.column_stack([group.kinds, np.asarray(chosen)[group.scopes]])
                first, _, counts = distinct_rows(rows)
                for (kind, *at), count in zip(rows[first].tolist(), counts.tolist(), strict=True):
                    total += count * alike.terms[kind].at(*at)
        return total


def distinct_rows(rows: Ints) -> tuple[Ints, Ints, Ints]:
    """Of a table of small numbers: where each distinct row stands first, which of them each row is, how often each is
    there."""
    counts = rows.max(axis=0, initial=0) + 1
    if prod(counts.tolist()) < 2**62:  # one number for each row is sorted ten times sooner
        _, *found = np.unique(
            np.ravel_multi_index(tuple(rows.T), tuple(counts)),
            return_index=True,
            return_inverse=True,
            return_counts=True,
        )
    else:
        _, *found = np.unique(rows, axis=0, return_index=True, return_inverse=True, return_counts=True)
    first, which, often = found
    return first, which.ravel(), often


class TermGroup(NamedTuple):
    """Terms over so many variables: the kind of each, and the variables."""

    kinds: Ints
    scopes: Ints


@dataclass(frozen=True, eq=False)
class EqualTerms:
    """Terms of a model; those of one kind are one object, so they are worked out once."""

    terms: tuple[Any, ...]
    """One of each kind."""
    kinds: tuple[int, ...]
    """Of all terms."""
    groups: tuple[TermGroup, ...]

    @staticmethod
    def of(terms: Sequence[tuple[Any, Any]], scopes: Sequence[tuple[int, ...]]) -> EqualTerms:
        """Terms with their identity."""
        first: dict[Any, Any] = {}
        for key, term in terms:
            first.setdefault(key, term)
        number = {key: kind for kind, key in enumerate(first)}
        kinds = tuple(number[key] for key, _ in terms)
        groups = []
        for count in sorted({len(scope) for scope in scopes}):
            places = [i for i, scope in enumerate(scopes) if len(scope) == count]
            groups.append(TermGroup(np.array(kinds)[places], np.array([scopes[i] for i in places]).reshape(-1, count)))
        return EqualTerms(tuple(first.values()), kinds, tuple(groups))
