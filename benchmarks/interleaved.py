"""Real training steps of several plans of one model on Gloo processes.

They take their steps in turn, so that a machine that drifts drifts for all.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

import autopar
from autopar.lowering.collectives.process_groups import join_local_group

__all__ = ["Run", "faster_share", "measured_seconds", "undisturbed"]

Make = Callable[[], tuple[torch.nn.Module, dict[str, Any]]]

WARM_UP = 3


@dataclass(frozen=True)
class Run:
    """A mesh, and what goes for `parallelize(layout=...)`."""

    mesh: str
    layout: str


def measured_seconds(make: Make, runs: Mapping[str, Run], ranks: int, steps: int) -> dict[str, list[float]]:
    """Return the seconds of every real step with SGD, by run; the slowest rank counts."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "times.json")
        spawn(_rank, (make, dict(runs), ranks, steps, str(result)), nprocs=ranks)  # type: ignore[no-untyped-call]
        times: dict[str, list[float]] = json.loads(result.read_text())
        return times


def undisturbed(seconds: Sequence[float]) -> float:
    """Return the median of the faster half."""
    return statistics.median(sorted(seconds)[: (len(seconds) + 1) // 2])


def faster_share(one: Sequence[float], other: Sequence[float]) -> float:
    """In which share of the rounds one was faster than the other."""
    return sum(a < b for a, b in zip(one, other, strict=True)) / len(one)


def _rank(rank: int, make: Make, runs: dict[str, Run], ranks: int, steps: int, result: str) -> None:
    torch.set_num_threads(1)
    join_local_group(Path(result).with_name("meeting"), rank, ranks)
    prepared = {}
    for name, run in runs.items():
        torch.manual_seed(0)
        model, inputs = make()
        module = autopar.parallelize(model, run.mesh, inputs, layout=run.layout)
        prepared[name] = partial(_step, module, torch.optim.SGD(module.parameters(), lr=1e-3), inputs)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for step in range(steps + WARM_UP):
        for name, take in prepared.items():
            dist.barrier()
            start = time.perf_counter()
            take()
            spent = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(spent, op=dist.ReduceOp.MAX)
            if step >= WARM_UP:
                times[name].append(spent.item())
    if rank == 0:
        Path(result).write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


def _step(module: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: Mapping[str, Any]) -> None:
    optimizer.zero_grad(set_to_none=True)
    module(**inputs).backward()
    optimizer.step()
