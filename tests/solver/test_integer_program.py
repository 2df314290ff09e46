"""The integer program of a model: against all assignments, against the search, against its own relaxation.

Random small problems on one to three axes, with limits on memory, micro-batches and layers that may be recomputed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import islice, product
from math import prod

import numpy as np
import pytest
from ortools.math_opt.core.python import solver as core
from ortools.math_opt.io.python import mps_converter
from ortools.math_opt.python import mathopt

import autopar
from autopar.sharding.layout.language import Layout
from autopar.solver import Floats, relative_gap
from autopar.solver.infeasible import NoFeasiblePlan
from autopar.solver.integer import formulate as formulation
from autopar.solver.integer.certificate import certify
from autopar.solver.integer.choice import INTEGER_SOLVERS, parse_solver
from autopar.solver.integer.formulate import TooLarge, count_entries, formulate
from autopar.solver.integer.formulation import FormulatedModel
from autopar.solver.integer.mathopt_solver import Answer, relaxed, solve_program
from autopar.solver.integer.solve_formulated import solve_formulated, solve_relaxation
from autopar.solver.integer.write_program import program_text
from autopar.solver.model.build import build, plan_of
from autopar.solver.model.model import Model
from autopar.solver.model.objective import Hinges, Sum, every_peak_gib
from autopar.solver.solve import SolvedPlan, solve_plan
from tests.solver.random_problems import Drawn, drawn, program

AXES = ({"a": 2}, {"a": 2, "b": 4}, {"a": 2, "b": 2, "c": 2})
MOST_LISTED = 2**12
# Relative: the solvers' tolerances.
CLOSE = 1e-6


@cache
def problems(seed: int, most: int = MOST_LISTED) -> tuple[tuple[Drawn, Model], ...]:
    """Return problems of one program whose assignments can be listed, each with its model."""
    return tuple(islice(_problems(seed, most), 2))


def _problems(seed: int, most: int) -> Iterator[tuple[Drawn, Model]]:
    draw = random.Random(seed)
    axes = AXES[seed % 3]
    graph = program(seed, 2 if len(axes) == 1 else 1)
    for lines in range(2, 34, 2):  # the more a layout says, the less is open
        problem = drawn(graph, axes, draw, lines)
        layers = tuple(graph.ops_of_layers) if problem.setting.trains else ()
        try:
            model = build(problem.setting, problem.bound_layout, regather=True, open_layers=layers)
        except autopar.AutoparError:  # the layout asks for what cannot be had
            continue
        if 1 < prod(len(variable.states) for variable in model.variables) <= most:
            yield problem, model


def every_assignment(model: Model) -> list[tuple[int, ...]]:
    return list(product(*(range(len(variable.states)) for variable in model.variables)))


def every_sum(model: Model) -> Floats:
    return np.array([model.sums(chosen) for chosen in every_assignment(model)])


def optimum(made: FormulatedModel, solver: str) -> float:
    """Return the seconds of the model at the program's optimum, which is what the program says."""
    found = solve_formulated(made, solver, "highs", gap=1e-9)
    assert found.point is not None
    assert made.program.violation(found.point) <= 1e-4
    seconds = found.objective * made.unit_seconds
    assert found.bound * made.unit_seconds <= seconds * (1 + CLOSE)
    return seconds


SEEDS = [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 60))]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_optimum_is_that_of_all_assignments(seed: int) -> None:
    """Time of the best assignment of the model, free and under limits on memory."""
    solver = list(INTEGER_SOLVERS)[seed % 3]
    for _, model in problems(seed):
        sums = every_sum(model)
        seconds, gib = Hinges.of(model.setting).every_seconds(sums), every_peak_gib(sums)
        gib = np.where(sums[:, Sum.FORBIDDEN] > 0, np.inf, gib)
        for limit in (np.inf, gib.min(), np.quantile(gib[np.isfinite(gib)], 0.3)):
            least = seconds[gib <= limit * (1 + 1e-12)].min()
            made = formulate(model, limit, shares=False)
            assert optimum(made, solver) == pytest.approx(least, rel=CLOSE)
            point, certificate, _ = solve_relaxation(made.program, "highs")
            assert point is not None
            assert certificate is not None
            assert certificate.bound * made.unit_seconds <= least * (1 + 1e-9)


def test_a_wrong_cost_is_found() -> None:
    """The comparison above fails if the program forgets what ops take of the device."""
    (_, model), *_ = problems(0)
    made = formulate(model, shares=False)
    rows = [block.start for block in made.program.rows if block.name in ("sum.device", "sum.host")]
    ops = [ids.ravel() for ids, one in zip(made.states, model.variables, strict=True) if one.kind == "op"]
    forgotten = np.isin(made.program.column_of, np.concatenate(ops)) & np.isin(made.program.row_of, rows)
    assert forgotten.any()
    wrong = replace(made.program, values=np.where(forgotten, 0.0, made.program.values))
    least = Hinges.of(model.setting).every_seconds(every_sum(model)).min()
    assert optimum(replace(made, program=wrong), "highs") < least * (1 - CLOSE)


