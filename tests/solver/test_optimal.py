"""Small random problems: the plan that is found is the best of all that could be decided, by `evaluate`.

Programs of one layer or of several, with tied parameters, values of several users, one or two axes, on clusters with
fast and slow links, under layouts and limits on memory from loose to just fitting, layers computed again or not.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, product
from math import prod

import numpy as np
import pytest

import autopar
from autopar.cost.costs import Costs
from autopar.cost.evaluate import evaluate
from autopar.sharding.contracts import check_contracts
from autopar.sharding.layout.language import parse_layout
from autopar.sharding.reshard_insertion import inserted_reshards
from autopar.solver.infeasible import NoFeasiblePlan
from autopar.solver.model.build import build
from autopar.solver.model.objective import peak_gib
from autopar.solver.model.recompute_variables import MODES
from autopar.solver.search.lagrangian import LagrangianSearch
from autopar.solver.search.prove_small import prove_small
from tests.solver.oracle import ROUNDED, Complete, Oracle, best_of_all, cheapest, own_problem, whole_problem
from tests.solver.random_problems import Drawn, drawn, program

ONE, TWO = {"a": 2}, {"a": 2, "b": 4}
PROGRAMS, PROBLEMS = 48, 6
MOST_STATES = 2**15
MOST_PRICED = 1000
"""Assignments that are priced to see whether one is better."""


def problems(seed: int, axes: Mapping[str, int], most_layers: int, smallest: int, largest: int) -> Iterator[Drawn]:
    """Problems of one program with so many assignments."""
    draw = random.Random(seed)
    graph = program(seed, most_layers)
    for lines in range(2, 34, 2):  # the more a layout says, the less is open
        problem = drawn(graph, axes, draw, lines)
        try:
            model = build(problem.setting, problem.bound_layout, regather=True)
        except autopar.AutoparError:  # the layout asks for what cannot be had
            continue
        ways = 3 ** len(graph.ops_of_layers)
        if smallest <= ways * prod(len(variable.states) for variable in model.variables) <= largest:
            yield problem


def small_problems(seed: int) -> Iterator[Drawn]:
    """Every fourth program runs on two axes."""
    two = seed % 4 == 3
    return islice(problems(seed, TWO if two else ONE, 1 if two else 2, 1, MOST_STATES), PROBLEMS)


def priced(oracle: Oracle) -> Callable[[Sequence[int]], Costs]:
    """Each assignment once."""
    known: dict[tuple[int, ...], Costs] = {}

    def price(chosen: Sequence[int]) -> Costs:
        key = tuple(chosen)
        if key not in known:
            known[key] = oracle.costs(chosen)
        return known[key]

    return price


def a_limit(draw: random.Random, oracle: Oracle, price: Callable[[Sequence[int]], Costs], most: float) -> float:
    """Something that some assignments keep: from what the fastest takes down to the least of a few."""
    peaks = [price([draw.randrange(count) for count in oracle.counts]).memory.peak_bytes for _ in range(12)]
    least = min(peaks)
    return draw.choice([least, least, (least + most) / 2, draw.choice(peaks)])


BLOCKS = [1, *(pytest.param(block, marks=pytest.mark.slow) for block in (0, *range(2, 12)))]


@pytest.mark.parametrize("block", BLOCKS)
def test_what_is_found_is_the_best_of_all(block: int) -> None:
    """All assignments are listed, with and without a limit; whatever could be better than what is claimed is priced."""
    count = limited = undecided = 0
    for seed in range(PROGRAMS * block // 12, PROGRAMS * (block + 1) // 12):
        draw = random.Random(seed)
        for problem in small_problems(seed):
            oracle = whole_problem(problem.setting, problem.bound_layout)
            price = priced(oracle)
            free = problem.solved()
            best = best_of_all(oracle, np.inf, price, free.costs.step_seconds, MOST_PRICED)
            # Where too many could be better by their estimates, not all are priced.
            undecided += best is None
            if best is not None:
                assert best == pytest.approx(free.costs.step_seconds, rel=1e-9), seed
                assert free.bound_seconds <= best * (1 + 1e-9), seed
            assert free.costs == evaluate(problem.graph, free.plan, problem.cluster)
            limit = a_limit(draw, oracle, price, free.costs.memory.peak_bytes)
            bound = problem.solved(limit)
            assert bound.costs.memory.peak_bytes <= limit
            best = best_of_all(oracle, limit, price, bound.costs.step_seconds, MOST_PRICED)
            count += 1
            if best is not None:
                limited += 1
                assert bound.costs.step_seconds == pytest.approx(best, rel=1e-9), (seed, limit)
                assert bound.bound_seconds <= best * (1 + 1e-9), (seed, limit)
    assert undecided <= 0.1 * count, "nearly all are decided"
    assert limited >= 0.6 * count > 0, "under most limits few assignments could be better"


@pytest.mark.slow
def test_what_is_found_under_a_guard_is_the_best_that_keeps_it() -> None:
    """A collective that the best plan sends is forbidden."""
    count = 0
    for seed in range(0, PROGRAMS, 4):
        for problem in islice(small_problems(seed), 2):
            free = problem.solved()
            sent = [one for one in free.costs.communication if one.axes]
            if not sent:
                continue
            one = random.Random(seed).choice(sent)
            scope = "grad" if one.of == "parameters" else "act"
            text = f"{problem.layout}forbid {one.kind}({scope}) over {one.axes[0]}"
            guarded = replace(problem, layout=parse_layout(text))
            oracle = whole_problem(guarded.setting, guarded.bound_layout)
            price = keeping(guarded, oracle)
            try:
                found = guarded.solved().costs.step_seconds
            except autopar.AutoparError:
                found = np.inf
            best = best_of_all(oracle, np.inf, price, found, 4 * MOST_PRICED)
            if best is not None:
                count += 1
                assert best == pytest.approx(found, rel=1e-9), (seed, text)
    assert count > 5


def keeping(problem: Drawn, oracle: Oracle) -> Callable[[Sequence[int]], Costs]:
    """Where contracts are broken, no memory does."""
    price = priced(oracle)

    def found(chosen: Sequence[int]) -> Costs:
        plan, costs = oracle.plan(chosen), price(chosen)
        sent = inserted_reshards(problem.graph, plan.assignment, plan.options.outputs, plan.options.local_inputs)
        try:
            check_contracts(problem.layout, problem.graph, plan.assignment, sent)
        except autopar.AutoparError:
            return replace(costs, memory=replace(costs.memory, peak_bytes=np.inf))
        return costs

    return found


@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.slow) for block in (1, 2))])
def test_the_complete_model_finds_the_same(block: int) -> None:
    """Problems of more assignments than can be listed, layers computed again among what is decided."""
    count = 0
    for seed in range(100 + 5 * block, 105 + 5 * block):
        for problem in islice(problems(seed, ONE, 2, MOST_STATES, 2**22), 2):
            oracle = whole_problem(problem.setting, problem.bound_layout)
            found = problem.solved()
            bound, best = cheapest(oracle, np.inf, priced(oracle), MOST_PRICED)
            assert found.costs.step_seconds == pytest.approx(best, rel=ROUNDED), seed
            assert found.bound_seconds <= best * (1 + ROUNDED), seed
            assert bound == best
            count += 1
    assert count > 0


@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.slow) for block in (1, 2, 3))])
def test_the_search_finds_what_the_complete_model_proves(block: int) -> None:
    """The planner's own problem, its sums as they are and limits on memory at both moments, as one model."""
    fits = 0
    for seed in range(200 + 6 * block, 206 + 6 * block):
        draw = random.Random(seed)
        for problem in islice(problems(seed, ONE, 2, 2**8, 2**20), 2):
            modes = {path: draw.choice(("none", *MODES)) for path in problem.graph.ops_of_layers}
            model = build(problem.setting, problem.bound_layout, regather=True, recompute=modes)
            oracle = own_problem(model)

            def sums(chosen: Sequence[int], oracle: Oracle = oracle) -> tuple[float, float]:
                found = oracle.sums([*chosen, 0])
                return oracle.hinges.seconds(found), peak_gib(found)

            some = [sums([draw.randrange(count) for count in oracle.counts[:-1]])[1] for _ in range(8)]
            limit = draw.choice([np.inf, max(some), min(some)]) * (1 + 1e-6)  # as no sum of rounded numbers is
            search = LagrangianSearch(model, sums, np.inf, limit)
            search.run()
            prove_small(search)
            chosen = Complete(oracle, limit).solve()
            assert chosen is not None
            seconds, peak = sums(chosen[:-1])
            assert peak <= limit * (1 + ROUNDED)
            assert search.bound <= seconds * (1 + ROUNDED), seed
            assert search.best == pytest.approx(seconds, rel=ROUNDED), seed
            fits += 1
    assert fits > 4


def test_what_cannot_fit_is_refused_with_the_least_that_would_do() -> None:
    problem = next(small_problems(2))
    oracle = whole_problem(problem.setting, problem.bound_layout)
    least = min(oracle.costs(chosen).memory.peak_bytes for chosen in product(*map(range, oracle.counts)))
    with pytest.raises(NoFeasiblePlan, match="no plan was found that fits") as refused:
        problem.solved(0.99 * least)
    assert refused.value.least_bytes == least
    assert problem.solved(least).costs.memory.peak_bytes == least
