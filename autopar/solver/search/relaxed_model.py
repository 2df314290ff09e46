"""Model whose reshards are lower bounds at first, and its elimination by classes.

Each op that takes a tensor in one sharding pays a fixed share of its reshard, so that no reshard counts twice. Values
without a gradient are cut, as in `elimination`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from autopar.ir.values import NamedNode
from autopar.sharding.assignment import StepPlan
from autopar.sharding.sharding import Sharding
from autopar.solver import Flags, Floats, Ints
from autopar.solver.model.builder import returned_as, returned_tensors
from autopar.solver.model.cost_tables import CostTable, Parts, Wants, weigh
from autopar.solver.model.model import Model
from autopar.solver.model.objective import Sum
from autopar.solver.model.relaxed_tables import RelaxedTables
from autopar.solver.search.bucket_elimination import TooWide
from autopar.solver.search.class_elimination import ClassElimination, ClassTable, Single, class_elimination
from autopar.solver.search.elimination import growing_cuts

__all__ = ["RelaxedModel"]


class _Pair(NamedTuple):
    """A factor of two variables."""

    scope: tuple[int, int]
    table: CostTable


class _Side(NamedTuple):
    """A variable of a factor: rows or columns of the table that its states use, and the class of each state."""

    node: int
    used: Ints
    classes: Ints


@dataclass(eq=False)
class RelaxedModel:
    """Model whose reshards are lower bounds at first, and its elimination."""

    model: Model
    tables: RelaxedTables
    # A plan whose ops share reshards as those of a good one do.
    plan: StepPlan
    # Reshards priced so far.
    priced: int = 0
    _same: dict[Any, Any] = field(default_factory=dict)
    _cached: dict[Any, Single] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.factors = list(_pairs(self.model))
        self.shares = _shares(self.model, self.factors, self.tables, self.plan)
        self.sides = [self._sides(factor) for factor in self.factors]
        self.cut, self.elimination = self._eliminated()

    def _eliminated(self) -> tuple[frozenset[int], ClassElimination]:
        """Cut values without a gradient, and if need be those with most users."""
        for nodes in growing_cuts(self.model):
            cut = frozenset(nodes)
            sizes = [1 if node in cut else len(each.states) for node, each in enumerate(self.model.variables)]
            tables = [
                ClassTable(tuple(one.node for one in left), tuple(one.classes for one in left))
                for sides in self.sides
                if (left := [one for one in sides if one.node not in cut])
            ]
            try:
                return cut, class_elimination(sizes, tables)
            except TooWide:
                continue
        raise TooWide

    def _sides(self, factor: _Pair) -> tuple[_Side, _Side]:
        (first, second), table = factor
        return self._side(first, table.rows), self._side(second, table.columns)

    def _side(self, node: int, classes: Ints) -> _Side:
        used, inverse = np.unique(classes, return_inverse=True)
        if len(used) == len(classes):  # the states in their own order
            used, inverse = classes, np.arange(len(classes))
        return _Side(node, self._one(used), self._one(inverse))

    def _one(self, array: Any) -> Any:
        """Return the first array equal to an array."""
        return self._same.setdefault((array.dtype, array.shape, array.tobytes()), array)

    def least(self, weights: Floats, exact_only: bool = False) -> tuple[float, list[int]]:
        """Return a lower bound on the weighted sums of all assignments, and the states that reach it.

        With `exact_only`, of those whose reshards all have exact prices.
        """
        constant, costs, tables = 0.0, [], []
        own = [self._own(variable.parts, weights) for variable in self.model.costs.terms]
        for node, kind in enumerate(self.model.costs.kinds):
            costs.append(self._same_least(own[kind]) if node in self.cut else own[kind])
        for number, sides in enumerate(self.sides):
            table = self._table(number, weights, exact_only)
            if all(one.node in self.cut for one in sides):
                constant += float(table.min())
            else:
                tables.append(table)
        value, chosen = self.elimination.solve(costs, tables)
        return value + constant, chosen

    def _same_least(self, own: Single) -> Single:
        key = "least", id(own)
        if key not in self._cached:
            self._cached[key] = own.min(keepdims=True)
        return self._cached[key]

    def _own(self, parts: Sequence[Parts], weights: Floats) -> Single:
        key = "own", tuple(map(id, parts))
        if key not in self._cached:
            self._cached[key] = _summed(parts, weights).astype(np.float32)
        return self._cached[key]

    def _table(self, number: int, weights: Floats, exact_only: bool) -> Single:
        """Return the weighted table of a factor over the classes of its variables that are left."""
        parts, share = self.factors[number].table.parts, self.shares[number]
        rows, columns = self.sides[number]
        gone = tuple(one.node in self.cut for one in (rows, columns))
        key = "table", id(parts), id(share), id(rows.used), id(columns.used), gone, exact_only
        if key not in self._cached:
            made = share.paid(parts, weights)
            if exact_only:
                made = np.where(self.tables.relaxed[id(parts)].is_exact, made, np.inf)
            made = made[np.ix_(rows.used, columns.used)]
            over = tuple(axis for axis, is_gone in enumerate(gone) if is_gone)
            self._cached[key] = (made.min(axis=over) if over else made).astype(np.float32)
        return self._cached[key]

    # -- exact prices

    def price(self, chosen: Sequence[int], weights: Floats, around: bool = False) -> int:
        """Price the reshards that an answer uses; return how many of these were not exact.

        Of their rows and columns, those are priced that seem to cost less; with `around`, all of them.
        """
        missing, seen = 0, set[tuple[int, ...]]()
        changed = set[int]()
        for factor in self.factors:
            relaxed, table = self.tables.relaxed[id(factor.table.parts)], factor.table
            every = np.arange(len(relaxed.rows)), np.arange(len(relaxed.columns))
            at = [
                -1 if node in self.cut else int(classes[chosen[node]])
                for node, classes in zip(factor.scope, (table.rows, table.columns), strict=True)
            ]
            key = id(table.parts), *at
            if key in seen:
                continue
            seen.add(key)
            rows, columns = (whole if one < 0 else np.array([one]) for whole, one in zip(every, at, strict=True))
            found = relaxed.price(rows, columns)
            missing += found
            if (found or around) and min(at) >= 0:
                nearby = every
                if not around:
                    costs = _weighted(relaxed.parts, weights)
                    own = costs[at[0], at[1]]
                    nearby = np.flatnonzero(costs[:, at[1]] < own), np.flatnonzero(costs[at[0]] < own)
                found += relaxed.price(rows, nearby[1]) + relaxed.price(nearby[0], columns)
            if found:
                changed.add(id(table.parts))
            self.priced += found
        for key in [key for key in self._cached if key[0] == "table" and key[1] in changed]:
            del self._cached[key]
        return missing

    def settled(self, chosen: Sequence[int], weights: Floats) -> list[int]:
        """Return the states with those of the cut variables that are best beside the others."""
        states = list(chosen)
        incident: dict[int, list[int]] = {node: [] for node in self.cut}
        for number, factor in enumerate(self.factors):
            for node in self.cut.intersection(factor.scope):
                incident[node].append(number)
        for node in sorted(self.cut):
            total = _summed(self.model.variables[node].parts, weights)
            for number in incident[node]:
                (first, second), table = self.factors[number]
                made = self.shares[number].paid(table.parts, weights)
                rows = table.rows if first == node else table.rows[states[first]]
                columns = table.columns if second == node else table.columns[states[second]]
                total = total + np.asarray(made[rows, columns])
            states[node] = int(total.argmin())
        return states


def _pairs(model: Model) -> Iterator[_Pair]:
    for factor in model.factors:
        assert isinstance(factor.table, CostTable), "no recompute mode is open"
        first, second = factor.scope
        yield _Pair((first, second), factor.table)


def _summed(parts: Sequence[Parts], weights: Floats) -> Floats:
    total = np.zeros(1)
    for one in parts:
        total = total + _weighted(one, weights)
    return total


def _weighted(parts: Parts, weights: Floats) -> Floats:
    """Return weighted sums; infinite where they are forbidden."""
    return _unless_forbidden(parts, weigh(parts, _allowed(weights)))


def _unless_forbidden(parts: Parts, total: Floats) -> Floats:
    return np.where(parts[Sum.FORBIDDEN] > 0.0, np.inf, total) if Sum.FORBIDDEN in parts else total


def _allowed(weights: Floats) -> Floats:
    allowed = weights.copy()
    allowed[Sum.FORBIDDEN] = 0.0
    return allowed


@dataclass(frozen=True, eq=False)
class _PaidShares:
    """Shares of the reshards of one factor that its op pays: one for each column."""

    shares: Floats
    # By how much more the op pays to add its gradient as it takes the tensor than as the tensor is kept, and the
    # columns in which it may gain by that, but pays for nothing.
    additions: tuple[Parts, Flags] | None = None

    def paid(self, parts: Parts, weights: Floats) -> Floats:
        """Return weighted sums; infinite where they are forbidden.

        An op pays no more than its reshard, and no more than its share of the reshard and its addition.
        """
        allowed = _allowed(weights)
        whole = weigh(parts, allowed)
        total = whole * self.shares
        if self.additions is not None:
            parts_added, only_gains = self.additions
            added = weigh(parts_added, allowed)
            added = np.where(only_gains, np.minimum(added, 0.0), added)
            total = np.minimum(whole, total + (1.0 - self.shares) * added)
        return _unless_forbidden(parts, total)


@dataclass(frozen=True)
class _Share:
    """Share of a tensor's reshards that one of its ops pays."""

    # Shardings in which the step returns the tensor: the state pays.
    returned: frozenset[Sharding]
    # Ops that take the tensor in each sharding in a good plan, and the shardings that this op takes there.
    counts: Mapping[Sharding, int]
    own: frozenset[Sharding]
    users: int

    def of(self, wants: Wants) -> float:
        """Return the share of an option that takes the tensor in these shardings."""
        return min(map(self._of_one, wants), default=1.0)

    def _of_one(self, want: Sharding | None) -> float:
        if want is None:
            return 1.0
        if want in self.returned:
            return 0.0
        count = self.counts.get(want, 0)
        return float(want in self.own) / count if count else 1.0 / self.users


