"""`autopar clusters`: what it prints, and what it says to bad input."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autopar.cli import main
from autopar.cost.hardware.cluster import cluster_names
from autopar.cost.hardware.describe import standalone

TWO_LEVELS = Path(__file__).parents[1] / "cost" / "two_levels.toml"
GOLDEN = Path(__file__).with_name("clusters.txt")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["clusters", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_describes_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, str(TWO_LEVELS))
    assert (code, err) == (0, "")
    assert out == GOLDEN.read_text(), (
        "if this is meant: autopar clusters tests/cost/two_levels.toml > tests/cli/clusters.txt"
    )


def test_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert [line.split()[0] for line in lines] == list(cluster_names())
    (line,) = (line for line in lines if line.startswith("h100 "))
    name, memory, text = re.split(r"\s{2,}", line)
    assert (name, memory) == ("h100", "80 GB")
    assert text == "DGX H100 nodes: 8 H100 SXM5 80 GB, NVLink 4, 8 × 400 Gb/s InfiniBand"


@pytest.mark.parametrize("name", cluster_names())
def test_describes_all(capsys: pytest.CaptureFixture[str], name: str) -> None:
    code, out, err = run(capsys, name)
    assert (code, err) == (0, "")
    assert out.startswith(f"{name}: ")


def test_prints_a_file_to_edit(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--toml", "h100") == (0, standalone("h100"), "")


def test_unknown_name(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "h10")
    assert (code, out) == (2, "")
    assert err.startswith("autopar clusters: there is no cluster 'h10'; did you mean 'h100'?\nfix: take one of ")


def test_a_file_with_a_mistake_is_not_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TWO_LEVELS.read_text().replace("units = 4", "unites = 4"))
    for words in ((str(path),), ("--toml", str(path))):
        code, out, err = run(capsys, *words)
        assert (code, out) == (2, "")
        assert "unknown key 'unites'; did you mean 'units'?\n  mine.toml:17 | unites = 4\nfix: the keys are " in err
