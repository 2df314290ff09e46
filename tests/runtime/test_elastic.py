"""Elastic training: ranks are lost and come back, and the loss goes on as without that."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SIZES = "--batch 12 --seq 16 --layers 1 --d-model 32 --dtype float64"
TOLERANCE = 1e-10

# Seconds without a sign of life until a node counts as lost, and of the wait for further nodes.
ELASTIC = "keep_alive_interval=1,keep_alive_max_attempt=8,last_call_timeout=4"
# Without it a node that joins later waits for ever (docs/elastic.md).
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
# A peer of a killed rank fails, too, which counts in its agent.
RESTARTS = "9"
# Seconds that a wait may take; to end what hangs.
PATIENCE = 400


class ElasticRun:
    """Agents of torchrun on this machine, each as a node of its own; all end with the `with` block."""

    def __init__(
        self, folder: Path, options: str, nodes: str, workers: int, kills: Sequence[str] = (), waits: Sequence[str] = ()
    ) -> None:
        self.folder, self.options, self.nodes, self.workers = folder, options, nodes, workers
        self.environment = {"KILLS": " ".join(kills), "WAITS": " ".join(waits), "MARKS": str(folder)}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.agents: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> ElasticRun:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            workers = Path(f"/proc/{agent.pid}/task/{agent.pid}/children")
            left = workers.read_text().split() if agent.poll() is None else []
            for process in [agent.pid, *map(int, left)]:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            agent.wait()

    def add_agent(self) -> None:
        number = len(self.agents)
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", self.nodes, "--local-addr", "localhost"]
        command += ["--nproc-per-node", str(self.workers), "--max-restarts", RESTARTS, "--monitor-interval", "0.1"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{self.port}", "--rdzv-id", "test"]
        # Agent 0 has the store of the rendezvous.
        command += ["--rdzv-conf", f"is_host={int(number == 0)},{ELASTIC}", "tests/runtime/elastic_worker.py"]
        command += [*shlex.split(self.options), "--folder", str(self.folder / "run")]
        with (self.folder / f"agent{number}").open("wb") as log:
            environment = {**os.environ, **self.environment, **OWN_STORE, "AGENT": str(number)}
            environment["XDG_CACHE_HOME"] = str(self.folder)
            self.agents.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))

    def rows(self) -> list[dict[str, Any]]:
        log = self.folder / "run" / "log.jsonl"
        lines = log.read_text().splitlines() if log.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def wait_for(self, step: int, ranks: int) -> None:
        self._wait(lambda: any((row["step"], row["ranks"]) == (step, ranks) for row in self.rows()))

    def codes(self) -> list[int | None]:
        self._wait(lambda: all(agent.poll() is not None for agent in self.agents))
        return [agent.poll() for agent in self.agents]

    def _wait(self, reached: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE
        while not reached():
            assert time.monotonic() < until, f"{self.rows()[-3:]}\n{self.texts()}"
            time.sleep(0.05)

    def texts(self) -> str:
        return "\n".join((self.folder / f"agent{n}").read_text(errors="replace") for n in range(len(self.agents)))


def alone(folder: Path, steps: int) -> dict[int, float]:
    """The losses of an uninterrupted run on one rank, by step."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    options = f"--mesh dp=1 --layout ddp --steps {steps} {SIZES} --folder {folder / 'alone'}"
    command += ["examples/train_elastic.py", *options.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = map(json.loads, (folder / "alone" / "log.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows}


def check_losses(rows: Sequence[dict[str, Any]], expected: dict[int, float]) -> None:
    assert {row["step"] for row in rows} == set(expected)
    assert max(abs(row["loss"] - expected[row["step"]]) for row in rows) < TOLERANCE


def check_sums(text: str, least: int) -> None:
    """What each restart cost is printed as a sum of its parts."""
    found = re.findall(r"from \d to \d ranks\n((?:  .* +[\d.]+ s\n)+)", text)
    assert len(found) >= least, text
    for table in found:
        *parts, whole = (float(seconds) for seconds in re.findall(r"([\d.]+) s$", table, re.MULTILINE))
        assert len(parts) == 5
        assert sum(parts) == pytest.approx(whole, abs=0.31)


def starts(rows: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
    """First step and ranks of each start."""
    begins = [0, *(n for n in range(1, len(rows)) if rows[n]["step"] != rows[n - 1]["step"] + 1)]
    return [(rows[n]["step"], rows[n]["ranks"]) for n in begins]


def sizes(rows: Sequence[dict[str, Any]], least: int) -> list[int]:
    """Ranks of each start in turn; a start may miss a node that is late, which comes with the next one."""
    return [ranks for ranks, _ in groupby(ranks for _, ranks in starts(rows) if ranks >= least)]


@pytest.mark.slow
@pytest.mark.alone
def test_ranks_go_and_come_back(tmp_path: Path) -> None:
    """4 ranks, 3 and 4 again, three times: kill -9 of an agent in a forward, a backward and a save; then of a worker.

    A new agent comes 4 steps after each loss. The worker is the first rank, and dies in a save.
    """
    kills = ("forward:8:3:agent", "backward:13:4:agent", "save:20:5:agent", "save:25:0:worker")
    waits = [f"{step}:{ranks}:{kills}" for step, kills in ((0, 0), (12, 1), (17, 2), (22, 3)) for ranks in (2, 3)]
    options = f"--mesh dp=? --layout zero1 --steps 30 {SIZES}"
    with ElasticRun(tmp_path, options, "2:4", 1, kills, waits) as run:
        for _ in range(4):
            run.add_agent()
        for step in (11, 16, 21):
            run.wait_for(step, ranks=3)
            run.add_agent()
        codes, rows, text = run.codes(), run.rows(), run.texts()
    gone = -signal.SIGKILL
    assert codes == [0, 0, 0, gone, gone, gone, 0], text
    assert sizes(rows, 3) == [4, 3, 4, 3, 4, 3, 4]
    begins = [step for step, _ in starts(rows)]
    assert {5, 10, 15, 20} <= set(begins), "each goes on from the newest complete checkpoint"
    assert begins[-1] == 20, "the save of step 25 did not end"
    check_sums(text, len(kills))
    check_losses(rows, alone(tmp_path, 30))


@pytest.mark.slow
@pytest.mark.alone
def test_nodes_of_two_ranks_go_and_come_back(tmp_path: Path) -> None:
    """dp=2,tp=2 and dp=1,tp=2, three times: kill -9 of an agent in a forward, a backward and a save; then of a worker.

    Each mesh has a searched plan of its own, which is found once.
    """
    kills = ("forward:8:1:agent", "backward:13:2:agent", "save:20:3:agent", "backward:22:0:worker")
    layout = "batch -> dp; (heads, d_ff) -> tp; vocab -> ?; * -> none"
    options = f"--mesh dp=?,tp=2 --layout '{layout}' --steps 26 {SIZES}"
    with ElasticRun(tmp_path, options, "1:2", 2, kills, waits=("0:2:0", "12:2:1", "17:2:2")) as run:
        run.add_agent()
        run.add_agent()
        for step in (11, 16):
            run.wait_for(step, ranks=2)
            run.add_agent()
        codes, rows, text = run.codes(), run.rows(), run.texts()
    gone = -signal.SIGKILL
    assert codes == [0, gone, gone, gone], text
    assert sizes(rows, 2)[-6:] == [4, 2, 4, 2, 4, 2]
    assert starts(rows)[-2:] == [(15, 2), (20, 2)], "the save of step 20 by four ranks did not end"
    plans = list((tmp_path / "autopar" / "plans").glob("*.lay"))
    assert sorted(re.findall(r"^mesh (.*)$", path.read_text(), re.MULTILINE)[0] for path in plans) == [
        "dp=1, tp=2",
        "dp=2, tp=2",
    ]
    check_sums(text, len(kills))
    check_losses(rows, alone(tmp_path, 26))
