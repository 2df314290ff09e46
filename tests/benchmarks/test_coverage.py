"""`python -m benchmarks.coverage`: what it prints, for people and for programs."""

from __future__ import annotations

import json

import pytest

from benchmarks.architectures import EVERY, REFUSED, REFUSED_IN_HALF, STANDARD
from benchmarks.coverage import Row, as_table, main, measure


def test_json_counts_every_node_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vit", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["architecture"] == "vit"
    assert row["nodes"] == row["table"] + row["discovered"] + row["replicated"] > 50
    assert row["reason"] is None


def test_architecture_that_cannot_be_traced_gives_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fsmt"]) == 0, "known, and no failure"
    printed = capsys.readouterr().out
    assert "0 of 1" in printed
    assert "fsmt (eval) does not trace: FSMTForConditionalGeneration" in printed
    assert "if not padding_mask.any()" in " ".join(printed.split())


def test_graphs_in_half_precision(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mra", "xglm", "--precision", "bf16", "--json"]) == 0
    mra, xglm = json.loads(capsys.readouterr().out)
    assert "aten.linear.default has operands in float32 and in torch.bfloat16" in mra["reason"]
    assert xglm["reason"] is None
    assert main(["mra"]) == 0


def test_training_is_measured_in_training_mode() -> None:
    assert measure("vit", train=True).nodes > measure("vit", train=False).nodes, "dropout is in the graph"


def test_table_sums_what_was_traced() -> None:
    rows = [Row("a", "eval", 5, 3, 1, 1, 2.0), Row("b", "eval", 7, 7, 0, 0, 1.0), Row("c", "eval", reason="no")]
    columns = {str(column.header): list(column.cells) for column in as_table(rows).columns}
    assert columns["architecture"] == ["a", "b", "c", "2 of 3"]
    assert columns["nodes"] == ["5", "7", "-", "12"]
    assert columns["table"] == ["3", "7", "-", "10"]
    assert columns["seconds"] == ["2.0", "1.0", "0.0", "3.0"]


def test_names_are_given_once() -> None:
    assert len(set(EVERY)) == len(EVERY) > 200
    assert set(STANDARD) < set(EVERY)
    assert set(REFUSED) | set(REFUSED_IN_HALF) < set(EVERY) - set(STANDARD)
