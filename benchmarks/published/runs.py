"""One published training run: the model, the devices, the strategy, and what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from autopar.cost.pipeline import Schedule
from autopar.files import data_folder
from autopar.sharding.layout.language import Layout, choose_layout
from benchmarks.published.models import Decoder

__all__ = [
    "VOCAB_PARALLEL_LOSS",
    "Measured",
    "Recompute",
    "Run",
    "Sharding",
    "Software",
    "layout_of",
    "layout_text",
]

Sharding = Literal["none", "zero1", "fsdp"]
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Software:
    """What the authors' training code does, where it differs from code to code and costs time or memory."""

    compiled: bool = False
    """Pointwise chains run as one kernel."""
    gradient_dtype: torch.dtype = torch.float32
    """In which the gradients of the micro-batches add up."""
    reduce_dtype: torch.dtype = torch.float32
    """In which gradients are sent."""
    attention_fraction: float = 1.0
    """The speed of its fused attention, of FlashAttention-2's."""
    logit_bytes: tuple[int, int] | None = None
    """What its loss reads and writes for each logit, forward and backward; None: as torch's cross entropy does."""
    overlaps: bool = True
    """Communication about parameters runs beside the backward."""
    gathers_beside: bool = True
    """What ZeRO-1 gathers is gathered beside the next forward; else right after the optimizer has stepped."""
    sums_at_once: bool = False
    """ZeRO-1 too sums whole gradients, all in one call after the last backward, and gathers parameters in one call."""
    send_rounds: int = 1
    """Messages that go one after the other where a stage hands on what it has: all but one of them are small."""
    sums_tied: bool = False
    """The first and the last stage each have the table of a tied model, and sum its gradients at the end."""
    gathers_again: bool = False
    """Sequence parallelism keeps the pieces of a gathered value and gathers them again in the backward."""
    pieces: int = 1
    """In how many products a gathered value is multiplied, to begin before all of it is there."""
    block_launches: int = 0
    """Small kernels of a block, forward and backward, beyond those of the model that stands in for it."""
    block_host_seconds: float = 0.0
    """What its host takes for a block beyond launching kernels."""


VOCAB_PARALLEL_LOSS = (38, 14)
"""Megatron-LM's loss, which nanotron has too, kernel by kernel: a cast to float32 (6), max (4), subtract (8), exp (8),
sum (4), divide (8); the gradient is scaled (8) and cast back (6)."""


@dataclass(frozen=True)
class Measured:
    step_seconds: float | None = None
    memory_bytes: float | None = None
    fits: bool | None = None
    """None where the source does not say."""


@dataclass(frozen=True)
class Run:
    """One row of a table."""

    label: str
    group: str
    """Rows of one group are alternatives: the same model and batch on the same devices."""
    decoder: Decoder
    cluster: str
    nodes: int
    devices: int
    dp: int
    tp: int
    pp: int
    micro_batch: int
    """Sequences for each data-parallel rank."""
    micro_batches: int
    measured: Measured
    software: Software
    sharding: Sharding = "none"
    sequence_parallel: bool = False
    regathers: bool = False
    """Gathered parameters are let go of after the forward and gathered again in the backward."""
    recompute: Recompute = "none"
    schedule: Schedule = "1f1b"
    chunks: int = 1
    weighted: bool = True
    """Its memory is worked out too."""
    one_block: bool = False
    """Only one block of the model was measured."""
    tries: tuple[Run, ...] = ()
    """The same run in other ways, where the source tuned what it does not tell: the fastest counts."""
    balanced: bool = False
    """Blocks, and the head as one of them, are dealt to the stages by their parameters; else as evenly as they go."""
    tags: frozenset[str] = frozenset()
    """What the row is counted under beside the whole table: `pp=1`."""

    @property
    def tokens(self) -> int:
        """Of a step, on all devices."""
        return self.micro_batch * self.micro_batches * self.dp * self.decoder.seq

    @property
    def axes(self) -> Mapping[str, int]:
        return {"dp": self.dp, "tp": self.tp}


def layout_text(sharding: Sharding, sequence_parallel: bool, tensor_parallel: bool) -> str:
    """The strategy of a run in the layout language: one of `strategies/`, and where the parameters' states lie."""
    name = ("megatron_sp" if sequence_parallel else "megatron") if tensor_parallel else "ddp"
    text = (data_folder("strategies") / f"{name}.lay").read_text()
    split = "(heads, kv_heads, d_ff) -> tp, vocab -> tp pad, * -> dp | none" if tensor_parallel else "* -> dp | none"
    held = {"none": "", "zero1": "opt", "fsdp": "param, grad, opt"}[sharding]
    return f"{text}\n{held} {{ {split} }}\n" if held else text


@lru_cache(maxsize=256)
def layout_of(sharding: Sharding, sequence_parallel: bool, dp: int, tp: int) -> Layout:
    return choose_layout(layout_text(sharding, sequence_parallel, tp > 1), {"dp": dp, "tp": tp})
