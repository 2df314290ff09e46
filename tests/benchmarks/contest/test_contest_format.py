"""The contest's format: what is read, what is written, and what is said of files that are not in it."""

from __future__ import annotations

import copy
import gzip
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.contest import contest_format
from benchmarks.contest.contest_format import problem_from_text, read_problem, write_problem
from benchmarks.contest.problem import Edge, Problem, ProblemError, Usage, cost_of, excess_of, loads_of
from benchmarks.contest.solve import solve
from tests.benchmarks.contest.random_problems import random_problem

INSTANCE: dict[str, Any] = {
    "problem": {
        "name": "[7] small [not a list]",
        "nodes": {
            "intervals": [[30, 70], [40, 70], [50, 120], [110, 140], [110, 150]],
            "costs": [[15], [55, 65], [25, 45, 35], [85, 75], [95]],
            "usages": [[10], [25, 25], [15, 20, 15], [10, 10], [15]],
        },
        "edges": {
            "nodes": [[0, 1], [0, 2], [1, 3], [2, 4], [3, 4]],
            "costs": [[30, 40], [50, 10, 40], [90, 10, 20, 80], [60, 20, 30], [70, 60]],
        },
        "usage_limit": 50,
    }
}


def text_with(path: str, value: Any) -> str:
    """The instance with one value changed; `path` is dotted, numbers index lists; `...` deletes."""
    changed = copy.deepcopy(INSTANCE)
    *steps, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    place: Any = changed
    for step in steps:
        place = place[step]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return json.dumps(changed)


def test_an_instance_is_read_and_solved() -> None:
    problem = problem_from_text(json.dumps(INSTANCE, indent=2))
    assert problem.name.strip() == "[7] small [not a list]"
    assert problem.strategy_counts == [1, 2, 3, 2, 1]
    assert problem.edges[2].costs.tolist() == [[90.0, 10.0], [20.0, 80.0]]
    # Limits stand where intervals start: 30, 40, 50, 110.
    assert loads_of(problem, [0, 0, 1, 0, 0]).tolist() == [10, 35, 55, 45]
    assert excess_of(problem, [0, 0, 1, 0, 0]) == 5
    solution = solve(problem)
    assert solution.strategies is not None
    assert solution.gap == 0
    # By hand: node 2 may not take strategy 1 while node 1 is alive.
    best = min(
        cost_of(problem, [0, second, third, fourth, 0])
        for second in range(2)
        for third in (0, 2)
        for fourth in range(2)
    )
    assert solution.cost == best


def test_a_huge_cost_is_impossible_and_an_empty_interval_uses_nothing() -> None:
    problem = problem_from_text(text_with("problem.edges.costs.0", [10**18, 10**25]))
    assert np.isinf(problem.edges[0].costs).all()
    assert solve(problem).infeasible
    problem = problem_from_text(text_with("problem.nodes.intervals.2", [60, 60]))
    assert all(usage.node != 2 for usage in problem.usages)


@pytest.mark.parametrize("spelt", ['"[1"', '"\\u005b1"', '"\\u005B1"', '"\\u0000[1"'])
def test_no_string_is_read_as_a_list(spelt: str) -> None:
    """Lists are replaced by marks while a file is read; what looks like a mark, however it is spelt, is a string."""
    text = json.dumps(INSTANCE)
    with pytest.raises(ProblemError, match=r"nodes\.costs\[0\] is .*; it should be a list of numbers"):
        problem_from_text(text.replace('"costs": [[15]', f'"costs": [{spelt}', 1))
    assert problem_from_text(text.replace('"[7] small [not a list]"', spelt, 1)).name.endswith("[1")


