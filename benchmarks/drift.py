"""Replicas that drift beside synchronous training: steps in a second where ranks are late, and the loss after training.

    python -m benchmarks.drift                    # both tables, on 4 processes of this machine
    python -m benchmarks.drift --steps 60 --sleep 0.1 --markdown    # longer steps; 12 minutes of a quiet machine
    python -m benchmarks.drift --train 0          # without the second one

A step sleeps 50 ms, which stands for a device; a late rank sleeps as long again (`--sleep` on a busy machine, where
a step of the processor takes longer). Steps in a second are the mean of the
ranks, each over its own time, and shown as multiples of synchronous training under the same sleeps. The loss is that of
the mean of all replicas, on fixed batches that none was trained on.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

import autopar
from autopar.lowering.collectives.process_groups import join_local_group
from autopar.runtime.module import ParallelModule
from examples.gpt import gpt
from examples.training import Characters

RANKS = 4
BATCH, SEQ = 16, 32
METHODS = {
    "sync": "ddp(dp=pod)",
    "local SGD, every 16": "drift pod -> mean every 16; ddp",
    "DiLoCo, every 20": "drift pod -> mean every 20, outer nesterov(0.7, 0.9); ddp",
    "ring": "drift pod -> ring; ddp",
    "exponential": "drift pod -> exponential; ddp",
    "server, BSP": "drift pod -> server(2); ddp",
    "server, SSP 4": "drift pod -> server(2), stale 4; ddp",
    "server, TAP": "drift pod -> server(2), stale any; ddp",
}
# Share of the steps in which a rank sleeps longer, by rank.
LATE = {
    "nobody": (0.0, 0.0, 0.0, 0.0),
    "any rank, 1/8 of the steps": (1 / 8,) * RANKS,
    "one rank, 1/2 of the steps": (0.0, 0.0, 0.0, 1 / 2),
    "one rank, always": (0.0, 0.0, 0.0, 1.0),
    "one rank, 1/2; another, always": (0.0, 0.0, 1 / 2, 1.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="steps of each cell of the first table (default 40)")
    parser.add_argument("--sleep", type=float, default=0.05, help="seconds of a step, and of its delay (default 0.05)")
    parser.add_argument("--train", type=int, default=300, help="steps before the loss (default 300)")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown, for docs/drift.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "found.json")
        spawn(_rank, (options.steps, options.sleep, options.train, str(result)), nprocs=RANKS)  # type: ignore[no-untyped-call]
        found = json.loads(result.read_text())
    if options.steps:
        print(f"steps in a second ÷ those of sync, {options.steps} steps; sync itself in steps/s")
        _print_table(_rates(found["rates"]), options.markdown)
    if options.train:
        print(f"\nloss after {options.train} steps, and MB that a rank sent at meetings")
        losses = [("", *METHODS), ("loss", *(f"{loss:.3f}" for loss, _ in found["losses"].values()))]
        losses.append(("MB", *(f"{sent / 1e6:.1f}" for _, sent in found["losses"].values())))
        _print_table(losses, options.markdown)


def _rates(rates: Mapping[str, Mapping[str, float]]) -> list[tuple[str, ...]]:
    """Return the rows of the first table, under a row of names."""
    rows = [("late", *METHODS)]
    for late, row in rates.items():
        ratios = (f"{row[name] / row['sync']:.2f}" for name in METHODS if name != "sync")
        rows.append((late, f"{row['sync']:.2f}/s", *ratios))
    return rows


def _print_table(rows: Sequence[Sequence[str]], markdown: bool) -> None:
    if markdown:
        lines = [f"| {' | '.join(row)} |" for row in rows]
        print("\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]))
        return
    for first, *cells in rows:
        print(f"  {first:32}" + "".join(f"{cell:>21}" for cell in cells))


def _rank(rank: int, steps: int, sleep: float, train: int, result: str) -> None:
    torch.set_num_threads(1)
    join_local_group(Path(result).with_name("meeting"), rank, RANKS)
    rates: dict[str, dict[str, float]] = {late: {} for late in LATE if steps}
    losses = {}
    for name, layout in METHODS.items():
        if steps:
            trainee = _Trainee(layout)
            for late, shares in LATE.items():
                rates[late][name] = trainee.rate(shares[rank], steps, sleep)
            trainee.finish()
        if train:
            losses[name] = _Trainee(layout).loss(train)
        if rank == 0:
            now = {late: round(row[name], 3) for late, row in rates.items()}
            print(f"# {name}: steps/s {now}, loss {losses.get(name)}", flush=True)
    if rank == 0:
        Path(result).write_text(json.dumps({"rates": rates, "losses": losses}))
    dist.barrier()
    dist.destroy_process_group()


class _Trainee:
    """A small GPT on all ranks under one of the methods, with its own draws of data and sleeps."""

    def __init__(self, layout: str) -> None:
        torch.manual_seed(0)
        self.text, self.drifts = Characters(), "drift" in layout
        model, inputs = gpt(layers=2, d_model=32, heads=4, vocab=self.text.vocab, seq=SEQ, batch=BATCH)
        self.module: ParallelModule = autopar.parallelize(model, f"pod={RANKS}", inputs, layout=layout)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=3e-3)
        self.data = torch.Generator().manual_seed(1)
        self.sleeps = torch.Generator().manual_seed(77 + dist.get_rank())

    def drawn(self, draw: torch.Generator) -> dict[str, Any]:
        starts = torch.randint(len(self.text.codes) - SEQ - 1, (BATCH, 1), generator=draw)
        pieces = self.text.codes[starts + torch.arange(SEQ + 1)]
        return {"ids": pieces[:, :-1].contiguous(), "targets": pieces[:, 1:].contiguous()}

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.module(**self.drawn(self.data)).backward()
        self.optimizer.step()

    def rate(self, share: float, steps: int, sleep: float) -> float:
        """Return the steps in a second of the ranks, on average; a rank is late in this share of its steps."""
        self.step()  # servers start, buffers are made
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(steps):
            time.sleep(sleep * (1 + (float(torch.rand((), generator=self.sleeps)) < share)))
            self.step()
        own = torch.tensor(steps / (time.perf_counter() - begun))
        dist.all_reduce(own)
        return float(own) / RANKS

    def loss(self, steps: int) -> tuple[float, float]:
        """Return the loss of the mean of all replicas after training, and the bytes that a rank sent at meetings."""
        for _ in range(steps):
            self.step()
        sent = self.module.replicas.sent_bytes if self.drifts else 0.0
        self.finish()
        for parameter in self.module.parameters():
            mean: Any = parameter.detach()
            local = mean.to_local()
            dist.all_reduce(local)
            local /= RANKS
        draw, total = torch.Generator().manual_seed(99), torch.zeros(())
        with torch.no_grad():
            for _ in range(8):
                total += self.module(**self.drawn(draw)) / 8
        dist.all_reduce(total)
        return float(total) / RANKS, sent

    def finish(self) -> None:
        if self.drifts:
            self.module.replicas.finish()


if __name__ == "__main__":
    main()
