"""`autopar plan`, `explain`, `compare` and `check`: what they print, and what they say to bad input."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from autopar.cli import main

ROOT = Path(__file__).parents[2]
MLP = f"{ROOT}/examples/mlp.py:mlp"
GPT = f"{ROOT}/examples/gpt.py:gpt"
WHERE = ("--mesh", "dp=2,tp=2", "--cluster", "local-cpu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of the small GPT under a layout, which nothing is searched for."""
    from dataclasses import replace

    from autopar.mesh import Mesh
    from autopar.plans.find import PlanRequest, plan_under_layout
    from autopar.tracing.trace import trace
    from examples.gpt import gpt

    plan = plan_under_layout(trace(*gpt()), Mesh("dp=2,tp=2"), "megatron", PlanRequest("local-cpu"), "megatron")
    path = tmp_path_factory.mktemp("plans") / "gpt.plan.lay"
    replace(plan, target=GPT).save(path)
    return path


def test_a_strategy_of_one_axis_is_on_the_only_axis(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "plan", GPT, "--mesh", "data=2,one=1", "--layout", "fsdp", "--no-experts")
    assert (code, err) == (0, "")
    assert "-> data" in out
    assert "nothing is split" not in out


@pytest.mark.parametrize("command", ["plan", "verify", "explain", "check"])
def test_a_strategy_without_an_axis_of_the_mesh_is_an_error(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for mesh, strategy, error in (
        (
            "a=2,b=2",
            "fsdp",
            "strategy 'fsdp' splits nothing on a mesh of a, b: its axes are fsdp\n"
            'fix: layout="fsdp(fsdp=a*b)", or a mesh whose axes have these names',
        ),
        (
            "data=2",
            "megatron",
            "strategy 'megatron' splits nothing on a mesh of data: its axes are dp, tp\n"
            'fix: layout="megatron(dp=data)" or layout="megatron(tp=data)", or a mesh whose axes have these names',
        ),
    ):
        words = ["blocks.0.up.weight"] if command == "explain" else []
        code, _, err = run(capsys, command, GPT, *words, "--mesh", mesh, "--layout", strategy)
        assert code == 2, err
        assert error in err


def test_plan_prints_and_writes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mlp.plan.lay"
    layout = "batch -> dp; d_ff -> tp; * -> none"
    code, out, err = run(capsys, "plan", MLP, *WHERE, "--dims", "x=batch features", "--layout", layout, "-o", str(path))
    assert (code, err) == (0, ""), "no progress where nobody looks"
    assert out.endswith(f"written to {path}\n")
    code, out, _ = run(
        capsys, "plan", MLP, *WHERE, "--dims", "x=batch features", "--layout", layout, "--json", "--no-experts"
    )
    data = json.loads(out)
    assert code == 0
    assert data["dims"]["d_ff"] == "tp"
    assert data["layout"].startswith("# autopar plan\n")
    assert "d_ff -> tp" in path.read_text()
    code, out, _ = run(capsys, "explain", str(path), "x", "--trust-target")
    assert code == 0, "the head of the plan says the model with its dims"
    assert out.startswith("x[batch features]")


@pytest.mark.parametrize("solver", ["lp", "ilp:scip"])
def test_plan_tells_who_proved_it(solver: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Time, bound and their origin; the solvers write nothing between."""
    words = ("plan", MLP, "--mesh", "dp=2", "--cluster", "h100", "--no-experts", "--json", "--solver", solver)
    code, out, _ = run(capsys, *words)
    data = json.loads(out)
    assert code == 0
    assert data["bound_seconds"] <= data["step_seconds"]
    assert data["gap"] <= 1e-2
    assert data["bound_by"] == {"lp": "search", "ilp:scip": "integer program (scip)"}[solver]
    assert data["origin"] == {"lp": "search", "ilp:scip": "integer program (scip)"}[solver]


def test_plan_writes_the_program(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Without a solver nothing is planned. A mesh must be closed."""
    path = tmp_path / "plan.lp"
    code, out, err = run(capsys, "plan", MLP, "--mesh", "dp=2", "--cluster", "h100", "--write-model", str(path))
    assert (code, out) == (0, "")
    assert re.search(r"plan\.lp: [\d,]+ variables \([\d,]+ binary\), [\d,]+ constraints", err)
    assert "\\ op.up.0/linear@none#1: splits" in path.read_text()
    words = ("plan", MLP, "--mesh", "?", "--devices", "4", "--cluster", "h100", "--write-model", str(path))
    code, out, err = run(capsys, *words)
    assert code == 2
    assert "a program has one mesh, and 3 are open" in err


def test_plan_beside_experts(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", GPT, *WHERE, "--layout", "ddp(dp=dp)", "--json")
    data = json.loads(out)
    assert code == 0
    assert "megatron(dp=dp, tp=tp)" in {one["strategy"] for one in data["experts"]}


@pytest.mark.parametrize("target", [GPT, pytest.param(f"{ROOT}/examples/moe.py:moe", marks=pytest.mark.slow)])
def test_out_of_time_the_plan_is_the_least_of_all_that_is_shown(
    capsys: pytest.CaptureFixture[str], target: str
) -> None:
    code, out, _ = run(capsys, "plan", target, *WHERE, "--time-limit", "0.001", "--json")
    data = json.loads(out)
    assert code == 0
    assert data["step_seconds"] == min(one["step_seconds"] for one in data["experts"] if one["fits"])
    assert data["origin"] in {one["strategy"] for one in data["experts"]}
    assert (data["bound_seconds"], data["gap"]) == (None, None)
    code, out, _ = run(capsys, "plan", target, *WHERE, "--time-limit", "0.001")
    assert "ms, no lower bound within the time limit, from " in out
    assert re.search(r"this plan +\S+ ms  ", out)
    assert not re.search(r"× 0\.\d", out), "no row is faster"


def test_a_faster_strategy_is_not_what_a_layout_says(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", GPT, *WHERE, "--layout", "megatron", "--json")
    data = json.loads(out)
    assert code == 0
    assert data["step_seconds"] > min(one["step_seconds"] for one in data["experts"])


def test_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "plan", GPT, *WHERE, "--memory", "20kB", "--time-limit", "2", "--layout", "megatron")
    assert code == 1
    assert "no plan was found that fits" in out
    assert "\nfix: " in out
    assert "Traceback" not in out + err


def test_explain(capsys: pytest.CaptureFixture[str], saved: Path) -> None:
    words = ("explain", str(saved), "blocks.0.up/linear", "--trust-target")
    code, facts, _ = run(capsys, *words, "--no-alternatives")
    assert code == 0
    code, out, _ = run(capsys, *words)
    assert code == 0
    title = "alternatives: each adds one line to the plan, in one of 2 equal layers; the rest is unchanged"
    assert out.startswith(f"{facts}\n{title}\n")
    lines = out.removeprefix(facts).splitlines()
    assert re.fullmatch(r" +[\d.]+ ms +[\d.]+ KiB +yes +unchanged", lines[3])
    assert re.fullmatch(
        r"  [\d.]+ ms +[+−][\d.]+ (ms|us) +[\d.]+ KiB +yes +(op )?@blocks\.0\.up/linear\[.*\]", lines[4]
    )
    assert any(line.endswith("@blocks.0.up/linear[* -> none]") for line in lines)
    assert any(line.endswith("op @blocks.0.up/linear[n -> tp, none -> dp]") for line in lines)


def test_compare(capsys: pytest.CaptureFixture[str], saved: Path) -> None:
    code, out, _ = run(capsys, "compare", str(saved), "megatron", "megatron_sp", "--trust-target")
    assert code == 0
    assert "megatron: the same shardings" in out
    assert f"{saved} and megatron_sp differ in" in out
    code, out, _ = run(capsys, "compare", str(saved), "megatron_sp", "--json", "--target", GPT)
    first, second = json.loads(out)["plans"]
    assert code == 0
    assert first["differs"] == {}
    assert second["differs"]["blocks.*/add"] == ["batch -> dp", "batch -> dp; seq -> tp"]


# The batch has two rows.
SPLIT_TOO_FAR = "batch -> dp*tp; * -> none"


def test_compare_tells_what_cannot_be_had(capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--target", GPT, *WHERE)
    code, out, err = run(capsys, "compare", SPLIT_TOO_FAR, "megatron", "ddp", *where)
    assert (code, err) == (0, "")
    verdict, _, header, *_ = out.splitlines()
    assert re.match(r"fastest: (megatron|ddp), \S+ \w+ a step; (megatron|ddp) × [\d.]+$", verdict)
    assert header.split() == ["megatron", "ddp"]
    assert "megatron and ddp differ in" in out
    assert f"\n{SPLIT_TOO_FAR} is infeasible here: E4: the dim 'batch' of ids can take no alternative" in out
    code, out, err = run(capsys, "compare", SPLIT_TOO_FAR, "batch -> dp; heads -> dp; * -> none", *where)
    assert (code, err) == (1, "")
    assert re.findall(r"^(.*) is infeasible here: (E\d)", out, re.MULTILINE) == [
        (SPLIT_TOO_FAR, "E4"),
        ("batch -> dp; heads -> dp; * -> none", "E3"),
    ]


def test_check_tells_all_contracts(capsys: pytest.CaptureFixture[str]) -> None:
    layout = (
        "batch -> dp; * -> none\nforbid all_reduce(grad) over dp\nforbid all_gather(act) over tp\nlimit memory 10kB"
    )
    code, out, _ = run(capsys, "check", GPT, *WHERE, "--layout", layout)
    assert code == 1
    assert out.count("no: E6: ") == 2, "one that is broken hides no other"
    assert re.findall(r"^  (\w+) +<layout>:(\d)  (\w+)", out, re.MULTILINE) == [
        ("broken", "2", "forbid"),
        ("holds", "3", "forbid"),
        ("broken", "4", "limit"),
    ]
    code, out, _ = run(capsys, "check", GPT, *WHERE, "--layout", layout.replace("batch -> dp", "batch -> dp*tp"))
    assert code == 1
    assert out.count("not known") == 3


@pytest.mark.parametrize(
    ("layout", "code", "answer"),
    [
        ("megatron", 0, "yes: step "),
        ("batch -> dp; * -> none; forbid all_reduce(grad) over dp", 1, "no: E6: forbid all_reduce over dp is broken"),
        ("batch -> dp; * -> none; limit memory 10kB", 1, "no: "),
        ("batch -> dp*tp; * -> none", 1, "no: E4: the dim 'batch'"),
    ],
)
def test_check(capsys: pytest.CaptureFixture[str], layout: str, code: int, answer: str) -> None:
    found, out, err = run(capsys, "check", GPT, *WHERE, "--layout", layout)
    assert (found, err) == (code, "")
    assert out.startswith(answer)
    assert code == 0 or "fix: " in out


BAD = [
    (("plan", f"{ROOT}/examples/gpt.py:gtp", *WHERE), "did you mean 'gpt'?"),
    (("plan", GPT, *WHERE, "--memory", "70GX"), "there is no unit 'GX'"),
    (("plan", GPT, *WHERE, "--optimizer", "adamv"), "did you mean 'adam"),
    (("plan", GPT, *WHERE, "--time-limit", "0"), "--time-limit 0: expected a number of seconds above 0"),
    (("plan", GPT, *WHERE, "--layout", ""), "--layout: the layout is empty"),
    (("explain", "other.plan.lay", "x", "--trust-target"), "is the plan of another model"),
    (("explain", GPT, "x"), "no mesh for"),
    (("explain", "saved.plan.lay", "blocks.0.upp.weight", "--trust-target"), "did you mean 'blocks.0.up.weight'?"),
    (
        ("explain", "saved.plan.lay", "tokens.weight", "--why-not", "vocab -> tq", "--target", GPT),
        "there is no axis 'tq'",
    ),
    (("compare", "megatron", "ddp"), "no model or no mesh"),
    (("compare", "saved.plan.lay", "megatrom", "--trust-target"), "did you mean 'megatron'?"),
    (("compare", "saved.plan.lay", "--target", MLP), "is the plan of another model"),
    (("check", GPT, "--layout", "megatron"), "no mesh: expected"),
]


@pytest.mark.parametrize(("words", "message"), BAD, ids=[" ".join(words).replace(str(ROOT), ".") for words, _ in BAD])
def test_bad_words(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    saved: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("saved.plan.lay").write_text(saved.read_text())
    Path("other.plan.lay").write_text(saved.read_text().replace(GPT, MLP))
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith(f"autopar {words[0]}: ")
    assert "Traceback" not in err
