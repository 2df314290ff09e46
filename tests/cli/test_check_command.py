"""`autopar check`: a layout as a contract, and what is said of one that is broken or wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.cli import main

ROOT = Path(__file__).parents[2]
GPT = f"{ROOT}/examples/gpt.py:gpt"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["check", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_what_holds(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, GPT, "--layout", "fsdp", "--mesh", "fsdp=2")
    assert (code, err) == (0, "")
    assert out.startswith(f"fsdp on fsdp=2 holds for {GPT}: ")
    assert out.endswith(" collectives, 1 contract kept.\n")


@pytest.mark.parametrize(
    ("line", "code", "reason"),
    [
        ("forbid all_reduce(grad) over dp", "E6", "forbid all_reduce over dp is broken by the all_reduce over dp of"),
        ("limit memory 1KiB", "E6", "more than 1.00 KiB"),
        ("same @tokens.weight @positions.weight; @tokens.weight[vocab -> dp pad]", "E7", "are to share one layout"),
        ("head_dim -> dp", "E", "head_dim"),
    ],
)
def test_what_does_not(capsys: pytest.CaptureFixture[str], line: str, code: str, reason: str) -> None:
    layout = f"mesh dp=2\nbatch -> dp\n{line}\n* -> none"
    status, out, err = run(capsys, GPT, "--layout", layout, "--json")
    assert (status, err) == (1, "")
    found = json.loads(out)
    assert found["holds"] is False
    assert found["code"].startswith(code)
    assert reason in found["reason"]
    assert {"target", "layout", "mesh", "holds", "code", "reason", "warnings"} == set(found)


def test_warnings_do_not_fail(capsys: pytest.CaptureFixture[str]) -> None:
    layout = "batch -> dp; * -> none; warn all_reduce(grad) over dp"
    code, out, _ = run(capsys, GPT, "--layout", layout, "--mesh", "dp=2")
    assert code == 0
    assert out.startswith("warning: E6")
    assert "1 contract kept" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.py:gpt", "--layout", "ddp", "--mesh", "dp=2"], "there is no file nowhere.py"),
        ([GPT, "--layout", "ddp"], "on which mesh? fix: --mesh dp=2,tp=2, or a line 'mesh dp=2, tp=2' in the layout"),
        ([GPT, "--layout", "ddp", "--mesh", "dp=?"], "has open sizes"),
        ([GPT, "--layout", "nowhere.lay", "--mesh", "dp=2"], "nowhere.lay"),
        ([GPT, "--layout", "dpp", "--mesh", "dp=2"], "did you mean 'ddp'?"),
        ([GPT, "--layout", "btch -> dp", "--mesh", "dp=2"], "did you mean 'batch'?"),
        ([GPT, "--layout", "batch -> dq", "--mesh", "dp=2"], "dq"),
        ([GPT, "--layout", "batch -> ", "--mesh", "dp=2"], "E0"),
        ([GPT, "--layout", "ddp", "--mesh", "dp=2", "--cluster", "h10"], "did you mean"),
    ],
)
def test_wrong_questions(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("autopar check: ")
    assert message in err
    assert "Traceback" not in err
