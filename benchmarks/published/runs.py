"""One published training run: the model, the devices, the strategy, and what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from autopar.cost.hardware.cluster import AttentionRates
from autopar.files import data_folder
from autopar.sharding.layout.language import Layout, choose_layout
from autopar.sharding.schedules import Schedule
from autopar.submesh import SubMesh
from benchmarks.published.models import Decoder

__all__ = [
    "TP_HOST_SECONDS",
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
    """Features of the authors' training code that cost time or memory."""

    # Pointwise chains run as one kernel.
    compiled: bool = False
    # Dtype in which the gradients of the micro-batches add up.
    gradient_dtype: torch.dtype = torch.float32
    # Linears multiply in float8, with a scale for each tensor: `fp8`.
    linears: str = ""
    # Their scales are those of earlier steps, and one kernel casts a tensor for both directions.
    delayed_scales: bool = False
    # Dtype in which gradients are sent.
    reduce_dtype: torch.dtype = torch.float32
    # The speed of its fused attention, of FlashAttention-2's.
    attention_fraction: float = 1.0
    # Bytes that its loss reads and writes for each logit, forward and backward; None: as torch's cross entropy.
    logit_bytes: tuple[int, int] | None = None
    # Communication about parameters runs beside the backward.
    overlaps: bool = True
    # ZeRO-1 gathers parameters beside the next forward; else right after the optimizer step.
    gathers_beside: bool = True
    # ZeRO-1 too sums whole gradients, all in one call after the last backward, and gathers parameters in one call.
    sums_at_once: bool = False
    # Messages that go one after the other where a stage hands on what it has: all but one of them are small.
    send_rounds: int = 1
    # The first and the last stage each have the table of a tied model, and sum its gradients at the end.
    sums_tied: bool = False
    # Sequence parallelism keeps the pieces of a gathered value and gathers them again in the backward.
    gathers_again: bool = False
    # Bytes that its allocator reserves for each that lives: whole blocks and fragments.
    reserved_per_live: float = 1.0
    # Number of products that multiply a gathered value, so that the first begins before all of it is there.
    pieces: int = 1
    # A recompute runs all ops of a layer; else it stops when all saved tensors are back.
    recomputes_to_end: bool = True
    # Small kernels of a block, forward and backward, beyond those of the model that stands in for it.
    block_launches: int = 0
    # Seconds of its host for a block beyond launching kernels, and beyond that under tensor parallelism.
    block_host_seconds: float = 0.0
    tp_host_seconds: float = 0.0
    # Seconds of a collective of values beyond its price, for each node that tensor parallelism spans, if several.
    node_seconds: float = 0.0
    # Least seconds of a block in a pipeline over several nodes: of any micro-batch, and for each tensor-parallel rank.
    pipeline_floor_seconds: tuple[float, float] = (0.0, 0.0)


# FlashAttention-2, which the runs on H100 had: torch has taken cuDNN's kernels there since 2.11. On an H100, heads of
# 128, 8,192 tokens: forward 370 TFLOP/s, 284 where it is causal, backward 290 and 287; heads of 64 forward 310
# (Dao-AILab/flash-attention, pull requests 1791 and 2688). The start of a tile is that of an A100. In the backward
# heads of 64 are 9 % slower than heads of 128 (FlashAttention-3, arXiv 2407.08608, figure 6: 264 and 291 at 2,048
# tokens).
FLASH_2 = {
    "H100 SXM5 80 GB": AttentionRates(128, 0.478, 0.336, 0.793, 1.02, softmax=30, start_keys=280, backward_softmax=14)
}

# Host of a block and micro-batch under tensor parallelism in Megatron-LM and code like it, beyond launching kernels:
# hooks and autograd functions. Read off nanotron's rows without a pipeline; vTrain's rows agree (18 % became 10 %).
TP_HOST_SECONDS = 1e-3

# Megatron-LM's loss, which nanotron has too, kernel by kernel: a cast to float32 (6), max (4), subtract (8), exp (8),
# sum (4), divide (8); the gradient is scaled (8) and cast back (6).
VOCAB_PARALLEL_LOSS = (38, 14)


@dataclass(frozen=True)
class Measured:
    step_seconds: float | None = None
    memory_bytes: float | None = None
    # None where the source does not say.
    fits: bool | None = None


@dataclass(frozen=True)
class Run:
    """One row of a table."""

    label: str
    # Rows of one group are alternatives: the same model and batch on the same devices.
    group: str
    decoder: Decoder
    cluster: str
    nodes: int
    devices: int
    dp: int
    tp: int
    pp: int
    # Sequences for each data-parallel rank.
    micro_batch: int
    micro_batches: int
    measured: Measured
    software: Software
    sharding: Sharding = "none"
    sequence_parallel: bool = False
    # Gathered parameters are freed after the forward and gathered again in the backward.
    regathers: bool = False
    recompute: Recompute = "none"
    schedule: Schedule = "1f1b"
    chunks: int = 1
    # Its memory is worked out too.
    weighted: bool = True
    # Only one block of the model was measured.
    one_block: bool = False
    # The same run in other ways, where the source tuned what it does not tell: the fastest counts.
    tries: tuple[Run, ...] = ()
    # Blocks, and the head as one of them, are dealt to the stages by their parameters; else as evenly as they go.
    balanced: bool = False
    # Further groups that count the row beside the whole table: `pp=1`.
    tags: frozenset[str] = frozenset()

    @property
    def tokens(self) -> int:
        """Tokens of a step, on all devices."""
        return self.micro_batch * self.micro_batches * self.dp * self.decoder.seq

    @property
    def axes(self) -> Mapping[str, int]:
        return {"dp": self.dp, "tp": self.tp}


def layout_text(sharding: Sharding, sequence_parallel: bool, tensor_parallel: bool) -> str:
    """Return the strategy of a run in the layout language: one of `strategies/`, and the states' sharding."""
    name = ("megatron_sp" if sequence_parallel else "megatron") if tensor_parallel else "ddp"
    text = (data_folder("strategies") / f"{name}.lay").read_text()
    split = "(heads, kv_heads, d_ff) -> tp, vocab -> tp pad, * -> dp | none" if tensor_parallel else "* -> dp | none"
    held = {"none": "", "zero1": "opt", "fsdp": "param, grad, opt"}[sharding]
    return f"{text}\n{held} {{ {split} }}\n" if held else text


@lru_cache(maxsize=256)
def layout_of(sharding: Sharding, sequence_parallel: bool, dp: int, tp: int) -> Layout:
    return choose_layout(layout_text(sharding, sequence_parallel, tp > 1), SubMesh({"dp": dp, "tp": tp}))
