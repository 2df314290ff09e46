"""Megatron-LM on Selene (nodes of 8 A100): Narayanan et al., SC'21, and Korthikanti et al., 2022."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import torch

from benchmarks.published.models import Decoder, padded_vocab
from benchmarks.published.readers.rows import Row
from benchmarks.published.runs import TP_HOST_SECONDS, VOCAB_PARALLEL_LOSS, Measured, Recompute, Run, Software

__all__ = ["layer_runs", "recompute_runs", "sc21_runs"]

# Megatron-LM fuses bias, GELU, dropout and residual, and scale, mask and softmax. Gradients add up in float32 and are
# summed after the last backward, all at once.
SOFTWARE = Software(
    logit_bytes=VOCAB_PARALLEL_LOSS, overlaps=False, gathers_again=True, tp_host_seconds=TP_HOST_SECONDS
)
CLUSTER = "a100-80"
VOCAB = 51200


def sc21_runs(rows: Sequence[Row]) -> list[Run]:
    """Table 1. It does not give the micro-batch, which the paper tunes: 1, and each larger power of two as `tries`."""
    return [_sc21(row) for row in rows]


def _sc21(row: Row) -> Run:
    layers, width, seq, vocab = row.whole("layers"), row.whole("hidden"), row.whole("seq_len"), row.whole("vocab")
    devices, batch, dp = row.whole("gpus"), row.whole("global_batch"), row.whole("dp_derived")
    # The paper's own count of FLOPs, with which it turned times into FLOP/s: equation 3.
    flops = 96 * batch * seq * layers * width**2 * (1 + seq / (6 * width) + vocab / (16 * layers * width))
    run = Run(
        label=row.place,
        group="table 1",
        decoder=_decoder(layers, width, row.whole("heads"), vocab, seq, row.whole("tp")),
        cluster=CLUSTER,
        nodes=-(-devices // 8),
        devices=devices,
        dp=dp,
        tp=row.whole("tp"),
        pp=row.whole("pp"),
        micro_batch=1,
        micro_batches=batch // dp,
        measured=Measured(flops / (devices * row.number("tflops_per_gpu") * 1e12)),
        software=SOFTWARE,
        recompute="full",
    )
    sizes = [size for size in (2, 4, 8, 16) if run.micro_batches % size == 0]
    tries = tuple(replace(run, micro_batch=size, micro_batches=run.micro_batches // size) for size in sizes)
    return replace(run, tries=tries)


def _decoder(layers: int, width: int, heads: int, vocab: int, seq: int, tp: int) -> Decoder:
    return Decoder(
        "gpt",
        layers,
        width,
        heads,
        4 * width,
        padded_vocab(vocab, tp),
        seq,
        fused_attention=False,
        dropout=0.1,
        dtype=torch.float16,
    )


def recompute_runs(rows: Sequence[Row]) -> list[Run]:
    """Table 5: whole iterations."""
    return [_iteration(row) for row in rows]


def _iteration(row: Row) -> Run:
    devices, dp, pp = row.whole("gpus"), row.whole("dp"), row.whole("pp")
    tp, micro_batch, chunks = row.whole("tp"), row.whole("micro_batch"), row.whole("vp_interleave")
    return Run(
        label=row.place,
        group=row.text("model"),
        decoder=_decoder(row.whole("layers"), row.whole("hidden"), row.whole("heads"), VOCAB, row.whole("seq_len"), tp),
        cluster=CLUSTER,
        nodes=-(-devices // 8),
        devices=devices,
        dp=dp,
        tp=tp,
        pp=pp,
        micro_batch=micro_batch,
        micro_batches=row.whole("global_batch") // (dp * micro_batch),
        measured=Measured(row.number("iteration_time_s")),
        software=SOFTWARE,
        sequence_parallel=_yes(row, "sequence_parallel"),
        recompute=_recompute(row, "act_ckpt"),
        schedule="interleaved" if chunks > 1 else "1f1b",
        chunks=chunks,
        weighted=False,
    )


def layer_runs(rows: Sequence[Row]) -> list[Run]:
    """Table 4: one block of the 22B model, forward and backward."""
    return [_layer(row) for row in rows]


def _layer(row: Row) -> Run:
    tp = row.whole("tp")
    decoder = _decoder(row.whole("layers"), row.whole("hidden"), row.whole("heads"), VOCAB, row.whole("seq_len"), tp)
    return Run(
        label=row.place,
        group=row.text("model"),
        decoder=decoder,
        cluster=CLUSTER,
        nodes=-(-tp // 8),
        devices=tp,
        dp=1,
        tp=tp,
        pp=1,
        micro_batch=row.whole("micro_batch"),
        micro_batches=1,
        measured=Measured(row.number("total_ms_per_layer") / 1e3),
        software=SOFTWARE,
        sequence_parallel=_yes(row, "sequence_parallel"),
        recompute=_recompute(row, "recompute"),
        weighted=False,
        one_block=True,
    )


def _yes(row: Row, column: str) -> bool:
    if row.text(column) not in ("yes", "no"):
        raise row.fail(column, "yes or no")
    return row.text(column) == "yes"


def _recompute(row: Row, column: str) -> Recompute:
    modes: tuple[Recompute, ...] = get_args(Recompute)
    for known in modes:
        if row.text(column) == known:
            return known
    raise row.fail(column, f"one of {', '.join(modes)}")
