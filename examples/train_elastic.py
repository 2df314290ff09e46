"""Train a small GPT that survives the loss of processes, and goes on with fewer or more of them.

    torchrun --nnodes 2:4 --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500 \\
        --rdzv-id my-job examples/train_elastic.py --mesh dp=? --layout zero1 --folder checkpoints

The same command on each node; docs/elastic.md explains it. An open size of the mesh follows from the processes of this
start, as in `dp=?,tp=2`. The newest complete checkpoint is loaded under whatever mesh that gives. The batch of a step
follows from its number alone, so the loss goes on as if nothing had happened.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from train_gpt import small_gpt
from training import Characters, device_here, finish, parser, report

import autopar

IMPORTED = time.time()
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    end_with_agent()
    options = parse()
    torch.manual_seed(0)
    device = device_here()
    text = Characters(device)
    model, inputs = small_gpt(options.layers, options.d_model, options.seq, options.batch, str(device))
    model = model.to(getattr(torch, options.dtype))
    parallel = autopar.parallelize(model, options.mesh, inputs, layout=options.layout)
    planned = time.time()
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=options.lr)
    training = Training(parallel, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps))
    checkpoints = autopar.Checkpoints(options.folder, keep=2)  # has a process group of its own for saves
    checkpoints.load({"training": training})  # the newest complete one, chosen by the first rank
    log = Log(Path(options.folder, "log.jsonl"), training.step, (process_start(), IMPORTED, planned, time.time()))
    while training.step < options.steps:
        # The same batch on all ranks, whatever their number, and the same again after a restart.
        ids, targets = text.draw(options.batch, options.seq, torch.Generator().manual_seed(training.step))
        optimizer.zero_grad()
        loss = parallel(ids=ids, targets=targets)
        loss.backward()
        optimizer.step()
        training.scheduler.step()
        report(options, training.step, loss)
        log.add(training.step, loss.item())
        training.step += 1
        if training.step % options.save_every == 0:
            checkpoints.save({"training": training}, training.step)  # copies the state; a thread writes the copy
    checkpoints.finish()
    finish(options, parallel)


class Training:
    """Everything that a restart cannot compute again, as `torch.distributed.checkpoint` saves and loads an object."""

    def __init__(
        self,
        model: autopar.ParallelModule,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
    ) -> None:
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
            "scheduler": self.scheduler.state_dict(),
            "random": torch.get_rng_state(),  # for dropout: that of the first rank serves all
            "step": self.step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["random"])
        self.step = state["step"]


class Log:
    """One line for each step, by the first rank. After a restart it says what that cost, as a sum of its parts."""

    def __init__(self, path: Path, step: int, moments: tuple[float, float, float, float]) -> None:
        self.path, self.step, self.moments = path, step, moments
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        # The last line may be cut off: its process was killed.
        whole = [json.loads(line) for line in lines if line.endswith("}")]
        self.before: dict[str, Any] | None = whole[-1] if whole else None
        self._say_if_caught_up(step - 1)

    def add(self, step: int, loss: float) -> None:
        if dist.get_rank() == 0:
            line = {"step": step, "loss": loss, "ranks": dist.get_world_size(), "time": time.time()}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        self._say_if_caught_up(step)

    def _say_if_caught_up(self, step: int) -> None:
        if dist.get_rank() != 0 or self.before is None or step < self.before["step"]:
            return
        started, imported, planned, loaded = self.moments
        again, now = self.before["step"] + 1 - self.step, time.time()
        parts = {
            "a rank is missed, the others meet, processes start": started - self.before["time"],
            "imports": imported - started,
            "model, process group, plan": planned - imported,
            f"optimizer, checkpoint of step {self.step}": loaded - planned,
            f"{again} steps again": now - loaded,
            "restart": now - self.before["time"],
        }
        print(f"from {self.before['ranks']} to {dist.get_world_size()} ranks")
        print(*(f"  {part:50} {seconds:6.1f} s" for part, seconds in parts.items()), sep="\n", flush=True)
        self.before = None


def end_with_agent() -> None:
    """Make Linux end this process when torchrun ends, also by kill -9; else it would train on without it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def process_start() -> float:
    """Return when this process was started: a restart pays for the imports, too."""
    since_boot = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot


def parse() -> argparse.Namespace:
    found = parser(__doc__, layout="zero1", steps=100, batch=12, lr=3e-3)
    found.set_defaults(mesh="dp=?")
    found.add_argument("--folder", default="checkpoints", help="shared by all nodes")
    found.add_argument("--save-every", type=int, default=5)
    found.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    found.add_argument("--seq", type=int, default=64)
    found.add_argument("--layers", type=int, default=2)
    found.add_argument("--d-model", type=int, default=64)
    return found.parse_args()


if __name__ == "__main__":
    main()
