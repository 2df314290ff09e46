"""`autopar new`: a script that trains on one process and on several, alike; nothing is overwritten."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.cli import main

ROOT = Path(__file__).resolve().parents[2]


def test_writes_a_script_that_names_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "mine.py"]) == 0
    text = Path("mine.py").read_text(encoding="utf-8")
    assert text == (ROOT / "examples" / "train_text.py").read_text(encoding="utf-8").replace("train_text.py", "mine.py")
    assert "autopar plan mine.py:language_model" in text


def test_a_file_that_is_there_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text("kept", encoding="utf-8")
    assert main(["new", str(file)]) == 2
    assert file.read_text(encoding="utf-8") == "kept"
    assert "this file is there already, and nothing was written\nfix: give another name" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "said"), [("mine.txt", "fix: autopar new"), ("none/mine.py", "cannot be written")])
def test_bad_names(name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", str(tmp_path / name)]) == 2
    assert said in capsys.readouterr().err


def losses(command: list[str], folder: Path) -> list[float]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PET_STANDALONE": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(loss) for loss in re.findall(r"^step +\d+ +loss ([\d.]+)$", done.stdout, re.MULTILINE)]


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    assert main(["new", str(tmp_path / "mine.py")]) == 0
    one = losses([sys.executable, "mine.py", "--steps", "21"], tmp_path)
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "mine.py", "--steps", "21"]
    two = losses([*run, "--mesh", "tp=2", "--layout", "megatron"], tmp_path)
    assert one == pytest.approx(two, rel=1e-3)
    assert one[-1] < one[0] - 1
