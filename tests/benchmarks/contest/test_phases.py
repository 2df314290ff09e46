"""The dual and the local search on problems so small that the whole truth is known."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from benchmarks.contest import annealing, phases, reductions, solve
from benchmarks.contest.annealing import AnnealingPlan, AnnealingResult, anneal, cost_in, repair
from benchmarks.contest.dual import Dual, MessageDual, NarrowDual, loads_at
from benchmarks.contest.elimination import plan_elimination
from benchmarks.contest.flat_arrays import COMPILED, arrays_of, impossible_price, priced_costs
from benchmarks.contest.forest_moves import change, least_left, scratch_for, state_of, tree_of
from benchmarks.contest.problem import Edge, Problem, Usage, cost_of, excess_of, loads_of
from tests.benchmarks.contest.random_problems import random_problem

pytestmark = pytest.mark.skipif(not COMPILED, reason="numba is not installed: the loops are slow")


def solutions(problem: Problem) -> list[tuple[float, tuple[int, ...]]]:
    """All solutions with their costs."""
    found = []
    for strategies in itertools.product(*(range(count) for count in problem.strategy_counts)):
        cost = cost_of(problem, strategies)
        if cost < math.inf and excess_of(problem, strategies) == 0:
            found.append((cost, strategies))
    return found


@pytest.mark.parametrize("narrow", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_bounds_hold_at_any_prices_and_reduced_costs_hold_for_any_solution(narrow: bool) -> None:
    tight = 0
    for case in range(60):
        problem = random_problem(case, limits=case % 3, whole=True)
        known = solutions(problem)
        if not known:
            continue
        arrays = arrays_of(problem)
        dual: Dual = MessageDual(arrays)
        if narrow:
            plan = plan_elimination(problem, 10**6, ceiling=impossible_price(problem))
            assert plan is not None
            dual = NarrowDual(arrays, plan)
        optimum = min(cost for cost, _ in known)
        for _ in range(15):
            guess, left = dual.round(optimum)
            assert (left == arrays.limits - loads_at(arrays, guess)).all()
            assert dual.bound <= optimum + 1e-6
        answer = dual.reduced()
        assert answer is not None
        bound, lifts = answer
        assert bound <= optimum + 1e-6
        tight += bound > 0.99 * optimum
        for cost, strategies in known:
            assert (bound + lifts[arrays.offsets[:-1] + np.array(strategies)] <= cost + 1e-6).all()
    assert tight > 20  # the bounds are worth something, too


def test_heeding_keeps_the_limits_that_its_base_keeps() -> None:
    bases = 0
    for case in range(60):
        problem = random_problem(case, limits=2, whole=True)
        arrays = arrays_of(problem)
        plan = plan_elimination(problem, 10**6, ceiling=impossible_price(problem))
        assert plan is not None
        bases += len(solutions(problem)[:3])
        for dual in (MessageDual(arrays), NarrowDual(arrays, plan)):
            for cost, base in solutions(problem)[:3]:
                dual.round(cost)
                guess = dual.heeding(np.array(base), 0.5)
                assert excess_of(problem, guess.tolist()) == 0
    assert bases > 50


class Clock:
    """Time passes when someone looks at it: what is found in some time is the same on every machine, however busy."""

    def __init__(self) -> None:
        self.readings = itertools.count()

    def monotonic(self) -> float:
        return next(self.readings) * 1e-4


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    for module in (annealing, reductions, solve, phases):
        monkeypatch.setattr(module, "time", found)
    return found


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("block", range(5))
def test_without_the_exact_model_the_stages_find_optima_too(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solve, "SMALL_MODEL", -1)
    monkeypatch.setattr(solve, "LARGE_MODEL", -1)
    if block % 2:
        monkeypatch.setattr(phases, "NARROW_SUM", -1)  # message passing instead of elimination
    found = total = 0
    for case in range(block, 60, 5):
        problem = random_problem(case, limits=2, whole=True)
        known = solutions(problem)
        solution = solve.solve(problem, 0.4, seed=case)
        if not known:
            assert solution.strategies is None
            continue
        optimum = min(cost for cost, _ in known)
        total += 1
        assert solution.bound <= optimum + 1e-6
        if solution.strategies is None:
            continue
        assert excess_of(problem, solution.strategies) == 0
        assert solution.cost == cost_of(problem, solution.strategies) >= optimum
        found += solution.cost == optimum
    assert total >= 5
    assert found >= 0.8 * total


@pytest.mark.slow
def test_annealing_keeps_its_books() -> None:
    annealed = 0
    for case in range(30):
        problem = random_problem(case, limits=2, whole=True)
        known = solutions(problem)
        if not known:
            continue
        annealed += 1
        arrays = arrays_of(problem)
        start = max(known)
        found, _ = anneal(
            arrays,
            AnnealingResult(start[0], np.array(start[1])),
            AnnealingPlan(case, 500, 5.0, 0.1),
            time.monotonic() + 60,
        )
        assert excess_of(problem, found.strategies.tolist()) == 0
        assert found.cost == cost_of(problem, found.strategies.tolist()) <= start[0]
        assert cost_in(arrays, found.strategies) == found.cost
    assert annealed > 10


def test_repair_finds_solutions_from_anything(clock: Clock) -> None:
    failed = 0
    for case in range(60):
        problem = random_problem(case, limits=2, whole=True)
        known = solutions(problem)
        if not known:
            continue
        arrays = arrays_of(problem)
        start = np.array([count - 1 for count in problem.strategy_counts])
        repaired = repair(arrays, start, impossible_price(problem), case, clock.monotonic() + 2)
        failed += repaired is None
        if repaired is not None:
            assert (math.inf, 1) > (cost_of(problem, repaired.tolist()), excess_of(problem, repaired.tolist()))
    assert failed <= 3


def test_the_tree_of_limits_is_what_a_plain_list_is() -> None:
    random = np.random.default_rng(0)
    for count in (1, 2, 5, 33):
        plain = random.integers(0, 100, count)
        least, added = tree_of(plain)
        for _ in range(200):
            start, end = sorted(random.choice(count + 1, 2, replace=False).tolist())
            assert least_left(least, added, start, end) == plain[start:end].min()
            amount = int(random.integers(-9, 10))
            change(least, added, start, end, amount)
            plain[start:end] += amount


def test_prices_are_paid_for_every_unit_of_usage() -> None:
    problem = random_problem(5, limits=2, whole=True)
    arrays = arrays_of(problem)
    prices = np.arange(1.0, len(arrays.limits) + 1)
    strategies = np.zeros(problem.node_count, dtype=np.int64)
    places = arrays.offsets[:-1] + strategies
    paid = priced_costs(arrays, prices)[places].sum() - arrays.costs[places].sum()
    assert paid == pytest.approx(float(prices @ loads_of(problem, strategies.tolist())))


def test_conditional_costs_are_those_of_the_neighbours_as_they_are() -> None:
    problem = random_problem(7, limits=0, whole=True)
    arrays = arrays_of(Problem(problem.costs, problem.edges))
    strategies = np.zeros(problem.node_count, dtype=np.int64)
    state = state_of(arrays, arrays.costs, strategies, arrays.limits)
    assert len(scratch_for(arrays).region) == problem.node_count
    price = impossible_price(problem)
    for node, count in enumerate(problem.strategy_counts):
        for strategy in range(count):
            changed = [strategy if other == node else 0 for other in range(problem.node_count)]
            expected = min(float(problem.costs[node][strategy]), price) + sum(
                min(float(edge.costs[changed[edge.first], changed[edge.second]]), price)
                for edge in problem.edges
                if node in (edge.first, edge.second)
            )
            assert state.conditional[arrays.offsets[node] + strategy] == expected


def test_plain_python_gives_the_same_answer_as_compiled_loops() -> None:
    script = (
        "import numpy as np\n"
        "from benchmarks.contest import solve as solver\n"
        "from benchmarks.contest.flat_arrays import COMPILED\n"
        "from tests.benchmarks.contest.test_solve import chain\n"
        "solver.SMALL_MODEL = solver.LARGE_MODEL = -1\n"
        "answer = solver.solve(chain(8, 0.5), 120.0, seed=1, gap=0.15)\n"
        "print(COMPILED, answer.strategies, answer.bound)\n"
    )
    outputs = []
    for disabled in ("0", "1"):
        environment = {**os.environ, "NUMBA_DISABLE_JIT": disabled}
        result = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        outputs.append(result.stdout.split(maxsplit=1))
    assert [output[0] for output in outputs] == ["True", "False"]
    assert outputs[0][1] == outputs[1][1]


@pytest.mark.slow
def test_a_graph_in_which_every_pair_is_an_edge_needs_message_passing() -> None:
    random = np.random.default_rng(1)
    count = 14
    costs = tuple(random.integers(0, 50, 8).astype(float) for _ in range(count))
    edges = tuple(Edge(i, j, random.integers(0, 50, (8, 8)).astype(float)) for i in range(count) for j in range(i))
    amounts = tuple(Usage(node, 0, 1, random.integers(1, 50, 8)) for node in range(count))
    problem = Problem(costs, edges, amounts, np.array([count * 15]))
    assert plan_elimination(problem, phases.NARROW_TABLE, phases.NARROW_SUM) is None
    solution = solve.solve(problem, 4.0)
    assert solution.strategies is not None
    assert excess_of(problem, solution.strategies) == 0
    assert solution.bound <= solution.cost