@pytest.mark.parametrize("seed", SEEDS[:6])
def test_no_plan_is_below_the_bound_that_shares_reshards(seed: int) -> None:
    """`evaluate` counts a reshard that several ops share once. So does the program, and it is below every plan."""
    for problem, model in problems(seed):
        made = formulate(model)
        least = optimum(made, "highs")
        assert least <= optimum(formulate(model, shares=False), "highs") * (1 + CLOSE)
        sums = every_sum(model)
        allowed = np.flatnonzero(sums[:, Sum.FORBIDDEN] == 0)
        order = allowed[np.argsort(Hinges.of(model.setting).every_seconds(sums[allowed]))]
        every = every_assignment(model)
        for place in order[:40].tolist():
            plan = plan_of(model, every[place])
            assert least <= problem.setting.costs(plan).step_seconds * (1 + CLOSE)


def solved(problem: Drawn, solver: str, limit_bytes: float = np.inf, time_limit: float = 600.0) -> SolvedPlan:
    return solve_plan(
        problem.graph,
        problem.axes,
        problem.cluster,
        layout=problem.layout,
        options=problem.options,
        memory_bytes=limit_bytes,
        strategies=False,
        time_limit=time_limit,
        solver=parse_solver(solver),
    )


@pytest.mark.parametrize("seed", SEEDS[:30])
def test_the_search_and_the_program_agree(seed: int) -> None:
    solver = f"ilp:{list(INTEGER_SOLVERS)[seed % 3]}"
    for problem, _ in problems(seed):
        search, ilp, lp = (solved(problem, name) for name in ("search", solver, "lp"))
        assert ilp.costs.step_seconds == pytest.approx(search.costs.step_seconds, rel=1e-4)
        assert lp.costs.step_seconds == pytest.approx(search.costs.step_seconds, rel=1e-4)
        for one in (search, ilp, lp):
            assert one.bound_seconds <= search.costs.step_seconds * (1 + 1e-9)
        assert ilp.bound_by in (parse_solver(solver).title, "peak rate of the devices")
        assert relative_gap(ilp.costs.step_seconds, ilp.bound_seconds) <= 1e-2


@pytest.mark.slow
def test_plans_under_limits_are_within_their_bounds() -> None:
    """Under a limit the model's memory is an estimate: where plans differ, each is at or above the other's bound."""
    same = count = 0
    for seed in range(30):
        solver = f"ilp:{list(INTEGER_SOLVERS)[seed % 3]}"
        for problem, _ in problems(seed):
            peak = solved(problem, "search").costs.memory.peak_bytes
            try:
                search = solved(problem, "search", 0.8 * peak)
            except NoFeasiblePlan:
                continue
            try:
                ilp = solved(problem, solver, 0.8 * peak)
            except NoFeasiblePlan:
                count += 1
                continue
            assert ilp.costs.memory.peak_bytes <= 0.8 * peak
            assert ilp.bound_seconds <= search.costs.step_seconds * (1 + 1e-6)
            assert search.bound_seconds <= ilp.costs.step_seconds * (1 + 1e-6)
            count += 1
            same += relative_gap(ilp.costs.step_seconds, search.costs.step_seconds) <= 1e-4
    assert same >= 0.8 * count > 0


# -- the certificate


def test_no_duals_prove_more_than_the_optimum() -> None:
    """The solver's duals prove the relaxation's optimum, others less, whatever their signs."""
    draw = np.random.default_rng(0)
    for _, model in problems(0):
        made = formulate(model)
        for name in ("highs", "glop"):
            answer = solve_program(relaxed(made.program), name)
            assert answer.point is not None
            assert answer.duals is not None
            value = float(made.program.costs @ answer.point + made.program.constant)
            assert certify(made.program, answer.duals).bound == pytest.approx(value, rel=CLOSE)
            for scale in (1e-3, 1.0, 1e3):
                wrong = answer.duals + scale * draw.standard_normal(len(answer.duals))
                assert certify(made.program, wrong).bound <= value * (1 + CLOSE)


@pytest.mark.slow
def test_duals_that_are_not_optimal_prove_what_they_prove() -> None:
    """PDLP stops at a tolerance, and before that with the time."""
    for _, model in problems(0):
        made = formulate(model)
        least = optimum(made, "highs")
        point, certificate, _ = solve_relaxation(made.program, "pdlp")
        assert point is not None
        assert certificate is not None
        assert 0.999 * least <= certificate.bound * made.unit_seconds <= least * (1 + 1e-9)


