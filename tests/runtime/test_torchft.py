"""Replicas over torchft: one is killed, the others go on, it comes back. Where torchft is installed alone."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.mesh import Mesh
from autopar.runtime.sync.torchft_mean import NUMBER
from autopar.sharding.layout.language import parse_layout
from autopar.sharding.replicas import Drift

ROOT = Path(__file__).parents[2]

SCRIPT = """
import hashlib, json, os, sys, time
import torch
import autopar
from tests.runtime.test_drift import Regression, batches, weights

torch.set_num_threads(1)
line, last, place = sys.argv[1], int(sys.argv[2]), sys.argv[3]
(inputs,) = batches(1)
module = autopar.parallelize(Regression().double(), "pod=2", inputs, layout=line + "; ddp")
optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
data = iter(batches(100000))
while module.replicas.steps < last:
    optimizer.zero_grad()
    module(**next(data)).backward()
    optimizer.step()
    time.sleep(0.02)
    row = {"step": module.replicas.steps, "here": module.replicas.meeting.participants,
           "weights": hashlib.sha256(weights(module).numpy().tobytes()).hexdigest()}
    with open(place, "a") as file:
        file.write(json.dumps(row) + "\\n")
module.replicas.finish()
os._exit(0)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port


def rows(place: Path) -> list[dict[str, Any]]:
    lines = place.read_text().splitlines() if place.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def wait(place: Path, found: Any, seconds: float = 240.0) -> None:
    ends = time.monotonic() + seconds
    while not any(found(row) for row in rows(place)):
        assert time.monotonic() < ends, f"not within {seconds} seconds: {rows(place)[-3:]}"
        time.sleep(0.1)


@contextmanager
def replica(number: int, lighthouse: str, line: str, last: int, place: Path) -> Iterator[subprocess.Popen[bytes]]:
    own = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "TORCHFT_LIGHTHOUSE": lighthouse,
        NUMBER: str(number),
    }
    log = place.with_suffix(".log").open("ab")
    running = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, line, str(last), str(place)], env={**os.environ, **own}, stdout=log, stderr=log
    )
    try:
        yield running
    finally:
        running.kill()
        running.wait()
        log.close()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torchft") is None, reason="torchft is not installed: autopar[torchft]")
@pytest.mark.parametrize("line", ["drift pod -> mean every 4", "drift pod -> mean every 4, outer nesterov(0.7, 0.9)"])
def test_a_killed_replica_comes_back(tmp_path: Path, line: str) -> None:
    coordination: Any = import_module("torchft.coordination")
    lighthouse = coordination.LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=3000)
    address = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    last = 2000
    try:
        with replica(0, address, line, last, first) as stays:
            with replica(1, address, line, last, second) as dies:
                wait(first, lambda row: row["here"] == 2)
                wait(second, lambda row: row["here"] == 2)
                dies.send_signal(signal.SIGKILL)
                dies.wait()
            gone = rows(first)[-1]["step"]
            wait(first, lambda row: row["step"] > gone + 8 and row["here"] == 1)
            with replica(1, address, line, last, third):
                wait(third, lambda row: row["here"] == 2)
                back = next(row["step"] for row in rows(third) if row["here"] == 2)
                assert back > gone, "it goes on where the other one is"
                wait(first, lambda row: row["step"] >= back + 8)
                wait(third, lambda row: row["step"] >= back + 8)
                assert stays.poll() is None
        meetings = [{row["step"]: row["weights"] for row in rows(place)} for place in (first, third)]
        shared = [step for step in meetings[1] if step >= back and step % 4 == 0 and step in meetings[0]]
        assert len(shared) >= 2
        assert all(meetings[0][step] == meetings[1][step] for step in shared), "equal after each meeting"
    finally:
        lighthouse.shutdown()


def test_what_torchft_cannot_do_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from autopar.runtime.sync.torchft_mean import has_lighthouse, is_in_use, replica_group_of

    class Devices:
        def size(self) -> int:
            return 1

    def group(line: str) -> Any:
        statement = parse_layout(f"drift pod -> {line}").drift
        assert statement is not None
        return replica_group_of(Devices(), Drift(statement, Mesh("pod=2,dp=1")))  # type: ignore[arg-type]

    assert not has_lighthouse()
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://localhost:1")
    ring, mean = (parse_layout(f"drift pod -> {line}").drift for line in ("ring", "mean"))
    assert ring is not None
    assert mean is not None
    assert not is_in_use(Drift(ring, Mesh("pod=2,dp=1")))
    assert is_in_use(Drift(mean, Mesh("pod=2,dp=1")))
    with pytest.raises(autopar.AutoparError, match="torchft runs no meetings like 'drift pod -> mean as int8'"):
        group("mean as int8")
    for wrong in ("", "2", "x"):
        monkeypatch.setenv(NUMBER, wrong)
        with pytest.raises(
            autopar.AutoparError, match=f"invalid {NUMBER}='{wrong}': expected the number of this replica"
        ):
            group("mean every 4")
    monkeypatch.setenv(NUMBER, "1")
    assert group("mean every 4").index == 1
