"""The solver against exhaustive search and against the complete CP-SAT model, on random problems."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest

from benchmarks.contest.elimination import eliminate
from benchmarks.contest.flat_arrays import COMPILED
from benchmarks.contest.problem import Edge, Problem, Usage, cost_of, excess_of
from benchmarks.contest.reductions import Infeasible, shrink
from benchmarks.contest.solve import solve, solve_exactly
from tests.benchmarks.contest.random_problems import random_problem

CASES = range(260)


def exhaustive(problem: Problem) -> float:
    """The optimum by trying everything; infinite when nothing is possible."""
    best = math.inf
    for strategies in itertools.product(*(range(count) for count in problem.strategy_counts)):
        cost = cost_of(problem, strategies)
        if cost < best and excess_of(problem, strategies) == 0:
            best = cost
    return best


@pytest.mark.parametrize("block", range(20))
def test_solver_oracle_and_exhaustive_search_agree(block: int) -> None:
    for case in range(block, len(CASES), 20):
        problem = random_problem(case, limits=case % 3, whole=case % 2 == 0)
        best = exhaustive(problem)
        oracle = solve_exactly(problem, 60.0)
        solution = solve(problem, 60.0)
        if best == math.inf:
            assert oracle.infeasible
            assert solution.infeasible
            assert solution.strategies is None
            continue
        assert oracle.cost == pytest.approx(best, rel=1e-9)
        assert solution.strategies is not None
        assert excess_of(problem, solution.strategies) == 0
        assert cost_of(problem, solution.strategies) == solution.cost == pytest.approx(best, rel=1e-9)
        assert solution.gap == 0.0


def test_the_random_problems_are_of_all_kinds() -> None:
    outcomes = [exhaustive(random_problem(case, limits=case % 3, whole=True)) for case in range(60)]
    assert sum(outcome == math.inf for outcome in outcomes) >= 3
    assert sum(outcome < math.inf for outcome in outcomes) >= 40
    bound = 0
    for case in range(60):
        problem = random_problem(case, limits=2, whole=True)
        free = Problem(problem.costs, problem.edges)
        bound += exhaustive(problem) > exhaustive(free)
    assert bound >= 15  # limits that change the answer


@pytest.mark.parametrize("block", range(10))
def test_reductions_keep_the_optimum(block: int) -> None:
    smaller = 0
    for case in range(block, len(CASES), 10):
        problem = random_problem(case, limits=case % 3, whole=case % 2 == 0)
        best = exhaustive(problem)
        try:
            shrunk = shrink(problem)
        except Infeasible:
            assert best == math.inf
            continue
        core = solve_exactly(shrunk.problem, 60.0)
        if core.strategies is None:
            assert best == math.inf
            continue
        lifted = shrunk.lift(core.strategies)
        assert excess_of(problem, lifted) == 0
        assert cost_of(problem, lifted) == pytest.approx(best, rel=1e-9)
        assert cost_of(problem, lifted) == pytest.approx(core.cost + shrunk.constant, rel=1e-9)
        lowered = shrunk.lower(lifted)
        assert lowered is not None
        assert cost_of(shrunk.problem, lowered) == pytest.approx(core.cost, rel=1e-9)
        smaller += shrunk.problem.node_count < problem.node_count
    assert smaller > 5


def test_any_solution_is_no_worse_after_it_is_taken_through_the_reductions() -> None:
    for case in range(60):
        problem = random_problem(case, limits=case % 3, whole=True)
        try:
            shrunk = shrink(problem)
        except Infeasible:
            continue
        for strategies in itertools.islice(
            itertools.product(*(range(count) for count in problem.strategy_counts)), 0, None, 7
        ):
            if cost_of(problem, strategies) == math.inf or excess_of(problem, strategies):
                continue
            lowered = shrunk.lower(strategies)
            assert lowered is not None
            lifted = shrunk.lift(lowered)
            assert cost_of(problem, lifted) <= cost_of(problem, strategies)
            assert excess_of(problem, lifted) == 0


def test_elimination_solves_problems_without_limits() -> None:
    for case in range(60):
        problem = random_problem(case, limits=0, whole=True)
        strategies = eliminate(problem)
        assert strategies is not None
        assert cost_of(problem, strategies) == exhaustive(problem)


def test_elimination_declines_tables_that_are_too_large() -> None:
    count = 8
    costs = tuple(np.zeros(4) for _ in range(count))
    edges = tuple(Edge(i, j, np.ones((4, 4))) for i in range(count) for j in range(i))
    assert eliminate(Problem(costs, edges), largest_table=4**6) is None
    assert eliminate(Problem(costs, edges), largest_table=4**8) is not None


@pytest.mark.parametrize("layers", [40, 400])
def test_long_chains_without_limits_are_solved_and_proved(layers: int) -> None:
    problem = chain(layers, limit=None)
    solution = solve(problem, 60.0)
    assert solution.gap == 0.0
    assert solution.strategies is not None
    assert cost_of(problem, solution.strategies) == solution.cost


@pytest.mark.skipif(not COMPILED, reason="without numba the loops are slow")
def test_a_chain_with_a_limit_is_solved_to_a_small_gap() -> None:
    problem = chain(300, limit=0.6)
    solution = solve(problem, 60.0, gap=1e-3)
    assert solution.strategies is not None
    assert excess_of(problem, solution.strategies) == 0
    assert solution.gap <= 1e-3


@pytest.mark.skipif(not COMPILED, reason="without numba the loops are slow")
def test_the_same_seed_gives_the_same_answer() -> None:
    problem = chain(200, limit=0.5)
    solutions = [solve(problem, 120.0, seed=3, gap=2e-3) for _ in range(2)]
    assert solutions[0].gap <= 2e-3
    assert solutions[0].strategies == solutions[1].strategies
    assert solutions[0].bound == solutions[1].bound


def test_the_deadline_is_kept() -> None:
    problem = chain(500, limit=0.4)
    solve(chain(50, limit=0.4), 5.0)  # compiles what is to be compiled
    began = time.process_time()  # not the clock on the wall: a busy machine may be late
    solution = solve(problem, 2.0)
    assert time.process_time() - began < 20
    assert solution.bound <= solution.cost


def test_a_start_is_never_lost() -> None:
    problem = chain(60, limit=0.5)
    first = solve(problem, 20.0, gap=0.05)
    assert first.strategies is not None
    again = solve(problem, 0.0, start=first.strategies)
    assert again.cost <= first.cost


def test_progress_is_told() -> None:
    stages = []
    solve(chain(60, limit=0.5), 5.0, progress=lambda progress: stages.append(progress.stage), gap=0.1)
    assert stages[0] == "shrink"


def test_a_problem_that_no_one_can_solve_is_said_to_be_so() -> None:
    amounts = np.array([3, 4])
    problem = Problem(
        tuple(np.zeros(2) for _ in range(4)),
        usages=tuple(Usage(node, 0, 1, amounts) for node in range(4)),
        limits=np.array([11]),
    )
    solution = solve(problem, 10.0)
    assert solution.infeasible
    assert solution.strategies is None
    assert solution.cost == math.inf


def chain(length: int, limit: float | None) -> Problem:
    """A stack of equal layers of three nodes, and a limit between the least and the most that they can use together."""
    random = np.random.default_rng(length)
    costs = [random.integers(1, 100, 6).astype(float) for _ in range(3)]
    moves = [random.integers(0, 60, (6, 6)).astype(float) for _ in range(4)]
    amounts = [random.integers(1, 50, 6) for _ in range(3)]
    nodes = tuple(costs[node % 3] for node in range(3 * length))
    edges = []
    for layer in range(length):
        first = 3 * layer
        pairs = [(first, first + 1), (first + 1, first + 2), (first, first + 2)]
        if layer + 1 < length:
            pairs.append((first + 2, first + 3))
        edges += [Edge(one, other, moves[kind]) for kind, (one, other) in enumerate(pairs)]
    if limit is None:
        return Problem(nodes, tuple(edges))
    least = sum(int(amounts[node % 3].min()) for node in range(3 * length))
    most = sum(int(amounts[node % 3].max()) for node in range(3 * length))
    usages = tuple(Usage(node, 0, 1, amounts[node % 3]) for node in range(3 * length))
    return Problem(nodes, tuple(edges), usages, np.array([int(least + limit * 0.3 * (most - least))]))
