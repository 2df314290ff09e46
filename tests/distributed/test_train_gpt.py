"""The training example, started as its users start it."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_loss_falls() -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    script = ["examples/train_gpt.py", "--layout", "megatron", "--mesh", "tp=2"]
    sizes = ["--steps", "12", "--every", "4", "--batch", "4", "--seq", "32", "--layers", "1", "--d-model", "32"]
    done = subprocess.run(
        [sys.executable, *torchrun, *script, *sizes, "--collectives"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 4, "rank 0 alone prints, at the steps 0, 4, 8 and 11"
    assert losses[-1] < losses[0] - 0.1
    assert "forward all_reduce over tp: " in done.stdout
