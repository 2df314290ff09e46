"""The benchmark of adapters runs: equal losses, and no more bytes than torch sends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_both_sides_send_the_same(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    found: dict[str, list[dict[str, float]]] = {}
    for trained in ("adapters", "full"):
        path = tmp_path / trained
        options = ["--size", "host", "--steps", "4", "--json", str(path), *(["--full"] if trained == "full" else [])]
        command = [sys.executable, "-m", "benchmarks.lora", *options]
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        found[trained] = json.loads(path.read_text())
    for row in found["adapters"]:
        assert row["loss_difference"] < 1e-5
        # Gradients as they are, weights in messages padded to the ranks.
        assert row["ours_sent_mib"] == pytest.approx(row["peer_sent_mib"], rel=0.05), row["name"]
    ddp, full = found["adapters"][0], found["full"][0]
    assert ddp["ours_sent_mib"] < 0.5 * full["ours_sent_mib"]
