"""`python -m benchmarks.plan` runs on one layer and prints the seconds of every stage."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.plan import STAGES


@pytest.mark.slow
def test_all_stages_are_timed() -> None:
    command = [sys.executable, "-m", "benchmarks.plan", "--layers", "1", "--dtype", "float32"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert printed.returncode == 0, printed.stderr[-2000:]
    head, row = printed.stdout.splitlines()[-2:]
    assert head.split()[1 : 1 + len(STAGES)] == list(STAGES)
    assert all(float(seconds) >= 0 for seconds in row.split()[1 : 1 + len(STAGES)])
    assert "GiB" in row
