"""`python -m benchmarks.search`: its cells, their targets, the file of rows, and errors that are rows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.mesh import Mesh
from benchmarks import search, search_cells
from benchmarks.models import MODELS, PublishedModel
from benchmarks.search_cells import Cell, Results, Row, summary_of
from examples.gpt import gpt

CELL = Cell("tiny", 1, 64, "bf16", "dp=8,tp=8", "free", "h100")


def tiny(layers: int, batch: int) -> Any:
    return gpt(layers=layers, d_model=64, heads=8, vocab=256, seq=64, batch=batch, device="meta")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Run the benchmark on small models alone, and return the lines that it prints."""
    for name in list(MODELS):
        monkeypatch.delitem(MODELS, name)
    monkeypatch.setitem(MODELS, "tiny", PublishedModel(tiny, 1))
    monkeypatch.setattr(search, "warm_up", lambda setting: None)

    def printed(*arguments: str) -> list[str]:
        assert search.main(["--time-limit", "2", *arguments]) == 0
        return capsys.readouterr().out.splitlines()

    return printed


def test_the_matrix_is_whole() -> None:
    given = search.parsed([])
    every = [cell for _, cell in search.cells_of(given)]
    assert len(set(every)) == len(every) == 9 * 4 * 3 * 3
    for cell in every:
        mesh = Mesh(cell.mesh)
        assert mesh.size in (64, 2048, 16384)
        assert cell.batch == MODELS[cell.model].samples * mesh.size
        assert ("ep" in mesh.names) == (cell.axes == 4 and MODELS[cell.model].has_experts)
    assert {(Mesh(cell.mesh).size, cell.axes) for cell in every} == {
        (devices, axes) for devices in (64, 2048, 16384) for axes in (1, 2, 3, 4)
    }


def test_shapes_have_a_setting_of_their_own() -> None:
    (found,) = search.cells_of(search.parsed(["--shape", "8b"]))
    assert found[1] == Cell("8b", 32, 16, "float32", "dp=8,tp=8", "70", "h100")
    given = search.parsed(
        ["--shape", "70b", "--layers", "2", "--mesh", "dp=4", "--mesh", "dp=2,tp=2", "--memory", "140"]
    )
    assert [(cell.layers, cell.mesh, cell.memory) for _, cell in search.cells_of(given)] == [
        (2, "dp=4", "140"),
        (2, "dp=2,tp=2", "140"),
    ]


@pytest.mark.parametrize("memory", ["x", "0", "-1x", "nan", "1.1y"])
def test_memory_is_checked(memory: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        search.parsed([f"--memory={memory}"])
    assert "--memory: invalid memory_text value" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mesh", "memory", "search_target", "gap_target"),
    [
        ("dp=64", "free", 1.0, 0.005),
        ("dp=8,tp=8", "free", 1.0, 0.005),
        ("pod=2,dp=4,tp=8", "free", 3.0, 0.02),
        ("pod=2,dp=2,cp=2,tp=8", "free", 6.0, 0.05),
        ("pod=2,dp=2,cp=2,tp=8", "1.5x", 6.0, 0.03),
        ("dp=8,tp=8", "1.1x", 1.0, 0.10),
        ("dp=8,tp=8", "70", 1.0, 0.03),
    ],
)
def test_targets(mesh: str, memory: str, search_target: float, gap_target: float) -> None:
    cell = replace(CELL, mesh=mesh, memory=memory)
    assert (cell.search_target, cell.gap_target) == (search_target, gap_target)
    row = Row(cell, export_seconds=2.0, search_seconds=2 * search_target, gap=gap_target)
    assert row.holds
    assert not replace(row, gap=1.01 * gap_target).holds
    assert not replace(row, search_seconds=2.02 * search_target).holds
    assert not replace(row, error="no plan fits").holds
    assert not Row(cell).holds


def test_the_summary_counts_by_axes_and_memory() -> None:
    held = Row(CELL, export_seconds=1.0, search_seconds=0.5, gap=0.001)
    one_axis = replace(CELL, mesh="dp=64")
    rows = [held, replace(held, gap=0.5), replace(held, cell=one_axis), Row(replace(CELL, memory="1.1x"), "no")]
    assert summary_of(rows) == ("2 of 4 cells hold (1 axis, free: 1 of 1; 2 axes, free: 1 of 2; 2 axes, 1.1x: 0 of 1)")


