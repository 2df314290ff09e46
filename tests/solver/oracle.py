"""The planner's problem as one CP-SAT model, and as a table of all its assignments: the oracles of the planner.

Sets and variables are those of `autopar/solver/model/model.py`, with the modes of the layers as one variable
more and with every conversion of a tensor into one layout paid for once, however many ops want it. The objective bounds
the seconds of `evaluate` from below: buckets of parameters are counted at the rate of a full one. So the best of all
plans by `evaluate` is found by pricing assignments in the order of their bounds until none that is left can be better.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import prod
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from autopar.cost.costs import Costs
from autopar.cost.evaluate import evaluate
from autopar.sharding.assignment import StepPlan
from autopar.sharding.bound_layout import BoundLayout
from autopar.sharding.sharding import Sharding
from autopar.solver import Floats
from autopar.solver.model.build import build, plan_of
from autopar.solver.model.builder import returned_tensors
from autopar.solver.model.cost_tables import CostTables, ValueUse
from autopar.solver.model.model import Model
from autopar.solver.model.objective import MEMORY, MOMENTS, Hinges, Sum
from autopar.solver.model.recompute_variables import MODES
from autopar.solver.setting import PlanningProblem

__all__ = ["ROUNDED", "Complete", "Oracle", "Term", "best_of_all", "bounds", "cheapest", "own_problem", "whole_problem"]

STEPS = 2**28
"""The largest coefficient is scaled to so many. With 2**34, CP-SAT 9.15 calls some models infeasible that have a
solution: with every state fixed to it, it agrees."""
ROUNDED = 1e-7
"""What the answer may be off by, for that."""


@dataclass(frozen=True)
class Term:
    """What some variables cost together: an axis for each of them, the last one for the sums."""

    scope: tuple[int, ...]
    sums: Floats


@dataclass(frozen=True)
class Oracle:
    """`counts`: the states of each variable; the last variable are the modes of the layers."""

    models: tuple[Model, ...]
    counts: tuple[int, ...]
    terms: tuple[Term, ...]
    hinges: Hinges
    barred: tuple[tuple[int, int], ...] = ()
    """Variables and states that are not to be had."""

    @property
    def size(self) -> int:
        return prod(self.counts)

    def plan(self, chosen: Sequence[int]) -> StepPlan:
        return plan_of(self.models[chosen[-1]], chosen[:-1])

    def costs(self, chosen: Sequence[int]) -> Costs:
        setting = self.models[0].setting
        return evaluate(setting.graph, self.plan(chosen), setting.cluster)

    def sums(self, chosen: Sequence[int]) -> Floats:
        return np.sum([term.sums[tuple(chosen[node] for node in term.scope)] for term in self.terms], axis=0)


def own_problem(model: Model) -> Oracle:
    """What the planner solves: one model, its sums as they are."""
    return _oracle((model,), ())


def whole_problem(setting: PlanningProblem, bound_layout: BoundLayout) -> Oracle:
    """All that may be decided, with each conversion counted once."""
    tables = CostTables(setting)
    layers = tuple(setting.graph.ops_of_layers) if setting.trains else ()
    models = tuple(
        build(setting, bound_layout, tables, regather=True, recompute=dict(zip(layers, modes, strict=True)))
        for modes in product(("none", *MODES), repeat=len(layers))
    )
    barred = [
        (node, state)
        for node, variable in enumerate(models[0].variables)
        for state, one in enumerate(variable.states)
        if variable.kind == "held" and one.shared is not None  # the same plan as without, where nothing counts twice
    ]
    return replace(_oracle(models, tuple(_counted_twice(models, tables))), barred=tuple(barred))


def _oracle(models: tuple[Model, ...], more: tuple[Term, ...]) -> Oracle:
    first = models[0]
    counts = (*(len(variable.states) for variable in first.variables), len(models))
    terms = [
        _term(
            (node,), [np.array([model.variables[node].at(state) for state in range(counts[node])]) for model in models]
        )
        for node in range(len(first.variables))
    ]
    for place, factor in enumerate(first.factors):
        shape = [counts[node] for node in factor.scope]
        tables = [model.factors[place].table for model in models]
        each = [np.array([table.at(*states) for states in np.ndindex(*shape)]) for table in tables]
        terms.append(_term(factor.scope, [sums.reshape(*shape, len(Sum)) for sums in each]))
    return Oracle(models, counts, (*terms, *more), Hinges.of(first.setting))


def _term(scope: tuple[int, ...], each: Sequence[Floats]) -> Term:
    """One term for all modes; where they do not matter, without them."""
    if all(np.array_equal(one, each[0]) for one in each):
        return Term(scope, each[0])
    return Term((*scope, -1), np.stack(each, axis=-2))


# -- conversions that several ops share


def _counted_twice(models: Sequence[Model], tables: CostTables) -> Iterator[Term]:
    """What the sums of a model count for an op though an earlier one has it converted: to be taken off."""
    setting = models[0].setting
    for tensor in setting.graph.tensors.values():
        users = setting.users.get(tensor.name, ())
        kind = "value" if tensor.kind == "activation" else "held"
        place = models[0].place.get((kind, tensor.name))
        if place is None:
            continue
        scope = (place, *(models[0].place["op", user.name] for user in users))
        wants = [_wants(models[0], user, tensor.name) for user in users]
        counts = [len(models[0].variables[node].states) for node in scope]
        assert prod(counts) <= 20_000, f"{tensor.name} has too many users"
        sums = np.zeros((*counts, len(Sum)))
        for state, held in enumerate(models[0].variables[place].states):
            price = _price(setting, tables, tensor.name, held)
            given = _given_to_the_caller(setting, tensor.name, held) if tensor.kind != "param" else set()
            for picked in product(*(range(count) for count in counts[1:])):
                every = [want for each, i in zip(wants, picked, strict=True) for want in each[i]]
                for want in set(every):
                    sums[(state, *picked)] -= (every.count(want) - 1 + (want in given)) * price(want)
                if tensor.kind == "activation" and tensor.requires_grad and setting.trains:
                    taken = [each[i] or {held} for each, i in zip(wants, picked, strict=True)]
                    sums[(state, *picked)] += _added(setting, tensor.name, held, taken)
        yield Term(scope, sums)


def _added(setting: PlanningProblem, name: str, kept: Sharding, taken: Sequence[set[Sharding]]) -> Floats:
    """What the sums of gradients take more than in the model, in which an op adds in the kept layout only.

    `taken`: for each op the layouts in which it takes the value. The first gradient in a layout is added to nothing.
    """
    gradients = Counter(want for each in taken for want in each)
    gradients[kept] += len(gradients.keys() - {kept})  # those that are converted back
    gradients[kept] -= sum(map(len, taken))
    found = np.zeros(len(Sum))
    for layout, count in gradients.items():
        task = setting.prices.gradient_sum(name, layout)
        times = count if layout == kept else count - 1
        found[[Sum.DEVICE, Sum.BACKWARD_ROOM]] += times * task.seconds
        found[Sum.HOST] += times * task.host_seconds
    return found


def _given_to_the_caller(setting: PlanningProblem, name: str, held: Any) -> set[Sharding]:
    """The layouts in which the step returns a tensor, other than that in which it is kept."""
    tensor, outputs = setting.graph.tensors[name], setting.options.outputs
    layout = held if tensor.kind == "activation" else held.layout
    whole = Sharding(((),) * len(layout.splits))
    found = returned_tensors(setting.graph, outputs).get(name, ())
    given = {whole if one or outputs == "full" or not tensor.shape else Sharding(layout.splits) for one in found}
    return given - {layout}


def _wants(model: Model, user: Any, name: str) -> list[set[Sharding]]:
    places = [i for i, operand in enumerate(user.operands) if operand == name]
    options = model.variables[model.place["op", user.name]].states
    return [{option.operands[i] for i in places if option.operands[i] is not None} for option in options]


def _price(setting: PlanningProblem, tables: CostTables, name: str, held: Any) -> Callable[[Sharding], Floats]:
    """The sums of one conversion of a tensor, at its most: in a layer that is computed again."""
    tensor = setting.graph.tensors[name]
    cut = tables.cut(tensor)

    @cache
    def price(want: Sharding) -> Floats:
        if tensor.kind == "param":
            sums = tables.shared(cut, [replace(held, shared=want)], tables.handled(tensor, kept=False))
            return np.array([sums[key][0] if key not in MEMORY else 0.0 for key in Sum])
        source = held if tensor.kind == "activation" else held.layout
        return tables.values(cut, [source], [(want,)], ValueUse(again=True)).at(0, 0)

    return price


# -- all assignments


def bounds(oracle: Oracle) -> Floats:
    """The least that each assignment can take; an axis for each variable."""
    total = np.zeros((*oracle.counts, len(Sum)))
    for term in oracle.terms:
        scope = [node % len(oracle.counts) for node in term.scope]
        order = sorted(range(len(scope)), key=scope.__getitem__)
        sums = term.sums.transpose(*order, len(scope))
        shape = [count if node in scope else 1 for node, count in enumerate(oracle.counts)]
        total += sums.reshape(*shape, len(Sum))
    hinges = oracle.hinges
    beside = np.maximum(0.0, total @ hinges.slopes.T + hinges.offsets).sum(axis=-1)
    found = total @ hinges.base + hinges.constant + beside
    for node, state in oracle.barred:
        np.moveaxis(found, node, 0)[state] = np.inf
    return found


def best_of_all(
    oracle: Oracle, limit_bytes: float, price: Callable[[Sequence[int]], Costs], claimed: float, most: int
) -> float | None:
    """The seconds of the best assignment that keeps the limit: all that could be better than what is claimed are
    priced. None where these are more than `most`."""
    found = bounds(oracle)
    better = np.argwhere(found < claimed * (1 - 1e-9))
    if len(better) > most:
        return None
    best = claimed
    # Several assignments give one plan where partial sums are added up early: its bound is the least of theirs.
    least: dict[str, tuple[float, Costs]] = {}
    for chosen in better.tolist():
        costs, plan, bound = price(chosen), repr(oracle.plan(chosen).assignment), float(found[tuple(chosen)])
        least[plan] = min(least.get(plan, (bound, costs)), (bound, costs), key=lambda pair: pair[0])
    for bound, costs in least.values():
        assert bound <= costs.step_seconds * (1 + 1e-9), "a bound is a bound"
        if costs.memory.peak_bytes <= limit_bytes and np.isfinite(costs.memory.peak_bytes):
            best = min(best, costs.step_seconds)
    return best


# -- CP-SAT


class Complete:
    """A literal for each state of each variable and for each entry of a table, whose sums along every axis are the
    literals of the states; a variable for each hinge."""

    def __init__(self, oracle: Oracle, limit_gib: float = np.inf) -> None:
        self.oracle = oracle
        self.model = cp_model.CpModel()
        self.states = [[self.model.new_bool_var("") for _ in range(count)] for count in oracle.counts]
        for literals in self.states:
            self.model.add_exactly_one(literals)
        for node, state in oracle.barred:
            self.model.add(self.states[node][state] == 0)
        entries = [pair for term in oracle.terms for pair in self._entries(term)]
        self._objective(entries)
        if np.isfinite(limit_gib):
            for moment in MOMENTS:
                self._limit([(literal, float(moment @ sums)) for literal, sums in entries], limit_gib)

    def _entries(self, term: Term) -> list[tuple[Any, Floats]]:
        scope = [self.states[node] for node in term.scope]
        if len(scope) == 1:
            return list(zip(scope[0], term.sums, strict=True))
        literals = np.empty(term.sums.shape[:-1], dtype=object)
        for place in np.ndindex(literals.shape):
            literals[place] = self.model.new_bool_var("")
        for axis, states in enumerate(scope):
            for state, literal in enumerate(states):
                self.model.add(sum(np.take(literals, state, axis=axis).ravel().tolist()) == literal)
        return [(literals[place], term.sums[place]) for place in np.ndindex(literals.shape)]

    def _objective(self, entries: Sequence[tuple[Any, Floats]]) -> None:
        hinges = self.oracle.hinges
        rows = [[float(row @ sums) for _, sums in entries] for row in (hinges.base, *hinges.slopes)]
        largest = max([abs(value) for row in rows for value in row] + [float(abs(hinges.offsets).max()), 1e-12])
        self.scale = STEPS / largest
        linear, *slopes = [
            sum(round(self.scale * value) * literal for (literal, _), value in zip(entries, row, strict=True) if value)
            for row in rows
        ]
        above = []
        for slope, offset in zip(slopes, hinges.offsets, strict=True):
            above.append(self.model.new_int_var(0, 2**52, ""))
            self.model.add(above[-1] >= slope + round(self.scale * float(offset)))
        self.model.minimize(linear + sum(above))

    def _limit(self, amounts: Sequence[tuple[Any, float]], limit: float) -> None:
        largest = max(abs(amount) for _, amount in amounts)
        if not largest:
            return
        scale = STEPS / max(largest, limit)
        total = sum(round(scale * amount) * literal for literal, amount in amounts if amount)
        self.model.add(total <= round(scale * limit))

    def solve(self) -> list[int] | None:
        """The best assignment; None where there is none."""
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        status = solver.solve(self.model)
        assert status in (cp_model.OPTIMAL, cp_model.INFEASIBLE), solver.status_name(status)
        if status == cp_model.INFEASIBLE:
            return None
        return [next(i for i, literal in enumerate(own) if solver.boolean_value(literal)) for own in self.states]

    def forbid(self, chosen: Sequence[int]) -> None:
        self.model.add_bool_or([self.states[node][state].negated() for node, state in enumerate(chosen)])


def cheapest(
    oracle: Oracle, limit_bytes: float, price: Callable[[Sequence[int]], Costs], most: int
) -> tuple[float, float]:
    """By the complete model: a bound on the seconds of all plans that keep the limit, and the least that was found.

    They are equal but where more than `most` assignments would have to be priced.
    """
    complete = Complete(oracle)
    best = np.inf
    for _ in range(most):
        chosen = complete.solve()
        if chosen is None:
            return best, best
        bound = oracle.hinges.seconds(oracle.sums(chosen))
        if bound >= best * (1 - ROUNDED):
            return best, best
        costs = price(chosen)
        assert bound <= costs.step_seconds * (1 + 1e-9), "a bound is a bound"
        if costs.memory.peak_bytes <= limit_bytes:
            best = min(best, costs.step_seconds)
        complete.forbid(chosen)
    return bound, best
