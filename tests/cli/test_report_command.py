"""`autopar report`: the page of a plan's file or of a TARGET, and what is said to bad input."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.cli import main
from autopar.mesh import Mesh
from autopar.plans.find import PlanRequest, plan_under_layout
from autopar.plans.format import bytes_text
from autopar.sharding.options import TrainingOptions
from examples.gpt import gpt

ROOT = Path(__file__).parents[2]
GPT = f"{ROOT}/examples/gpt.py:gpt"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["report", *words])
    out, err = capsys.readouterr()
    return code, out, err


def shown(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_of_a_layout(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    place = tmp_path / "report.html"
    words = ("--mesh", "dp=2,tp=2", "--layout", "megatron", "--cluster", "h100", "--memory", "1GiB", "-o", str(place))
    code, out, err = run(capsys, GPT, *words)
    assert (code, out, err) == (0, f"written to {place}\n", "")
    data = shown(place.read_text())
    assert data["cluster"] == "h100"
    assert data["axes"] == [{"name": "dp", "size": 2}, {"name": "tp", "size": 2}]
    assert data["memory"]["limit_bytes"] == 2**30
    assert data["gap"] is None
    assert len(data["rivals"]) > 1


def test_of_a_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model, inputs = gpt()
    plan = autopar.plan(model, "dp=2", inputs, cluster="h100")
    plan.save(tmp_path / "gpt.plan.lay")
    place = tmp_path / "report.html"
    words = (str(tmp_path / "gpt.plan.lay"), "--target", GPT, "--no-experts", "-o", str(place))
    code, _, err = run(capsys, *words)
    assert (code, err) == (0, "")
    page = plan.plot()
    data, own = shown(place.read_text()), shown(page.text)
    assert data["costs"] == own["costs"]
    assert data["rivals"] == []
    assert page._repr_html_().startswith("<iframe srcdoc=")


def test_experts_are_asked_what_the_plan_was(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A plan's file says the cluster, the optimizer and the limit; the strategies beside it are priced for the same."""
    path = tmp_path / "gpt.plan.lay"
    asked = PlanRequest("h100", "1GiB", TrainingOptions(optimizer="sgd"))
    plan_under_layout(autopar.trace(*gpt()), Mesh("dp=2"), "ddp", asked).save(path)
    place = tmp_path / "report.html"
    assert run(capsys, str(path), "--target", GPT, "-o", str(place))[0] == 0
    data = shown(place.read_text())
    rivals = {rival["name"]: rival for rival in data["rivals"]}
    assert rivals["ddp(dp=dp)"]["step_seconds"] == data["costs"]["step_seconds"]
    assert rivals["ddp(dp=dp)"]["memory_bytes"] == data["memory"]["peak_bytes"]
    assert main(["compare", str(path), "ddp", "--target", GPT, "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["plans"]
    assert first["memory_bytes"] == second["memory_bytes"]
    assert first["step_seconds"] == second["step_seconds"]


def test_other_plans_stand_beside_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, place = tmp_path / "gpt.plan.lay", tmp_path / "report.html"
    plan = plan_under_layout(autopar.trace(*gpt()), Mesh("dp=2,tp=2"), "megatron", PlanRequest("h100"))
    plan.save(path)
    words = ("--mesh", "dp=2,tp=2", "--layout", "ddp(dp=dp*tp)", "--cluster", "h100", "--no-experts", "-o", str(place))
    assert run(capsys, GPT, *words, "--beside", str(path), "--beside", "zero1(dp=dp*tp)")[0] == 0
    beside = shown(place.read_text())["beside"]
    assert beside["rows"][0] == ["", "this plan", str(path), "zero1(dp=dp*tp)"]
    memory = next(row for row in beside["rows"] if row[0] == "memory")
    assert memory[2] == bytes_text(plan.memory_bytes)
    megatron, zero1 = beside["differing"]
    assert ["blocks.*.up.weight", "whole", "d_ff -> tp"] in megatron["rows"]
    assert zero1["rows"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([GPT, "--mesh", "dp=2", "--layout", "ddp", "--beside", "dpp", "-o", "report.html"], "did you mean"),
        ([GPT, "-o", "report.html"], "no mesh for"),
        ([GPT, "--mesh", "dp=2", "-o", "nowhere/report.html"], "there is no folder"),
        (["nowhere.lay", "-o", "report.html"], "there is no file nowhere.lay"),
        (["nowhere.py:gpt", "--mesh", "dp=2", "-o", "report.html"], "there is no file nowhere.py"),
        ([GPT, "--mesh", "dp=2", "--cluster", "h10", "-o", "report.html"], "h10"),
        ([GPT, "--mesh", "dp=2", "--layout", "dpp", "-o", "report.html"], "did you mean"),
        ([f"{ROOT}/strategies/ddp.lay", "-o", "report.html"], "strategies/ddp.lay"),
    ],
)
def test_wrong_questions(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("autopar report: ")
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "report.html").exists()