def test_a_factor_is_one_of_the_least_memory(run: Callable[..., list[str]], tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    lines = run("--mesh", "dp=4", "--memory", "free", "1.5x", "1.1x", "--out", str(path))
    rows = {row.cell.memory: row for row in Results.read(path).rows.values()}
    assert list(rows) == ["free", "least", "1.5x", "1.1x"]
    assert not any(row.error for row in rows.values())
    least = rows["least"].peak_bytes
    for memory, factor in (("1.5x", 1.5), ("1.1x", 1.1)):
        assert rows[memory].limit_bytes == pytest.approx(factor * least)
        assert rows[memory].peak_bytes <= rows[memory].limit_bytes
    assert all(0 <= rows[memory].gap < 1 for memory in ("free", "1.5x", "1.1x"))
    assert rows["free"].step_seconds <= rows["1.1x"].step_seconds * 1.001
    assert len({row.export_seconds for row in rows.values()}) == 1, "one export for all cells"
    assert len(lines) == 1 + 4 + 1
    free, wide, narrow = (int(rows[memory].holds) for memory in ("free", "1.5x", "1.1x"))
    assert lines[-1].endswith(f"(1 axis, free: {free} of 1; 1 axis, 1.5x: {wide} of 1; 1 axis, 1.1x: {narrow} of 1)")


def counted(function: Callable[..., Any], calls: list[Any]) -> Callable[..., Any]:
    """Return the function; each call of it is added to `calls`."""

    def called(*given: Any, **named: Any) -> Any:
        calls.append(given)
        return function(*given, **named)

    return called


def test_rows_of_the_file_are_not_run_again(
    run: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.json"
    first = run("--mesh", "dp=2", "--memory", "free", "--out", str(path))
    text = path.read_text()
    assert all(math.isfinite(value) for row in json.loads(text) for value in row.values() if isinstance(value, float))
    solved: list[Any] = []
    traced: list[Any] = []
    monkeypatch.setattr(search_cells, "solve_plan", counted(search_cells.solve_plan, solved))
    monkeypatch.setattr(autopar, "trace", counted(autopar.trace, traced))
    assert run("--mesh", "dp=2", "--memory", "free", "--out", str(path)) == first
    assert path.read_text() == text
    assert not traced
    assert not solved
    more = run("--mesh", "dp=2", "--mesh", "dp=4", "--memory", "free", "--out", str(path))
    assert more[:2] == first[:2]
    assert len(solved) == len(traced) == 1
    assert [row["cell"]["mesh"] for row in json.loads(path.read_text())] == ["dp=2", "dp=4"]


def test_errors_are_rows(run: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(layers: int, batch: int) -> Any:
        raise ZeroDivisionError("no such model\nand more")

    known = MODELS["tiny"]
    monkeypatch.delitem(MODELS, "tiny")
    monkeypatch.setitem(MODELS, "broken", PublishedModel(broken, 1))
    monkeypatch.setitem(MODELS, "tiny", known)
    path = tmp_path / "rows.json"
    lines = run("--mesh", "dp=2", "--memory", "1.5x", "0.000001", "free", "--out", str(path))
    rows = {(row.cell.model, row.cell.memory): row for row in Results.read(path).rows.values()}
    for memory in ("1.5x", "0.000001", "free"):
        assert rows["broken", memory].error == "ZeroDivisionError: no such model"
    assert rows["tiny", "0.000001"].error.startswith("no plan was found that fits in")
    assert not rows["tiny", "free"].error
    assert sum("ZeroDivisionError: no such model" in line for line in lines) == 3
    assert " of 6 cells hold" in lines[-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_part_of_each_model_is_traced_by_the_table(name: str) -> None:
    model = MODELS[name]
    # DeepSeek-V3 begins with three layers that have no experts, Bamba with nine of Mamba.
    layers = {"deepseek-v3": 4, "bamba-9b": 10}.get(name, 2)
    graph = autopar.trace(*model.made(layers, 64 * model.samples, torch.float32))
    assert {source for source, count in graph.coverage().items() if count} == {"table"}