def test_reduced_costs_drop_no_column_of_the_optimum() -> None:
    for _, model in problems(1):
        made = formulate(model)
        found = solve_formulated(made, "highs", "highs", gap=1e-9)
        _, certificate, _ = solve_relaxation(made.program, "highs")
        assert found.point is not None
        assert certificate is not None
        used = found.point > 0.5
        assert not certificate.beyond(found.objective * (1 + CLOSE))[used].any()
        assert certificate.beyond(certificate.bound * 1.001).any()


# -- files and limits


Terms = dict[str, float]


def read_lp(text: str) -> tuple[Terms, dict[str, tuple[Terms, str, float]], set[str]]:
    """Return objective, constraints and whole variables of an LP file."""
    body = " ".join(line for line in text.splitlines() if not line.startswith("\\"))
    _, objective, rows, _, whole = re.split(r"Minimize|Subject To|Bounds|Generals|End", body)[:5]
    found = {}
    for name, terms, sign, side in re.findall(r"(\S+): ((?:[+-]\S+ \S+ *|constant )+)(=|<=|>=) (\S+)", rows):
        found[name] = _terms(terms), sign, float(side)
    found.pop("fixed", None)
    return _terms(objective.split(":")[1]), found, set(whole.split())


def _terms(text: str) -> Terms:
    return {name: float(value) for value, name in re.findall(r"([+-]\S+) (\S+)", text) if name != "constant"}


def read_mps(text: str) -> tuple[Terms, dict[str, tuple[Terms, str, float]], set[str]]:
    """Return objective, constraints and whole variables of an MPS file, by OR-Tools."""
    read = mps_converter.mps_to_model_proto(text)
    columns, entries = list(read.variables.names), read.linear_constraint_matrix
    rows: list[Terms] = [{} for _ in read.linear_constraints.names]
    for row, column, value in zip(entries.row_ids, entries.column_ids, entries.coefficients, strict=True):
        rows[row][columns[column]] = value
    found = {}
    bounds = read.linear_constraints
    for name, terms, low, high in zip(bounds.names, rows, bounds.lower_bounds, bounds.upper_bounds, strict=True):
        sign, side = ("=", low) if low == high else (">=", low) if np.isinf(high) else ("<=", high)
        found[name] = terms, sign, side
    priced = read.objective.linear_coefficients
    objective = {columns[column]: value for column, value in zip(priced.ids, priced.values, strict=True)}
    return objective, found, {name for name, whole in zip(columns, read.variables.integers, strict=True) if whole}


def test_files_hold_the_program() -> None:
    """Both formats, read by other readers than the writers, have the same optimum."""
    _, model = problems(0)[0]
    made = formulate(model)
    value = solve_formulated(made, "highs", "highs").objective
    mps, lp = program_text(made, ".mps"), program_text(made, ".lp")
    result = core.solve(
        mps_converter.mps_to_model_proto(mps),
        mathopt.SolverType.GSCIP.value,
        mathopt.StreamableSolverInitArguments().to_proto(),
        mathopt.SolveParameters().to_proto(),
        mathopt.ModelSolveParameters().to_proto(),
        None,
        mathopt.CallbackRegistration().to_proto(),
        None,
        None,
    )
    assert mathopt.parse_termination(result.termination).objective_bounds.primal_bound == pytest.approx(value, rel=1e-6)
    assert read_lp(lp) == read_mps(mps)
    for text in (mps, lp):
        assert "op.layers.0/" in text
        assert "one unit of time is" in text


def test_a_program_that_is_too_large_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, model = problems(0)[0]
    assert count_entries(model) > 1
    monkeypatch.setattr(formulation, "MOST_ENTRIES", 1)
    with pytest.raises(
        TooLarge, match=r"too large: \d+ decisions, \d+ states and \d+ pairs of shardings; at most 1 .*"
    ):
        solved(problem, "ilp")


def test_a_program_without_time_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    # A fast machine solves so small a program in the least time that a solver takes.
    nothing = Answer("NO_SOLUTION_FOUND", 0.0, None, -np.inf)
    monkeypatch.setattr("autopar.solver.integer.solve_formulated.solve_program", lambda *_: nothing)
    problem, _ = problems(0)[0]
    request = replace(problem, layout=Layout(()))
    with pytest.raises(
        autopar.AutoparError, match=r"the integer program \(scip\) with \d+ pairs .* no solution after 0 s"
    ):
        solved(request, "ilp:scip", time_limit=1e-9)


def test_unknown_solvers_are_named() -> None:
    with pytest.raises(autopar.AutoparError, match="unknown solver 'ilp:high'; did you mean 'ilp:highs'"):
        parse_solver("ilp:high")
    assert str(parse_solver("ilp")) == "ilp:highs"
    assert str(parse_solver("search")) == "search"
