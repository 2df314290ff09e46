"""`autopar strategies`: what it prints, and what it says to bad input."""

from __future__ import annotations

import subprocess
import sys

import pytest

from autopar.cli import main
from autopar.sharding.layout.language import strategy_names, strategy_path


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["strategies", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_lists_all_with_what_they_do(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys)
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in lines] == list(strategy_names())
    assert {
        "ddp every parameter everywhere, the batch split",
        "fsdp parameters, gradients and optimizer state split; gathered where used",
        "fsdp_tp megatron on one axis, fsdp on the other",
        "gshard_moe experts on ep; the tokens travel by all-to-all",
        "megatron tensor parallel: heads, d_ff and vocab",
        "megatron_sp megatron, with the sequence split between the tensor-parallel regions",
        "megatron_3d megatron in stages: layers on pp, heads, d_ff and vocab on tp, the batch over dp",
        "pipeline stages of layers on pp, the batch over dp",
        "spatial images cut in tiles",
        "zero1 as ddp, optimizer state split",
    } <= {" ".join(line.split()) for line in lines}


def test_prints_one_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "fsdp") == (0, strategy_path("fsdp").read_text(encoding="utf-8"), "")


def test_unknown_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "megatrn") == (
        2,
        "",
        "autopar strategies: E1: there is no strategy 'megatrn'; did you mean 'megatron'?\n"
        f"fix: the names are {', '.join(strategy_names())}\n",
    )


def test_too_many_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaves:
        main(["strategies", "ddp", "fsdp"])
    assert leaves.value.code == 2
    assert "unrecognized arguments: fsdp" in capsys.readouterr().err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaves:
        main(["strategies", "--help"])
    assert leaves.value.code == 0
    assert "autopar strategies megatron > mine.lay" in capsys.readouterr().out


def test_needs_no_torch() -> None:
    code = "import sys; from autopar.cli import main; main(['strategies', 'ddp']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
