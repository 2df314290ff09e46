"""The time of a pipelined step beside the same model cut by hand on torch.distributed.pipelining, in one run.

    python -m benchmarks.pipeline                              # 2 and 4 Gloo ranks of one thread, small and 25M
    python -m benchmarks.pipeline --ranks 2 --size small --schedule gpipe --steps 40

Both take the same cuts, micro-batches and schedule; their steps take turns. `wall` is the ratio of the medians of the
slowest rank, `CPU` that of the processor's seconds of all ranks, which other programs disturb less. `noise` is the
ratio of the peer's wall time in one half of its steps to that in the other. `memory` is the ratio of the peaks of the
fullest ranks, in bytes of tensors alive at once. `idle` is the share of a step in which the busiest stage
waits, `model` that of the same schedule simulated with the measured tasks and messages, and `bubble` their ratio. They
need a core for each rank: without one a stage that waits for a core is not idle, and they are left out. `halves` is the
processor's time of the backwards of zero_bubble, in two halves, to that of the whole ones of 1f1b.

The allocator returns no memory to the system: pages that go and come back take up to 5 % of a step, on the one side or
on the other, as their tensors happen to lie.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleavedZeroBubble
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn
from torch.nn import functional

import autopar
from autopar.lowering.collectives.process_groups import join_local_group
from benchmarks.step import SIZES as STEP_SIZES
from benchmarks.task_times import bubble, halves
from examples.gpt import gpt

SCHEDULES: dict[str, Callable[..., Any]] = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "zero_bubble": lambda stage, *args, **options: ScheduleInterleavedZeroBubble([stage], *args, **options),
}
MICRO_BATCHES, WARM_UP = 8, 3
SIZES = {
    **STEP_SIZES,
    "d 256": {"layers": 4, "d_model": 256, "heads": 4, "vocab": 4096, "seq": 64, "batch": 16},
}
STEPS = {"host": 60, "small": 40, "25M": 10, "d 256": 20}


def first_block(blocks: int, stage: int, stages: int) -> int:
    """Return the number of the first block of a stage."""
    return blocks * stage // stages


class Part(nn.Module):
    """Part of a GPT: some blocks, with the embeddings before the first and the logits after the last."""

    def __init__(self, model: Any, stage: int, stages: int) -> None:
        super().__init__()
        begin, end = (first_block(len(model.blocks), one, stages) for one in (stage, stage + 1))
        self.blocks = model.blocks[begin:end]
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        if self.is_first:
            self.tokens, self.positions = model.tokens, model.positions
        if self.is_last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.is_last else x


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def model_of(size: str) -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    model: Any
    model, inputs = gpt(**{**SIZES[size], "batch": 2 * MICRO_BATCHES})
    # torch's pipelines have no tied parameters.
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model, inputs


def by_hand(size: str, schedule: str, rank: int, ranks: int) -> tuple[Callable[[], None], nn.Module]:
    """Return a step of the model cut by hand, and this rank's part."""
    model, inputs = model_of(size)
    part = Part(model, rank, ranks)
    ids, targets = inputs["ids"], inputs["targets"]
    hidden = torch.zeros(2, ids.shape[1], model.tokens.weight.shape[1])
    with torch.no_grad():
        result = part(ids[:2] if rank == 0 else hidden)
    # Examples on meta: torch then runs no stage to learn the shapes. That they need a gradient decides what is sent.
    given = ids[:2].to("meta") if rank == 0 else hidden.to("meta").requires_grad_()
    result = result.to("meta").requires_grad_()
    stage = PipelineStage(part, rank, ranks, torch.device("cpu"), input_args=(given,), output_args=(result,))
    runner = SCHEDULES[schedule](stage, MICRO_BATCHES, loss_fn=loss_of)

    def step() -> None:
        part.zero_grad()
        if rank == ranks - 1:
            runner.step(target=targets, losses=[])
        elif rank == 0:
            runner.step(ids)
        else:
            runner.step()

    return step, part


def ours(size: str, schedule: str, ranks: int) -> tuple[Callable[[], None], Any]:
    model, inputs = model_of(size)
    blocks = SIZES[size]["layers"]
    cuts = ", ".join(f"@blocks.{first_block(blocks, stage, ranks)}" for stage in range(1, ranks))
    layout = f"micro {MICRO_BATCHES}; pipeline pp {schedule}; cut pp before {cuts}; * -> none"
    parallel = autopar.parallelize(model, f"pp={ranks}", inputs, layout=layout)

    def step() -> None:
        parallel.zero_grad()
        parallel(**inputs).backward()

    return step, parallel


def both_schedules(size: str, ranks: int) -> list[Callable[[], None]]:
    """Return steps of zero_bubble and of 1f1b, which have run."""
    pair = [ours(size, schedule, ranks)[0] for schedule in ("zero_bubble", "1f1b")]
    for step in pair:
        for _ in range(WARM_UP):
            step()
    return pair


