"""Write docs/benchmarks.md from what benchmarks printed, as docs/benchmarks.json keeps it.

    python -m benchmarks.page                                     # the page from the runs that are kept
    python -m benchmarks.page --run sizes "coverage --seq 8"      # run benchmarks, keep their output, write the page

A run replaces an earlier one of the same command. A run that fails keeps nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

import torch

import autopar

DOCS = Path(__file__).parents[1] / "docs"
RUNS, PAGE = DOCS / "benchmarks.json", DOCS / "benchmarks.md"
HEAD = """# Benchmarks

What benchmarks print, with commands, machines and dates. `python -m benchmarks.page --run` runs commands and
writes this page. Nothing on it is written by hand. Main results are in [the README](../README.md).
"""


@dataclass(frozen=True)
class Run:
    """One run of a benchmark: its module and arguments, and what it printed."""

    command: str
    output: str
    date: str
    seconds: int
    machine: str
    versions: str

    @property
    def module(self) -> str:
        return f"benchmarks.{shlex.split(self.command)[0]}"

    def section(self) -> str:
        """Return the section of the page; its first sentence is that of the benchmark."""
        about = (import_module(self.module).__doc__ or "").strip().partition("\n\n")[0]
        title = self.command.split()[0].replace("_", " ").capitalize()
        facts = f"{self.date}, {self.versions}, {self.machine}; the run took {self.seconds} s."
        shown = f"$ python -m benchmarks.{self.command}\n{self.output.rstrip()}"
        return f"## {title}\n\n{' '.join(about.split())}\n{facts}\n\n```text\n{shown}\n```\n"


def run(command: str, limit_seconds: float) -> Run:
    """Run a benchmark and return what it prints; raise if it fails."""
    words = shlex.split(command)
    began, load = time.monotonic(), os.getloadavg()[0]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"benchmarks.{words[0]}", *words[1:]],
        capture_output=True,
        text=True,
        timeout=limit_seconds,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"benchmarks.{command} failed:\n{done.stderr[-2000:]}")
    devices = ", ".join(map(torch.cuda.get_device_name, range(torch.cuda.device_count()))) or "no GPU"
    machine = f"{len(os.sched_getaffinity(0))} cores of {platform.machine()}, {devices}"
    release = torch.__version__.partition("+")[0]
    return Run(
        command,
        done.stdout,
        datetime.now(UTC).date().isoformat(),
        round(time.monotonic() - began),
        f"{machine}, load {load:.1f} before it",
        f"autopar {autopar.__version__}, torch {release}, Python {platform.python_version()}",
    )


def kept(path: Path = RUNS) -> list[Run]:
    """Return the runs of a file, by command."""
    return [Run(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))] if path.exists() else []


def page(runs: list[Run]) -> str:
    return "\n".join([HEAD, *(one.section() for one in runs)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", metavar="COMMAND", nargs="+", default=[], help="a benchmark with its arguments")
    parser.add_argument("--limit", type=float, default=3600.0, metavar="SECONDS", help="for each of them")
    options = parser.parse_args()
    found = {one.command: one for one in kept()}
    for command in options.run:
        found[command] = run(command, options.limit)
        ordered = sorted(found.values(), key=lambda one: one.command)
        RUNS.write_text(json.dumps([asdict(one) for one in ordered], indent=1, ensure_ascii=False) + "\n", "utf-8")
    PAGE.write_text(page(kept()), encoding="utf-8")


if __name__ == "__main__":
    main()
