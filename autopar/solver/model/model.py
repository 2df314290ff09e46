"""The optimisation model of one graph on one mesh of one cluster.

Sets
    ops, each with options: a choice and the shardings of operands and results    `candidates.options_of`
    stored tensors (inputs, parameters, buffers), each with storage options       `candidates.stored_of`
    layers, each with recompute modes                                             `NamedGraph.ops_of_layers`
    shared values, each with the shardings that its producer gives and its        `ValueVariables`
        consumers need: results with several users, returned results, and
        results that the layout names; other values stay as they are produced

Variables
    o[n], the option of op n                                                      `OpVariables`
    s[t], the storage option of tensor t                                          `StorageVariables`
    v[t], the sharding in which shared value t is kept                            `ValueVariables`
    m[l], the recompute mode of layer l, if memory is short: none, cheap ops, all `build`

Constraints
    the layout of the user: only options that agree with it remain                `BoundLayout`
    contracts of the layout: states and pairs that break one are forbidden        `guard_factors.forbid_broken`

Objective: minimise the seconds of `evaluate`, a convex function (`objective.Hinges`) of sums over
    ops and the messages inside them                                              m[l], o[n]
    reshards of results to the kept sharding, and from it to consumers            m[l], o[producer], v[t], o[consumer]
    gathers of parameters and reductions of their gradients                       s[t], o[consumer]
    optimizer steps                                                               s[t]

If two ops need one value in one sharding other than the kept one, `evaluate` counts one reshard and the sums two. The
bound of a search counts it once (`reshard_shares`).
Buckets of parameters cost the rate of a full one. `evaluate` prices every plan found, and its price is reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np

from autopar.sharding.layout.syntax import Recompute
from autopar.solver import Floats, Ints
from autopar.solver.model.cost_tables import CostTable, CostTables, Parts
from autopar.solver.model.objective import Sum
from autopar.solver.setting import PlanningProblem


@dataclass(frozen=True, eq=False)
class Variable:
    """One decision: an op, a stored tensor, a shared value, a layer; `parts` are the sums of each state alone."""

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
    """Costs of two decisions together, for each recompute mode of a layer."""

    each: tuple[CostTable, ...]

    def weighted(self, weights: Floats) -> Floats:
        return np.stack([table.weighted(weights) for table in self.each])

    def at(self, mode: int, row: int, column: int) -> Floats:
        return self.each[mode].at(row, column)


Costs = CostTable | FactorByMode


@dataclass(frozen=True, eq=False)
class Factor:
    """Costs of some decisions together: a table with an axis for each of them."""

    scope: tuple[int, ...]
    table: Costs

    def at(self, chosen: Sequence[int]) -> Floats:
        return self.table.at(*(chosen[node] for node in self.scope))


@dataclass(frozen=True, eq=False)
class Model:
    setting: PlanningProblem
    variables: tuple[Variable, ...]
    factors: tuple[Factor, ...]
    # Number of a variable, by kind and name.
    place: dict[tuple[str, str], int]
    # Fixed recompute modes of layers.
    recompute: Mapping[str, Recompute]
    # The reshard prices that its factors are made of.
    cost_tables: CostTables

    @cached_property
    def costs(self) -> EqualTerms:
        """Return the costs of the variables alone."""
        own = [(tuple(map(id, variable.parts)), variable) for variable in self.variables]
        return EqualTerms.of(own, [(node,) for node in range(len(own))])

    @cached_property
    def tables(self) -> EqualTerms:
        """Return the costs of the factors."""
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
    """Return the index of each distinct row of a table, the distinct row of each row, and their counts."""
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
    """Terms over equally many variables: the kind of each, and its variables."""

    kinds: Ints
    scopes: Ints


@dataclass(frozen=True, eq=False)
class EqualTerms:
    """Terms of a model; terms of one kind are one object and are computed once."""

    # One term of each kind.
    terms: tuple[Any, ...]
    # Groups over all terms.
    kinds: tuple[int, ...]
    groups: tuple[TermGroup, ...]

    @staticmethod
    def of(terms: Sequence[tuple[Any, Any]], scopes: Sequence[tuple[int, ...]]) -> EqualTerms:
        """Group terms by identity."""
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
