"""Random modules under random layouts, on simulated ranks, beside the eager model: nothing may differ.

python -m benchmarks.random --cases 10000              # all of them, in one process
python -m benchmarks.random --cases 10000 --jobs 4     # in four
python -m benchmarks.random --cases 400 --processes    # those that a layout decides, on real processes over Gloo
python -m benchmarks.random --seed 4711                # one case again, with all that is known of it
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator

import torch

from autopar.mesh import Mesh
from tests.ranks import difference_of
from tests.runtime import random_cases
from tests.runtime.launcher import launch
from tests.runtime.random_cases import MESHES, PER_MODULE, Outcome, run

# Modules that the processes of one launch take: their results come together, and a launch has a time limit.
MODULES_PER_LAUNCH = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500, help="how many (default 500)")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first (default 0)")
    parser.add_argument("--jobs", type=int, default=1, help="in so many processes (default 1)")
    parser.add_argument("--seed", type=int, help="run the case of this seed alone, and show its error")
    parser.add_argument("--processes", action="store_true", help="on real processes over Gloo")
    asked = parser.parse_args()
    os.environ.setdefault("AUTOPAR_VERIFY", "1")  # the invariants between stages are checked too
    torch.set_num_threads(1)
    if asked.seed is not None:
        return _one(asked.seed)
    seeds = range(asked.first, asked.first + asked.cases)
    kinds: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    begun = time.monotonic()
    for found in _on_processes(seeds) if asked.processes else _simulated(seeds, asked.jobs):
        for one in found:
            _count(one, kinds, reasons)
        if asked.processes or sum(kinds.values()) % 400 < PER_MODULE:
            print(f"{_said(kinds)}, {time.monotonic() - begun:.0f} s", flush=True)
    for reason, count in reasons.most_common():
        print(f"{count:6} refused: {reason}")
    print(f"seeds {seeds.start} to {seeds.stop - 1}: {_said(kinds)} in {time.monotonic() - begun:.0f} s")
    return 1 if kinds["wrong"] or kinds["error"] else 0


def _simulated(seeds: range, jobs: int) -> Iterator[list[Outcome]]:
    chunks = [seeds[begin : begin + PER_MODULE] for begin in range(0, len(seeds), PER_MODULE)]
    context = multiprocessing.get_context("spawn")
    # A process is not used for ever: torch keeps something of each trace.
    with context.Pool(jobs, initializer=torch.set_num_threads, initargs=(1,), maxtasksperchild=50) as pool:
        yield from pool.imap_unordered(_chunk, chunks)


def _on_processes(seeds: range) -> Iterator[list[Outcome]]:
    length = MODULES_PER_LAUNCH * PER_MODULE
    for begin in range(0, len(seeds), length):
        chunk = list(seeds[begin : begin + length])
        for axes in MESHES:
            mesh = Mesh(**axes)
            ranks = launch(random_cases.run_on_processes, str(mesh), chunk, ranks=mesh.size)
            # An error on one rank is an error.
            yield [max(each, key=lambda one: one.kind in ("wrong", "error")) for each in zip(*ranks, strict=True)]


def _chunk(seeds: range) -> list[Outcome]:
    return [run(seed) for seed in seeds]


def _count(one: Outcome, kinds: Counter[str], reasons: Counter[str]) -> None:
    kinds[one.kind] += 1
    if one.kind == "refused":
        reasons[one.detail] += 1
    elif one.kind != "right":
        print(one, flush=True)


def _said(kinds: Counter[str]) -> str:
    total = max(1, sum(kinds.values()))
    names = ("right", "refused", "wrong", "error")
    return f"{total} cases: " + ", ".join(f"{kinds[name]} {name}" for name in names)


def _one(seed: int) -> int:
    """With the traceback of what fails."""
    one = run(seed)
    print(f"{one.kind}: {one.detail}\n{one.what}")
    traced = random_cases._traced(seed // PER_MODULE)
    print(traced.graph)
    if one.kind in ("error", "wrong"):
        try:
            assignment = random_cases.drawn(seed, traced.graph).decide(traced.graph)  # type: ignore[arg-type]
            difference_of(traced.graph, assignment, traced.inputs, traced.expected)  # type: ignore[arg-type]
        except Exception:  # noqa: BLE001  # it is shown
            traceback.print_exc()
    return 0 if one.kind in ("right", "refused") else 1


if __name__ == "__main__":
    sys.exit(main())
