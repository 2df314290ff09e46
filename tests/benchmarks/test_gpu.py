"""The benchmark of a GPU, in tiny sizes on a CPU: every section runs to its end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import SECTIONS, TOTAL_SECONDS
from benchmarks.gpu.setting import Setting

ROOT = Path(__file__).parents[2]
QUICK = ("env", "attn")


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(folder), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def check(folder: Path, names: tuple[str, ...]) -> None:
    done = run(folder, "--tiny", "--only", *names)
    found = json.loads((folder / "all.json").read_text())
    assert {name: section["status"] for name, section in found.items()} == dict.fromkeys(names, "ok"), done.stderr
    assert all(section["parts"] for section in found.values())
    assert done.returncode == 0
    assert all(name in done.stdout for name in names)


@pytest.mark.slow
def test_quick_sections(tmp_path: Path) -> None:
    check(tmp_path, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SECTIONS if name not in QUICK])
def test_section(tmp_path: Path, name: str) -> None:
    check(tmp_path, (name,))


def test_a_part_that_fails_is_kept_and_the_next_one_runs(tmp_path: Path) -> None:
    setting = Setting(True, tmp_path, "section")
    setting.part("broken", lambda: {"value": 1 // 0})
    setting.part("whole", lambda: {"value": 2})
    kept = json.loads((tmp_path / "section.json").read_text())
    assert kept["broken"]["failed"].startswith("ZeroDivisionError: ")
    assert kept["whole"]["value"] == 2


def test_without_a_gpu_full_sizes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = run(tmp_path)
    assert done.returncode == 2
    assert "torch finds no GPU here; --tiny runs all sections" in done.stderr


def test_all_of_it_ends_in_eight_minutes() -> None:
    assert TOTAL_SECONDS < 8 * 60
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert [name for name in SECTIONS if f"| `{name}` |" in page] == list(SECTIONS)
