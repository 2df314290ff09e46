"""`python -m benchmarks.contest`: its output, its answer and its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.contest.__main__ import main
from benchmarks.contest.contest_format import read_problem
from benchmarks.contest.problem import cost_of, excess_of
from tests.benchmarks.contest.test_contest_format import INSTANCE, text_with


@pytest.fixture
def instance(tmp_path: Path) -> Path:
    path = tmp_path / "instance.json"
    path.write_text(json.dumps(INSTANCE), encoding="utf-8")
    return path


def test_the_answer_is_printed_and_written(instance: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = instance.parent / "answer.json"
    assert main([str(instance), "--time-limit", "20", "--seed", "1", "--output", str(output)]) == 0
    answer = json.loads(output.read_text())
    problem = read_problem(instance)
    assert cost_of(problem, answer["solution"]) == answer["cost"] == answer["bound"]
    assert excess_of(problem, answer["solution"]) == 0
    printed = capsys.readouterr()
    assert "5 nodes, 9 strategies, 5 edges, 4 limits" in printed.out
    assert f"cost   {answer['cost']}\n" in printed.out
    assert "gap    0.0000 %, proved optimal\n" in printed.out
    assert "shrink" in printed.out
    assert not printed.err


def test_no_solution_is_exit_code_one(instance: Path, capsys: pytest.CaptureFixture[str]) -> None:
    instance.write_text(text_with("problem.usage_limit", 49), encoding="utf-8")
    output = instance.parent / "answer.json"
    assert main([str(instance), "--output", str(output)]) == 1
    assert "there is none: proved" in capsys.readouterr().err
    assert json.loads(output.read_text()) == {"solution": None, "cost": None, "bound": None}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--time-limit", "0"], "--time-limit 0: expected a number of seconds above 0"),
        (["--time-limit", "nan"], "--time-limit nan: expected a number of seconds above 0"),
        (["--seed", "-1"], "--seed -1: expected a whole number from 0 up"),
        (["--output", "/no/such/folder/answer.json"], "there is no folder /no/such/folder"),
    ],
)
def test_wrong_words_are_exit_code_two(
    instance: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(instance), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_malformed_file_is_exit_code_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.json").write_text("[1, 2", encoding="utf-8")
    assert main([str(tmp_path / "bad.json")]) == 2
    assert "bad.json: is not JSON" in capsys.readouterr().err
    assert main([str(tmp_path / "absent.json")]) == 2
    assert "there is no such file" in capsys.readouterr().err
