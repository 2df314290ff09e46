"""vTrain (Bang et al., MICRO 2024): GPT trained by Megatron-DeepSpeed on one node of 8 A100."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.published.models import Decoder, padded_vocab
from benchmarks.published.readers.rows import Row
from benchmarks.published.runs import TP_HOST_SECONDS, VOCAB_PARALLEL_LOSS, Measured, Run, Software

__all__ = ["vtrain_runs"]

# Float16 with float32 masters; gradients are summed in float16, after the last backward.
SOFTWARE = Software(
    gradient_dtype=torch.float16,
    reduce_dtype=torch.float16,
    logit_bytes=VOCAB_PARALLEL_LOSS,
    overlaps=False,
    tp_host_seconds=TP_HOST_SECONDS,
)
# Padded for 8 ranks on any number of them: one trace serves them all, and the head grows by less than 2 %.
VOCAB = 50257


def vtrain_runs(rows: Sequence[Row]) -> list[Run]:
    """Activation checkpointing and 1F1B in every run: the authors' configurations say so."""
    return [_run(row) for row in rows]


def _run(row: Row) -> Run:
    tp, dp, pp = row.whole("tp"), row.whole("dp"), row.whole("pp")
    hidden, layers, micro_batch = row.whole("hidden"), row.whole("layers"), row.whole("micro_batch_seqs")
    decoder = Decoder(
        "gpt",
        layers,
        hidden,
        row.whole("heads"),
        4 * hidden,
        padded_vocab(VOCAB, 8),
        row.whole("seq_len"),
        fused_attention=False,
        dropout=0.1,
        dtype=torch.float16,
    )
    batch = row.whole("global_batch_seqs")
    return Run(
        label=row.place,
        group=f"{layers} x {hidden} on {row.text('gpus')} GPUs",
        decoder=decoder,
        cluster="a100-80",
        nodes=1,
        devices=row.whole("gpus"),
        dp=dp,
        tp=tp,
        pp=pp,
        micro_batch=micro_batch,
        micro_batches=batch // (dp * micro_batch),
        measured=Measured(row.number("iteration_time_ms") / 1e3),
        software=SOFTWARE,
        recompute="full",
        weighted=False,
    )
