"""The benchmark of pipelines runs, both sides have the same gradients, and the most memory is that of live tensors."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from benchmarks.pipeline import live_bytes, peak_bytes


@pytest.mark.slow
def test_both_sides_have_the_same_gradients() -> None:
    command = [sys.executable, "-m", "benchmarks.pipeline", "--ranks", "2", "--size", "host", "--steps", "2"]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout
    rows = [line.split() for line in found.splitlines() if line.startswith(("1f1b", "gpipe", "zero_bubble"))]
    assert len(rows) == 3
    assert all(float(row[-1]) < 1e-5 for row in rows)
    assert all(0.1 < float(row[8]) < 2 for row in rows), "peak of ours to that of the peer"
    # Shares of a step; without a core for each rank they are left out.
    assert all(row[9] == "-" or 0 <= float(row[10].rstrip("%")) < 50 for row in rows), rows


def test_the_peak_is_what_is_alive_at_once() -> None:
    kept = [torch.ones(700, dtype=torch.float64)]

    def step() -> None:
        kept.clear()
        for _ in range(3):
            torch.ones(1000, dtype=torch.float64)
        kept.append(torch.ones(500, dtype=torch.float64) + torch.ones(500, dtype=torch.float64))

    before = live_bytes()
    # Three tensors of 4,000 bytes while the last one is made; the first 5,600 bytes are gone by then.
    assert peak_bytes(step) - before == 12000 - 5600
    assert live_bytes() - before == 4000 - 5600
