"""Measure costs and seconds of `python -m benchmarks.contest` on instances in the format of the IOPDDL contest.

    python -m benchmarks.iopddl FOLDER                       # every *.json and *.json.gz in it, 60 s each
    python -m benchmarks.iopddl FOLDER --seeds 3 --limits limits.csv

A CSV given with --limits has a header with `instance` and any of `time_limit` (seconds) and `best_known` (a cost); an
instance is known by the end of its file's name before the suffix (`A` for `asplos-2025-iopddl-A.json.gz`). Each run is
a process of its own; its seconds and its peak memory are those of the whole process, loading included.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contest.contest_format import read_problem
from benchmarks.contest.problem import cost_of, excess_of


@dataclass(frozen=True)
class Target:
    """Limits of one instance in a table."""

    time_limit: float | None
    best_known: float | None


@dataclass(frozen=True)
class Run:
    """One process's answer; cost: of the solution it wrote, worked out again here."""

    cost: float | None
    bound: float | None
    wall_seconds: float
    cpu_seconds: float
    peak_gib: float


def read_targets(path: str | None) -> dict[str, Target]:
    if path is None:
        return {}
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {row["instance"]: Target(plain(row.get("time_limit")), plain(row.get("best_known"))) for row in rows}


def plain(text: str | None) -> float | None:
    return float(text.replace(",", "")) if text and text.strip() else None


def instances_in(folder: str) -> list[Path]:
    return sorted(path for path in Path(folder).iterdir() if path.name.endswith((".json", ".json.gz")))


def short_name(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".json").rsplit("-", 1)[-1]


def run(path: Path, time_limit: float, seed: int) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "benchmarks.contest", str(path), "--time-limit", str(time_limit)]
        command += ["--seed", str(seed), "--output", str(output)]
        began = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, _, usage = os.wait4(process.pid, 0)
        seconds = time.monotonic() - began
        answer = json.loads(output.read_text()) if output.exists() else {"solution": None, "bound": None}
    cost = None
    if answer["solution"] is not None:
        problem = read_problem(path)
        cost = cost_of(problem, answer["solution"])
        assert excess_of(problem, answer["solution"]) == 0, f"{path}: the solution passes the limit"
    return Run(cost, answer["bound"], seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20)


def row(name: str, seed: int, result: Run, best_known: float | None) -> str:
    cost = f"{result.cost:,.0f}" if result.cost is not None else "none"
    bound = f"{result.bound:,.0f}" if result.bound is not None else "none"
    gap = ratio = "-"
    if result.cost and result.bound is not None:
        gap = f"{100 * (result.cost - result.bound) / result.cost:.3f} %"
    if result.cost is not None and best_known:
        ratio = f"{result.cost / best_known:.6f}"
    return (
        f"{name:>16} {seed:>4} {cost:>20} {bound:>20} {gap:>10} {ratio:>9} "
        f"{result.wall_seconds:>7.1f} {result.cpu_seconds:>7.1f} {result.peak_gib:>6.2f}"
    )


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--limits", metavar="CSV")
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="SECONDS", help="where the CSV says nothing")
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parser.parse_args(words)
    targets = read_targets(arguments.limits)
    print(
        f"{'instance':>16} {'seed':>4} {'cost':>20} {'bound':>20} {'gap':>10} {'of best':>9} "
        f"{'wall s':>7} {'CPU s':>7} {'GiB':>6}"
    )
    for path in instances_in(arguments.folder):
        target = targets.get(short_name(path), Target(None, None))
        for seed in range(arguments.seeds):
            result = run(path, target.time_limit or arguments.time_limit, seed)
            print(row(short_name(path), seed, result, target.best_known), flush=True)


if __name__ == "__main__":
    main()
