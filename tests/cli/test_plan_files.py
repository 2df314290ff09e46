"""A plan's file is data: nothing that it names is imported, called or opened, unless the user says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import autopar
from autopar.cli import main
from autopar.errors import AutoparError
from autopar.mesh import Mesh
from autopar.plans.find import PlanRequest, plan_under_layout
from autopar.plans.plan import Plan
from examples.gpt import gpt

GPT = f"{Path(__file__).parents[2]}/examples/gpt.py:gpt"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_under_layout(autopar.trace(*gpt()), Mesh("dp=2,tp=2"), "megatron", PlanRequest("local-cpu"), "megatron")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


COMMANDS = {
    "explain": ("explain", "gpt.plan.lay", "ids", "--no-alternatives"),
    "report": ("report", "gpt.plan.lay", "--no-experts", "-o", "page.html"),
    "compare": ("compare", "gpt.plan.lay", "ddp"),
    "compare two": ("compare", "ddp", "gpt.plan.lay", "gpt.plan.lay"),
}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize("target", ["os:system --set 'command=touch ran'", "evil.py:model", "evil:model"])
def test_no_code_that_a_file_names_is_run(
    capsys: pytest.CaptureFixture[str], plan: Plan, words: tuple[str, ...], target: str
) -> None:
    Path("evil.py").write_text("open('ran', 'w')\n")
    replace(plan, target=target).save("gpt.plan.lay")
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert "code that it names is not run" in err
    assert f"| #   target          {target}\n" in err
    assert "fix: name the model, --target file.py:function; or --trust-target, if you trust this file" in err
    assert not Path("ran").exists()


def test_the_user_says_whose_code_is_run(capsys: pytest.CaptureFixture[str], plan: Plan) -> None:
    replace(plan, target="evil.py:model").save("gpt.plan.lay")
    assert run(capsys, *COMMANDS["explain"], "--target", GPT)[0] == 0
    replace(plan, target=GPT).save("gpt.plan.lay")
    for words in COMMANDS.values():
        assert run(capsys, *words, "--trust-target")[0] == 0
    with pytest.raises(SystemExit):
        run(capsys, *COMMANDS["explain"], "--trust-target", "--target", GPT)
    replace(plan, target="").save("gpt.plan.lay")
    assert "does not say which model it is for" in run(capsys, *COMMANDS["explain"], "--trust-target")[2]


@pytest.mark.parametrize("cluster", ["/dev/zero", "other.toml", "../other", "mine"])
def test_no_file_that_a_file_names_is_opened(plan: Plan, cluster: str) -> None:
    Path("other.toml").write_text("a secret")
    text = plan.text.replace("cluster         local-cpu", f"cluster         {cluster}")
    with pytest.raises(AutoparError, match=r"autopar does not ship.*\nfix: give the file") as told:
        Plan.read(text, plan.graph)
    assert "secret" not in str(told.value)
    assert Plan.read(text, plan.graph, cluster="local-cpu").decided == plan.decided


def test_errors_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str], plan: Plan) -> None:
    Path("gpt.plan.lay").write_text(plan.text.replace("cluster         local-cpu", "cluster         \x1b[2Jx"))
    code, _, err = run(capsys, *COMMANDS["explain"], "--target", GPT)
    assert code == 2
    assert "\x1b" not in err


@pytest.mark.parametrize("value", ["{[]: 1}", "(" * 10_000, "-" * 100_000 + "1"])
def test_values_that_are_no_literals_are_text(value: str) -> None:
    from autopar.cli.target import parse_settings

    assert parse_settings([f"x={value}"]) == {"x": value}
