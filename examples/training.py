"""Shared parts of the training examples: options, a text to learn, and printing.

`autopar.parallelize` and the training loop stand in each example itself.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist

import autopar

__all__ = ["Characters", "device_here", "finish", "parser", "report"]


def device_here() -> torch.device:
    """Return this process's GPU, and make it the default one; the CPU where not every local process has a GPU."""
    if torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


class Characters:
    """The text beside this file, character by character."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        text = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
        known = sorted(set(text))
        self.codes = torch.tensor([known.index(character) for character in text], device=device)
        self.vocab = -(-len(known) // 16) * 16
        """With rows that no character uses, so that the vocabulary can be split."""

    def draw(self, batch: int, seq: int, generator: torch.Generator | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Pieces of the text, and the same one character on."""
        starts = torch.randint(len(self.codes) - seq - 1, (batch, 1), generator=generator)
        pieces = self.codes[starts + torch.arange(seq + 1)]
        return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()


def parser(description: str | None, *, layout: str, steps: int, batch: int, lr: float) -> argparse.ArgumentParser:
    """The options that all examples have, with these defaults."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--layout", default=layout, help="a strategy, a .lay file, or a layout")
    found.add_argument("--mesh", default="dp=1", help="as many ranks as there are processes: dp=2,tp=2")
    found.add_argument("--steps", type=int, default=steps)
    found.add_argument("--batch", type=int, default=batch)
    found.add_argument("--lr", type=float, default=lr)
    found.add_argument("--every", type=int, default=10, help="print the loss every so many steps")
    found.add_argument("--collectives", action="store_true", help="list at the end what one step sends")
    return found


def report(options: argparse.Namespace, step: int, loss: torch.Tensor) -> None:
    """Print the loss every so many steps, and at the last; it is the same on all ranks."""
    if dist.get_rank() == 0 and (step % options.every == 0 or step == options.steps - 1):
        print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)


def finish(options: argparse.Namespace, parallel: autopar.ParallelModule) -> None:
    if options.collectives and dist.get_rank() == 0:
        print(*parallel.collectives(), sep="\n")
    dist.destroy_process_group()
