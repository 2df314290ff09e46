"""The tutorial's commands, pasted one block after another into one shell, work as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_docs import ROOT, blocks

PAGE = ROOT / "docs" / "tutorial.md"
INSTALL = re.compile(r"^(python3 -m venv|\. \.venv/bin/activate|python -m pip install) .*|^\. \.venv/bin/activate$")


def script() -> str:
    """All bash blocks; the lines that install are left out, since what they make is what runs this test."""
    lines = [line for block in blocks(PAGE.read_text()) if block.language == "bash" for line in block.body.splitlines()]
    return "\n".join(line for line in lines if not INSTALL.match(line)) + "\n"


def test_only_installing_is_left_out() -> None:
    bodies = "".join(block.body for block in blocks(PAGE.read_text()) if block.language == "bash")
    assert [line for line in bodies.splitlines() if INSTALL.match(line)] == bodies.splitlines()[:3]


@pytest.mark.slow
def test_commands_work_one_after_another(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples", target_is_directory=True)
    # The commands of the environment that runs the tests, on its autopar, with a cache of plans that is empty.
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, module in (("autopar", "autopar"), ("torchrun", "torch.distributed.run")):
        command = commands / name
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        command.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
        "PET_STANDALONE": "1",  # torchrun takes a port that is free, and not always the same one
    }
    done = subprocess.run(
        ["bash", "-eux", "-o", "pipefail", "-c", script()],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    losses = [float(loss) for loss in re.findall(r"^step +\d+ +loss ([\d.]+)$", done.stdout, re.MULTILINE)]
    assert losses[-1] < losses[0] - 0.5, done.stdout
    assert "They agree" in done.stdout
    assert (tmp_path / "report.html").stat().st_size > 10_000