def test_sizes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of numbers, and of what a compressed file unpacks to."""
    for path, value, message in (
        ("problem.usage_limit", -(10**400), "usage_limit is -1000.*; it should be above -2^62"),
        ("problem.nodes.costs.0.0", -(10**400), r"nodes.costs\[0\] holds a cost that is no number or below -10\^18"),
    ):
        with pytest.raises(ProblemError, match=message.replace("-2^62", r"-2\^62")):
            problem_from_text(text_with(path, value))
    huge = json.dumps(INSTANCE, indent=1).replace("15", "9" * 5000, 1)
    with pytest.raises(ProblemError, match=r"^instance: line \d+ column \d+ holds a number of 5,001 digits$"):
        problem_from_text(huge)
    assert math.isinf(problem_from_text(text_with("problem.nodes.costs.0.0", 10**400)).costs[0][0])
    monkeypatch.setattr(contest_format, "LARGEST_TEXT", 10_000)
    for name, data in (("bomb.json.gz", gzip.compress(b" " * 10**7)), ("long.json", b" " * 10_001)):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ProblemError, match=f"{name}: is longer than 10,000 bytes, which no instance is"):
            read_problem(tmp_path / name)


def test_without_a_limit_or_edges() -> None:
    problem = problem_from_text(text_with("problem.usage_limit", ...))
    assert not len(problem.limits)
    problem = problem_from_text(text_with("problem.edges", ...))
    assert not problem.edges


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("problem", [], "here: problem is []; it should be an object"),
        ("problem", ..., "here: problem is missing"),
        ("problem.nodes", ..., "here: problem.nodes is missing"),
        ("problem.nodes.costs", 3, "here: nodes.costs is 3; it should be a list"),
        ("problem.nodes.costs", [1, 2], "here: nodes.costs[0] is 1; it should be a list of numbers"),
        ("problem.nodes.costs.1", "x", 'here: nodes.costs[1] is "x"; it should be a list of numbers'),
        ("problem.nodes.costs.1", [], "here: nodes.costs[1] is empty; there should be at least one cost"),
        ("problem.nodes.costs.1", [1, None], "here: nodes.costs[1] holds null; costs are numbers"),
        ("problem.nodes.costs.1", [1, True], "here: nodes.costs[1] holds true; costs are numbers"),
        ("problem.nodes.costs.1", [1, math.nan], "here: nodes.costs[1] holds a cost that is no number or below -10^18"),
        ("problem.nodes.usages.1", [1], "here: nodes.usages[1] has 1 values and nodes.costs[1] has 2"),
        ("problem.nodes.usages.1", [1.5, 2], "here: nodes.usages[1] holds 1.5; usages are whole numbers below 2^62"),
        ("problem.nodes.usages", [[1]], "here: nodes.usages has 1 entries and nodes.costs has 5"),
        ("problem.nodes.usages.0", [2**62 - 1], "here: nodes.usages add up to 4.61e+18; sums are kept in 64 bits"),
        ("problem.nodes.intervals.1", [40], "here: nodes.intervals[1] is [40]; it should be [start, end], in whole"),
        ("problem.nodes.intervals.1", [40, 39], "here: nodes.intervals[1] ends before it starts: [40, 39]"),
        ("problem.edges.nodes.1", [0, 9], "here: edges.nodes[1] names node 9; there are nodes 0 to 4"),
        ("problem.edges.nodes.1", [2, 2], "here: edges.nodes[1] joins node 2 to itself"),
        ("problem.edges.nodes.1", [2], "here: edges.nodes[1] is [2]; it should be the numbers of two nodes"),
        ("problem.edges.costs.1", [1, 2], "here: edges.costs[1] has 2 values; nodes 0 and 2 have 1 × 3 strategies"),
        ("problem.edges.costs", [[1]], "here: edges.costs has 1 entries and edges.nodes has 5"),
        ("problem.usage_limit", "much", 'here: usage_limit is "much"; it should be a whole number'),
        ("problem.usage_limit", [1, 2], "here: usage_limit is [1, 2]; it should be a whole number"),
        ("problem.usage_limit", 1.5, "here: usage_limit is 1.5; it should be a whole number"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(path: str, value: Any, message: str) -> None:
    with pytest.raises(ProblemError) as caught:
        problem_from_text(text_with(path, value), "here")
    assert str(caught.value).startswith(message)


def test_what_is_no_json_is_said_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match=r"here: is not JSON: Expecting value: line 1 column 13"):
        problem_from_text('{"problem": oops}', "here")
    with pytest.raises(ProblemError, match=r"here: is not JSON: .*line 1 column 16"):
        problem_from_text('{"problem": [1,]}', "here")
    with pytest.raises(ProblemError, match="there is no such file"):
        read_problem(tmp_path / "absent.json")
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(json.dumps(INSTANCE).encode())[:-20])
    with pytest.raises(ProblemError, match=r"cut\.json\.gz: cannot be read"):
        read_problem(tmp_path / "cut.json.gz")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProblemError, match="is not text"):
        read_problem(tmp_path / "binary.json")
    with pytest.raises(ProblemError, match="cannot be read"):
        read_problem(tmp_path)


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_what_is_written_is_read_again(tmp_path: Path, suffix: str) -> None:
    for case in range(10):
        drawn = random_problem(case, limits=1, whole=case % 2 == 0)
        once = {usage.node: usage for usage in drawn.usages if usage.start < usage.end}
        problem = Problem(drawn.costs, drawn.edges, tuple(once.values()), drawn.limits, "drawn")
        write_problem(problem, tmp_path / f"problem{suffix}")
        again = read_problem(tmp_path / f"problem{suffix}")
        assert again.name == "drawn"
        for _ in range(20):
            strategies = [int(np.random.default_rng(case).integers(count)) for count in problem.strategy_counts]
            assert cost_of(again, strategies) == cost_of(problem, strategies)
            assert excess_of(again, strategies) == (excess_of(problem, strategies) if once else 0)


def test_what_the_format_cannot_say_is_refused(tmp_path: Path) -> None:
    one = Usage(0, 0, 1, np.array([1]))
    two_limits = Problem((np.zeros(1),), (), (one,), np.array([1, 2]))
    with pytest.raises(ProblemError, match="one usage limit; this problem has several"):
        write_problem(two_limits, tmp_path / "a.json")
    two_usages = Problem((np.zeros(1),), (), (one, one), np.array([1]))
    with pytest.raises(ProblemError, match="one usage per node; node 0 has several"):
        write_problem(two_usages, tmp_path / "a.json")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Problem((np.zeros(0),)), "node 0 has no strategy"),
        (lambda: Problem((np.zeros(1),), (Edge(0, 1, np.zeros((1, 1))),)), "edge 0 names node 1"),
        (lambda: Problem((np.zeros(1),), (Edge(0, 0, np.zeros((1, 1))),)), "edge 0 joins node 0 to itself"),
        (lambda: Problem((np.zeros(1), np.zeros(2)), (Edge(0, 1, np.zeros((2, 1))),)), r"edge 0 has costs of shape"),
        (lambda: Problem((np.zeros(1),), (), (Usage(1, 0, 0, np.zeros(1, int)),)), "a usage names node 1"),
        (lambda: Problem((np.zeros(1),), (), (Usage(0, 0, 0, np.zeros(2, int)),)), "a usage of node 0 has 2 amounts"),
        (lambda: Problem((np.zeros(1),), (), (Usage(0, 0, 1, np.zeros(1, int)),)), "covers limits 0 to 1; there are 0"),
    ],
)
def test_a_problem_that_makes_no_sense_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        make()


def test_solutions_of_the_wrong_form_are_refused() -> None:
    problem = problem_from_text(json.dumps(INSTANCE))
    with pytest.raises(ProblemError, match="4 strategies are given for 5 nodes"):
        cost_of(problem, [0, 0, 0, 0])
    with pytest.raises(ProblemError, match="node 1 is given strategy 2; it has 2"):
        cost_of(problem, [0, 2, 0, 0, 0])


@pytest.mark.skipif("AUTOPAR_DATA" not in os.environ, reason="AUTOPAR_DATA does not name a folder of data")
def test_the_published_example_is_read() -> None:
    problem = read_problem(Path(os.environ["AUTOPAR_DATA"]) / "iopddl" / "example.json")
    assert problem.node_count == 5
    assert solve(problem).gap == 0