def live_bytes() -> int:
    """Return the bytes of all tensors that Python sees."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), Tensor) and not isinstance(x, DTensor | FakeTensor)]
    storages = [x.untyped_storage() for x in tensors if x.device.type == "cpu"]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


def peak_bytes(step: Callable[[], None]) -> int:
    """Return the most bytes alive at once in a step.

    The profiler sees what is freed only if it saw the allocation, so the second of two steps counts.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as found:
        step()
        with torch.profiler.record_function("second step"):
            step()
    after = live_bytes()
    assert found.profiler is not None, "it has run"
    events: Any = found.profiler.kineto_results.events()
    (begin,) = (one.start_ns() for one in events if one.name() == "second step")
    changes = sorted((one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]")
    # From the end of the step backwards.
    later = accumulate(-size for at, size in reversed(changes) if at >= begin)
    return int(after + max(0, *later))


def compare(size: str, schedule: str, steps: int, rank: int, ranks: int) -> str:
    before = live_bytes()
    made: list[Any] = []
    memory = torch.zeros(2)
    # What the first side keeps is there when the second one runs.
    for place in range(2):
        made.append(by_hand(size, schedule, rank, ranks) if place else ours(size, schedule, ranks))
        step, module = made[-1]
        for _ in range(WARM_UP):
            step()
        memory[place] = peak_bytes(step) - before
        module.zero_grad()
        before = live_bytes()
    (mine, parallel), (theirs, part) = made
    pair = (mine, theirs)
    dist.all_reduce(memory, dist.ReduceOp.MAX)
    walls: list[list[float]] = [[], []]
    seconds: list[list[float]] = [[], []]
    for turn in range(steps):
        for which in ((0, 1), (1, 0))[turn % 2]:
            dist.barrier()
            start, used = time.perf_counter(), time.process_time()
            pair[which]()
            walls[which].append(time.perf_counter() - start)
            seconds[which].append(time.process_time() - used)
    found = torch.tensor(walls), torch.tensor(seconds)
    dist.all_reduce(found[0], dist.ReduceOp.MAX)
    dist.all_reduce(found[1])
    wall, processor = ([statistics.median(each) for each in table.tolist()] for table in found)
    first, second = (statistics.median(found[0][1][half::2].tolist()) for half in (0, 1))
    noise = first / second
    error = torch.tensor(_difference(parallel, part))
    dist.all_reduce(error, dist.ReduceOp.MAX)
    ratio = f"{halves(both_schedules(size, ranks), steps):6.3f}" if schedule == "zero_bubble" else f"{'-':>6}"
    kept = float(memory[0] / memory[1])
    idle = (
        str(bubble(mine, schedule, MICRO_BATCHES, ranks, steps)) if has_cores(ranks) else f"{'-':>6} {'-':>6} {'-':>6}"
    )
    return (
        f"{schedule:11} {size:6} {ranks:5} {1e3 * wall[0]:9.1f} {1e3 * wall[1]:9.1f} {wall[0] / wall[1]:6.3f} "
        f"{processor[0] / processor[1]:6.3f} {noise:6.3f} {kept:6.3f} {idle} {ratio}   {float(error):.1e}"
    )


def has_cores(ranks: int) -> bool:
    """Return whether each rank has a core of its own."""
    return len(os.sched_getaffinity(0)) >= ranks


def _difference(parallel: Any, part: nn.Module) -> float:
    """Return the largest relative difference between our gradients and the peer's, of the parameters of this rank."""
    own = [p.grad.to_local() for p in parallel.parameters() if p.grad is not None and p.grad.to_local().numel()]
    theirs = [p.grad for p in part.parameters() if p.grad is not None]
    norms = [torch.stack([each.double().norm() for each in grads]).norm() for grads in (own, theirs)]
    assert len(own) == len(theirs), f"{len(own)} gradients, {len(theirs)} by hand"
    return float((norms[0] - norms[1]).abs() / norms[1])


def run_rank(rank: int, ranks: int, arguments: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    join_local_group(Path(folder, "meeting"), rank, ranks)
    for size in arguments.size:
        for schedule in arguments.schedule:
            line = compare(size, schedule, arguments.steps or STEPS[size], rank, ranks)
            if rank == 0:
                print(line, flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", action="append", choices=list(SIZES), help="may be repeated")
    parser.add_argument("--ranks", action="append", type=int, help="may be repeated; by default 2 and 4")
    parser.add_argument("--schedule", action="append", choices=list(SCHEDULES), help="may be repeated")
    parser.add_argument("--steps", type=int, help=f"timed steps of each; by default {STEPS}")
    arguments = parser.parse_args()
    arguments.size = arguments.size or ["small", "25M"]
    arguments.schedule = arguments.schedule or list(SCHEDULES)
    # The profiler of the ranks prints lines of its own, and warns of tensors that are older than it.
    os.environ.update(KINETO_LOG_LEVEL="99", TORCH_CPP_LOG_LEVEL="ERROR")
    os.environ.update(MALLOC_TRIM_THRESHOLD_=str(2**40), MALLOC_MMAP_MAX_="0")
    names = (
        "ranks   ours ms   peer ms   wall    CPU  noise memory   idle  model bubble halves   difference of gradients"
    )
    print(f"{'schedule':11} {'size':6} {names}")
    for ranks in arguments.ranks or (2, 4):
        if not has_cores(ranks):
            print(f"{ranks} ranks share {len(os.sched_getaffinity(0))} cores: wall times are those of all of them")
        with tempfile.TemporaryDirectory() as folder:
            spawn(run_rank, (ranks, arguments, folder), nprocs=ranks)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
