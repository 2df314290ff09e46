"""The time of an optimizer's step on the parameters of a parallel module, beside plain ones and DTensors.

    python -m benchmarks.optimizer                    # the small GPT under ddp, on 2 Gloo ranks of one thread each
    python -m benchmarks.optimizer --size host --layout fsdp

Elementwise optimizers of torch step on this rank's shards, by default on small ones together. A subclass does not,
which shows the price of DTensors. The three take turns step by step. Times are medians of the processor time of the
first rank's main thread.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.optim import SGD, AdamW, Optimizer

import autopar
from autopar.lowering.collectives.process_groups import join_local_group
from benchmarks.step import SIZES
from examples.gpt import gpt

WARM_UP = 3
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda parameters: AdamW(parameters, lr=1e-5),
    "AdamW, one by one": lambda parameters: AdamW(parameters, lr=1e-5, foreach=False),
    "AdamW, foreach": lambda parameters: AdamW(parameters, lr=1e-5, foreach=True),
    "AdamW, fused": lambda parameters: AdamW(parameters, lr=1e-5, fused=True),
    "SGD": lambda parameters: SGD(parameters, lr=1e-5),
    "SGD with momentum": lambda parameters: SGD(parameters, lr=1e-5, momentum=0.9),
}
HEAD = f"{'milliseconds':20} {'plain':>8} {'ours':>8} {'DTensors':>9} {'ours ÷ plain':>13} {'DTensors ÷ plain':>17}"


def on_dtensors(optimizer: Optimizer) -> Optimizer:
    """Make the class of an optimizer a subclass, which steps on DTensors."""
    optimizer.__class__ = type("OnDTensors", (type(optimizer),), {})
    return optimizer


def measure(make: Callable[[Any], Optimizer], plain: Any, parallel: Any, steps: int) -> list[float]:
    """Return the milliseconds of a step on plain parameters, on ours, and on ours as DTensors."""
    optimizers = [make(plain.parameters()), make(parallel.parameters()), on_dtensors(make(parallel.parameters()))]
    times: list[list[float]] = [[], [], []]
    for turn in range(WARM_UP + steps):
        for which in ((turn + place) % 3 for place in range(3)):
            start = time.thread_time()
            optimizers[which].step()
            times[which].append(time.thread_time() - start)
    return [statistics.median(each[WARM_UP:]) * 1e3 for each in times]


def run_rank(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    join_local_group(Path(folder, "meeting"), rank, arguments.ranks)
    torch.manual_seed(0)
    model, inputs = gpt(**SIZES[arguments.size])
    axis = "fsdp" if arguments.layout == "fsdp" else "dp"
    parallel = autopar.parallelize(copy.deepcopy(model), f"{axis}={arguments.ranks}", inputs, layout=arguments.layout)
    for module in (model, parallel):
        module(**inputs).backward()
    for name, make in OPTIMIZERS.items():
        plain, ours, dtensors = measure(make, model, parallel, arguments.steps)
        if rank == 0:
            ratios = f"{ours / plain:13.2f} {dtensors / plain:17.2f}"
            print(f"{name:20} {plain:8.2f} {ours:8.2f} {dtensors:9.2f} {ratios}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layout", choices=["ddp", "zero1", "fsdp"], default="ddp")
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        spawn(run_rank, args=(arguments, folder), nprocs=arguments.ranks)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
