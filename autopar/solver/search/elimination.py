"""The weighted model: one number for each state and pair at fixed multipliers, minimised by elimination."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

import numpy as np

from autopar.ir.graph import NamedGraph
from autopar.solver import Floats
from autopar.solver.model.cost_tables import weigh
from autopar.solver.model.model import Model
from autopar.solver.search.bucket_elimination import SharedTableElimination, TooWide, elimination_order, fixed
from autopar.solver.search.class_tables import ClassTables
from autopar.solver.search.reshard_shares import ReshardShares

__all__ = ["Elimination", "growing_cuts", "light_variables"]

LARGEST_TABLE = 2**21
# Table size before a variable with a gradient is cut: a cut costs more of the bound than a larger table of time.
LARGEST_UNCUT = 2**24
MOST_SETTLING = 4


class WeightedMinimum(NamedTuple):
    """Minimum at some weights: a lower bound on all assignments, the assignment that reaches it, and its sums."""

    value: float
    sums: Floats
    # Without the cut variables, which every table chooses for itself.
    chosen: list[int]


@dataclass(frozen=True, eq=False)
class Elimination:
    """Elimination order of a model's variables, and the variables that are cut."""

    model: Model
    scopes: tuple[tuple[int, ...], ...]
    cut: tuple[int, ...]
    plan: SharedTableElimination | ClassTables
    # The cut variables and those without a gradient, minimised together if that is narrow.
    inner: _CutVariables | None = None

    @staticmethod
    def of(model: Model) -> Elimination:
        """Cut variables until the rest can be eliminated.

        First values without a gradient, which are small or are sent one way only. Larger tables are tried before any
        other variable is cut; then those go that are in most of the tables that are too large.
        """
        scopes = tuple(factor.scope for factor in model.factors)
        cut: tuple[int, ...] = ()
        plan = whole = _folded(model, scopes, cut)
        if whole.largest > LARGEST_TABLE:
            cut = tuple(light_variables(model))
            plan = _folded(model, scopes, cut)
            if whole.largest <= LARGEST_UNCUT and plan.largest > LARGEST_TABLE:
                cut, plan = (), whole
        if plan.largest > LARGEST_UNCUT:
            # A layer whose mode is cut may save nothing and recompute nothing at once.
            modes = {node for node, variable in enumerate(model.variables) if variable.kind == "recompute"}
            degree = Counter(node for scope in scopes for node in scope if node not in modes)
            while plan.largest > LARGEST_TABLE:
                cut = *cut, *plan.nodes_of_large(LARGEST_TABLE, degree)
                plan = _folded(model, scopes, cut)
        return Elimination(model, scopes, cut, plan, _CutVariables.of(model, scopes, cut))

    @property
    def is_rough(self) -> bool:
        """Return whether variables with a gradient are cut, which costs much of the bound."""
        return not set(self.cut).issubset(light_variables(self.model))

    def by_classes(self) -> Elimination:
        """Return an elimination by classes of states, with fewer variables cut; itself if that is too wide.

        It takes longer, so that a search begins without it.
        """
        cuts = [cut for cut in growing_cuts(self.model) if len(cut) <= len(self.cut)]
        found = self
        # What is too wide is too wide with fewer cuts: the most first, as the fewest that do are sought by bisection.
        wide, narrow = -1, len(cuts)
        tried = narrow - 1
        while wide < tried < narrow:
            try:
                plan = ClassTables.of(self.model, self.scopes, cuts[tried])
                inner = _CutVariables.of(self.model, self.scopes, cuts[tried])
                found, narrow = Elimination(self.model, self.scopes, cuts[tried], plan, inner), tried
            except TooWide:
                wide = tried
            tried = (wide + narrow) // 2
        return found

    def least(self, weights: Floats, shares: ReshardShares | None = None) -> WeightedMinimum:
        """Return a lower bound on the weighted sum of all assignments.

        With `shares` no reshard counts more than once in the bound; in the sums it counts for each op.
        """
        weighted = _WeightedModel(self.model, weights, self.scopes)
        if shares is not None:
            shares.discount(weighted.costs, weighted.tables, weights)
        pattern = () if shares is None else (shares,)
        value, chosen = self._solved(weighted, dict.fromkeys(self.cut), pattern)
        sums = weighted.relaxed_sums(chosen, self.cut, self.touched) if self.cut else self.model.sums(chosen)
        return WeightedMinimum(value, sums, chosen)

    def weighted(self, weights: Floats, shares: ReshardShares) -> tuple[list[Floats], list[Floats]]:
        """Return the weighted costs of all states and pairs, with nothing cut."""
        assert not self.cut, "what is cut has no costs of its own"
        found = _WeightedModel(self.model, weights, self.scopes)
        shares.discount(found.costs, found.tables, weights)
        return found.costs, found.tables

    def candidate(self, weights: Floats, near: Sequence[int] | None = None) -> list[int]:
        """Return an assignment with a low weighted sum; `near` is the minimum at weights like these."""
        weighted = _WeightedModel(self.model, weights, self.scopes)
        chosen = list(near) if near and self.cut else self._solved(weighted, dict.fromkeys(self.cut))[1]
        states: dict[int, int] | None = None
        # To eliminate by classes again takes long, and changes little.
        for _ in range(0 if isinstance(self.plan, ClassTables) or not self.cut else MOST_SETTLING):
            last, states = states, self._best_of_cut(weighted, chosen)
            if states == last:
                return chosen
            _, chosen = self._solved(weighted, states)
        return self.settled(chosen, weights)

    def best_kept(self, chosen: Sequence[int], weights: Floats, shares: ReshardShares) -> list[int]:
        """Return an assignment whose shared tensors are kept as is best beside the others, each reshard paid once."""
        return shares.best_kept(chosen, weights, _WeightedModel(self.model, weights, self.scopes).costs_beside)

    def settled(self, chosen: Sequence[int], weights: Floats) -> list[int]:
        """Return an assignment with the best states of the cut variables beside the others."""
        if not self.cut:
            return list(chosen)
        states = self._best_of_cut(_WeightedModel(self.model, weights, self.scopes), chosen)
        return [states.get(node, state) for node, state in enumerate(chosen)]

    def _best_of_cut(self, weighted: _WeightedModel, chosen: Sequence[int]) -> dict[int, int]:
        if self.inner is not None:
            return self.inner.settled(weighted, chosen)
        return {node: int(weighted.costs_beside(node, chosen).argmin()) for node in self.cut}

    @cached_property
    def touched(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Factors with cut variables, and these variables."""
        cut = set(self.cut)
        found = ((i, tuple(node for node in scope if node in cut)) for i, scope in enumerate(self.scopes))
        return tuple((i, gone) for i, gone in found if gone)

    def _solved(
        self, weighted: _WeightedModel, cut: Mapping[int, int | None], pattern: tuple[object, ...] = ()
    ) -> tuple[float, list[int]]:
        costs, tables, constant = weighted.without(cut, self.touched)
        value, chosen = self.plan.solve(costs, tables, pattern=pattern or tuple(cut.items()))
        for node, state in cut.items():
            chosen[node] = 0 if state is None else state
        return value + constant, chosen


@dataclass(frozen=True, eq=False)
class _CutVariables:
    """The cut variables and all variables without a gradient, minimised with the others fixed."""

    cut: tuple[int, ...]
    nodes: tuple[int, ...]
    factors: tuple[int, ...]
    plan: SharedTableElimination

    @staticmethod
    def of(model: Model, scopes: Sequence[tuple[int, ...]], cut: Sequence[int]) -> _CutVariables | None:
        graph = model.setting.graph
        ops = {node.name for node in graph.nodes if not any(_trained(graph, name) for name in node.outputs)}
        light = (
            place
            for place, variable in enumerate(model.variables)
            if variable.kind != "recompute"
            and (variable.name in ops if variable.kind == "op" else not _trained(graph, variable.name))
        )
        nodes = tuple(sorted({*cut, *light})) if cut else ()
        place = {node: i for i, node in enumerate(nodes)}
        factors = tuple(i for i, scope in enumerate(scopes) if not place.keys().isdisjoint(scope))
        inside = [tuple(place[node] for node in scopes[i] if node in place) for i in factors]
        try:
            plan = elimination_order([len(model.variables[node].states) for node in nodes], inside, LARGEST_TABLE)
        except TooWide:
            return None
        return _CutVariables(tuple(cut), nodes, factors, plan)

    def settled(self, weighted: _WeightedModel, chosen: Sequence[int]) -> dict[int, int]:
        """Return the best states of the cut variables, with the others as chosen."""
        own = set(self.nodes)
        tables = []
        for i in self.factors:
            scope = weighted.scopes[i]
            tables.append(fixed(weighted.tables[i], scope, {node: chosen[node] for node in scope if node not in own}))
        _, states = self.plan.solve([weighted.costs[node] for node in self.nodes], tables)
        found = dict(zip(self.nodes, states, strict=True))
        return {node: found[node] for node in self.cut}


def light_variables(model: Model) -> list[int]:
    """Return the variables of values without a gradient that several factors have."""
    degree = Counter(node for factor in model.factors for node in factor.scope)
    tensors = model.setting.graph.tensors
    return [
        node
        for node, variable in enumerate(model.variables)
        if variable.kind in ("held", "value") and not tensors[variable.name].requires_grad and degree[node] > 1
    ]


def growing_cuts(model: Model) -> Iterator[tuple[int, ...]]:
    """Yield variables to cut: values without a gradient, and beside them ever more of those that many factors have."""
    light, degree = light_variables(model), Counter(node for factor in model.factors for node in factor.scope)
    kinds = ("held", "value")
    heavy = [node for node, one in enumerate(model.variables) if one.kind in kinds and degree[node] > 1]
    heavy = sorted(set(heavy).difference(light), key=lambda node: (-degree[node], node))
    for count in (0, *(2**i for i in range(len(heavy).bit_length() + 1))):
        yield (*light, *heavy[:count])


def _trained(graph: NamedGraph, name: str | None) -> bool:
    return name is not None and graph.tensors[name].requires_grad


def _folded(model: Model, scopes: Sequence[tuple[int, ...]], cut: Sequence[int]) -> SharedTableElimination:
    gone = set(cut)
    sizes = [1 if node in gone else len(variable.states) for node, variable in enumerate(model.variables)]
    left = [tuple(node for node in scope if node not in gone) for scope in scopes]
    return elimination_order(sizes, [scope for scope in left if scope], inf)


class _WeightedModel:
    """Weighted costs of a model; equal costs and tables are one object."""

    def __init__(self, model: Model, weights: Floats, scopes: Sequence[tuple[int, ...]]) -> None:
        self.model = model
        self.scopes = scopes
        own = [sum((weigh(parts, weights) for parts in variable.parts), np.zeros(1)) for variable in model.costs.terms]
        self.costs: list[Floats] = [own[kind] for kind in model.costs.kinds]
        both = [table.weighted(weights) for table in model.tables.terms]
        self.tables: list[Floats] = [both[kind] for kind in model.tables.kinds]
        self.sliced: dict[Any, Floats] = {}

    @cached_property
    def incident(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for i, scope in enumerate(self.scopes):
            for node in scope:
                found.setdefault(node, []).append(i)
        return found

    def without(
        self, cut: Mapping[int, int | None], touched: Sequence[tuple[int, tuple[int, ...]]]
    ) -> tuple[list[Floats], list[Floats], float]:
        """Return costs and tables without the cut variables, and the costs of these alone."""
        costs = list(self.costs)
        constant = 0.0
        for node, state in cut.items():
            constant += float(self.costs[node].min() if state is None else self.costs[node][state])
            costs[node] = _NOTHING
        tables: list[Floats | None] = list(self.tables)
        for i, gone in touched:
            scope, table = self.scopes[i], self.tables[i]
            key = id(table), tuple((scope.index(node), cut[node]) for node in gone)
            if key not in self.sliced:
                self.sliced[key] = fixed(table, scope, cut)
            tables[i] = self.sliced[key]
            if len(gone) == len(scope):
                constant += float(self.sliced[key])
                tables[i] = None
        return costs, [table for table in tables if table is not None], constant

    def costs_beside(self, node: int, chosen: Sequence[int]) -> Floats:
        """Return the costs of all states of a variable beside those of the others."""
        total = self.costs[node].copy()
        for i in self.incident.get(node, ()):
            scope = self.scopes[i]
            total += self.tables[i][tuple(slice(None) if each == node else chosen[each] for each in scope)]
        return total

    def relaxed_sums(
        self, chosen: Sequence[int], cut: Sequence[int], touched: Sequence[tuple[int, tuple[int, ...]]]
    ) -> Floats:
        """Return the sums of an answer in which every table chooses the states of cut variables for itself."""
        gone = set(cut)
        whole = [int(np.argmin(self.costs[node])) if node in gone else state for node, state in enumerate(chosen)]
        total = self.model.sums(whole)
        # Equal layers have equal tables and states.
        alike: dict[object, list[int]] = {}
        for i, _ in touched:
            scope = self.scopes[i]
            states = tuple([whole[node] + (node in gone) * OPEN for node in scope])
            alike.setdefault((id(self.tables[i]), id(self.model.factors[i].table), states), []).append(i)
        for i, *others in alike.values():
            factor, table = self.model.factors[i], self.tables[i]
            left = table[tuple(slice(None) if node in gone else chosen[node] for node in factor.scope)]
            own = iter(np.unravel_index(int(left.argmin()), left.shape))
            free = factor.table.at(*(int(next(own)) if node in gone else chosen[node] for node in factor.scope))
            total += (1 + len(others)) * (free - factor.at(whole))
        return total


_NOTHING = np.zeros(1)
# Beyond all states: marks that of a cut variable.
OPEN = 2**40
