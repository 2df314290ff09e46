"""`--json` of every command keeps to its schema, and the schema tells all that is printed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autopar.cli import COMMANDS, main
from autopar.cli.json_output import schema_of, schemas
from tests.cli.cases import WITHOUT_DATA

jsonschema = pytest.importorskip("jsonschema", reason="not installed: pip install 'autopar[dev]'")

ROOT = Path(__file__).parents[2]
MLP = f"{ROOT}/examples/mlp.py:mlp"
GPT = f"{ROOT}/examples/gpt.py:gpt"
WHERE = ("--mesh", "dp=2,tp=2", "--cluster", "local-cpu")
LAYOUT = "batch -> dp; d_ff -> tp; * -> none"
FORBID = "batch -> dp; * -> none; forbid all_reduce(grad) over dp; warn all_reduce(grad) over dp; limit memory 1GiB"
NAMES = tuple(command.__name__.rpartition(".")[2] for command in COMMANDS)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def closed(schema: Any) -> Any:
    """The schema without room for what it does not tell."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(value) for key, value in schema.items()}
    return {"additionalProperties": False, **found} if schema.get("properties") and "type" in schema else found


def printed(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> dict[str, Any]:
    """What a command prints, after it was held against its schema."""
    assert main([*words, "--json"]) == code
    out, err = capsys.readouterr()
    assert err == ""
    data: dict[str, Any] = json.loads(out)
    jsonschema.Draft202012Validator(closed(schema_of(words[0]))).validate(data)
    return data


@pytest.mark.parametrize("command", schemas())
def test_schemas_are_schemas(command: str) -> None:
    schema = schema_of(command)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$id"] == f"urn:autopar:{command}:{schema['properties']['version']['const']}"
    assert schema["required"] == list(schema["properties"]), "what is always there is said to be"


@pytest.mark.parametrize("command", NAMES)
def test_whoever_has_json_has_a_schema(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert ("--json-schema" in capsys.readouterr().out) == (command in schemas())
    if command not in schemas():
        assert command in WITHOUT_DATA


@pytest.mark.parametrize("command", schemas())
def test_schema_is_printed_without_the_other_words(command: str) -> None:
    code = (
        f"import sys; from autopar.cli import main\ntry: main([{command!r}, '--json-schema'])\nexcept SystemExit: pass"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nsys.exit('torch' in sys.modules)"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == schema_of(command)


def test_what_a_schema_does_not_tell_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    data = printed(capsys, 0, "strategies", "ddp")
    data["strategies"][0]["new"] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(closed(schema_of("strategies"))).validate(data)
    jsonschema.Draft202012Validator(schema_of("strategies")).validate(data)  # programs may meet more than they know


def test_plan(capsys: pytest.CaptureFixture[str]) -> None:
    data = printed(capsys, 0, "plan", MLP, *WHERE, "--dims", "x=batch features", "--layout", LAYOUT)
    assert data["dims"]["d_ff"] == "tp"
    assert data["experts"]
    assert data["communication"]
    data = printed(capsys, 0, "plan", MLP, *WHERE, "--no-experts", "--time-limit", "2")
    assert data["bound_seconds"] <= data["step_seconds"]


@pytest.mark.slow
def test_no_plan_prints_nothing_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", GPT, *WHERE, "--memory", "20kB", "--time-limit", "2", "--layout", "megatron", "--json")
    assert main(list(words)) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "no plan was found that fits" in err


def test_compare(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--target", GPT, *WHERE)
    uneven = "batch -> dp*tp; * -> none"
    data = printed(capsys, 0, "compare", "megatron", uneven, "ddp", *words)
    assert [one["applies"] for one in data["plans"]] == [True, False, True]
    assert data["plans"][0]["differs"] == {}
    assert "dp*tp = 4 does not divide 6" in data["plans"][1]["why"]
    assert data["plans"][2]["differs"]["blocks.*.up.weight"] == ["d_ff -> tp", "whole"]
    data = printed(capsys, 1, "compare", uneven, *words)
    assert data["mesh"] is None


def test_check(capsys: pytest.CaptureFixture[str]) -> None:
    data = printed(capsys, 0, "check", GPT, *WHERE, "--layout", "megatron")
    assert data["holds"]
    assert [(one["kind"], one["holds"]) for one in data["contracts"]] == [("legal", True), ("memory", True)]
    data = printed(capsys, 1, "check", GPT, *WHERE, "--layout", FORBID)
    assert not data["holds"]
    found = {one["kind"]: one["holds"] for one in data["contracts"]}
    assert found == {"legal": True, "forbid": False, "warn": False, "memory": True}
    assert data["contracts"][1]["line"] == "<layout>:1"
    data = printed(
        capsys, 1, "check", GPT, *WHERE, "--layout", "batch -> dp*tp; * -> none; forbid all_gather(act) over dp"
    )
    assert [(one["kind"], one["holds"]) for one in data["contracts"]] == [("legal", False), ("forbid", None)]
    assert data["contracts"][0]["why"].startswith("E4: ")
    assert data["step_seconds"] is None


def test_a_warning_is_told_and_holds(capsys: pytest.CaptureFixture[str]) -> None:
    layout = "batch -> dp; * -> none; warn all_reduce(grad) over dp"
    data = printed(capsys, 0, "check", GPT, *WHERE, "--layout", layout)
    assert data["holds"]
    assert [one["holds"] for one in data["contracts"] if one["kind"] == "warn"] == [False]


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    plan = (MLP, *WHERE, "--dims", "x=batch features", "--layout", LAYOUT)
    data = printed(capsys, 0, "explain", plan[0], "up.0.weight", *plan[1:], "--why-not", "d_ff -> none")
    assert data["tensor"]["layout"] == "d_ff -> tp"
    assert data["tensor"]["lines"]
    assert data["used_by"] == [{"op": "up.0/linear", "layout": "d_ff -> tp; broadcast(dp)"}]
    assert len(data["alternatives"]) > 2
    assert data["why_not"]["found"]
    assert data["why_not"]["tensors"] == ["up.0.weight", "up.1.weight"], "the other layer is pinned with it"
    words = ("--why-not", "d_ff -> none", "--one-layer", "--no-alternatives")
    assert printed(capsys, 0, "explain", plan[0], "up.0.weight", *plan[1:], *words)["why_not"]["tensors"] == [
        "up.0.weight"
    ]
    data = printed(capsys, 0, "explain", plan[0], "up.0/linear", *plan[1:], "--no-alternatives")
    assert data["ops"][0]["sends"]
    assert data["alternatives"] == []
    assert data["why_not"] is None


def test_trace(capsys: pytest.CaptureFixture[str]) -> None:
    data = printed(capsys, 0, "trace", GPT)
    assert data["repeats"][0]["count"] == 2
    assert list(data["layers"]) == data["repeats"][0]["modules"]
    assert printed(capsys, 0, "trace", f"{ROOT}/examples/custom_op.py:custom_op")["coverage"]["replicated"] == 0


@pytest.mark.slow
def test_verify(capsys: pytest.CaptureFixture[str]) -> None:
    data = printed(capsys, 0, "verify", MLP, "--mesh", "dp=2", "--layout", "d_ff -> dp; * -> none")
    assert data["agree"]


def test_strategies_and_clusters(capsys: pytest.CaptureFixture[str]) -> None:
    every = printed(capsys, 0, "strategies")["strategies"]
    assert printed(capsys, 0, "strategies", "fsdp_tp")["strategies"] == [
        one for one in every if one["name"] == "fsdp_tp"
    ]
    assert {one["name"]: one["axes"] for one in every}["fsdp_tp"] == ["fsdp", "tp"]
    found = printed(capsys, 0, "clusters")["clusters"]
    (h100,) = printed(capsys, 0, "clusters", "h100")["clusters"]
    assert h100 in found
    assert h100["levels"][0]["units"] == 8