def _shares(model: Model, factors: Sequence[_Pair], tables: RelaxedTables, plan: StepPlan) -> list[_PaidShares]:
    """Return for each factor the share of each column's reshard that its op pays, so that no reshard counts twice.

    Ops that take a tensor in one sharding in the plan share its reshard; of another sharding all ops pay equal parts.
    """
    setting = model.setting
    handed, outputs = returned_tensors(setting.graph, setting.options.outputs), setting.options.outputs
    numbers = {factor.scope: number for number, factor in enumerate(factors)}
    known: dict[Any, _PaidShares] = {}
    relaxed = [tables.relaxed[id(factor.table.parts)] for factor in factors]
    found = [_one_of(known, np.ones(len(each.columns))) for each in relaxed]
    for tensor in setting.graph.tensors.values():
        users = setting.users.get(tensor.name, ())
        place = model.place.get(("value" if tensor.kind == "activation" else "held", tensor.name))
        if place is None or len(users) + (tensor.name in handed) < 2:
            continue
        taken = [_taken(plan, user, tensor.name) for user in users]
        counts = Counter(layout for each in taken for layout in each)
        states = model.variables[place].states
        layouts = states if tensor.kind == "activation" else [one.layout for one in states]
        wholes = handed.get(tensor.name, ()) if tensor.kind != "param" else ()
        returned = frozenset(each for one in layouts if wholes for each in returned_as(outputs, tensor, one, wholes))
        for user, own in zip(users, taken, strict=True):
            number = numbers[place, model.place["op", user.name]]
            share, columns = _Share(returned, counts, own, len(users)), relaxed[number].columns
            shares = np.array([share.of(each) for each in columns])
            added = tables.added(tensor, relaxed[number]) if tensor.kind == "activation" else None
            only_gains = np.array([len(each) > 1 or not returned.isdisjoint(each) for each in columns])
            found[number] = _one_of(known, shares, None if added is None else (added, only_gains))
    return found


def _one_of(known: dict[Any, _PaidShares], shares: Floats, additions: tuple[Parts, Flags] | None = None) -> _PaidShares:
    """Return one object for equal shares, as tables are cached by its identity."""
    added = None if additions is None else (id(additions[0]), additions[1].tobytes())
    return known.setdefault((shares.tobytes(), added), _PaidShares(shares, additions))


def _taken(plan: StepPlan, op: NamedNode, tensor: str) -> frozenset[Sharding]:
    """Return the shardings in which an op takes a tensor in a plan."""
    assigned = plan.assignment.ops.get(op.name)
    pairs = () if assigned is None else zip(op.operands, assigned.operands, strict=True)
    return frozenset(layout for name, layout in pairs if name == tensor and layout is not None)
