"""The benchmark of pipelines runs, and both sides have the same gradients."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_both_sides_have_the_same_gradients() -> None:
    command = [sys.executable, "-m", "benchmarks.pipeline", "--ranks", "2", "--size", "host", "--steps", "2"]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout
    rows = [line.split() for line in found.splitlines() if line.startswith(("1f1b", "gpipe", "zero_bubble"))]
    assert len(rows) == 3
    assert all(float(row[-1]) < 1e-5 for row in rows)
