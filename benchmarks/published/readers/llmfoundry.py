"""MosaicML's llm-foundry: MPT models under FSDP on A100 and H100."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from benchmarks.published.models import Decoder
from benchmarks.published.readers.rows import Row
from benchmarks.published.runs import Measured, Run, Software

__all__ = ["llmfoundry_runs"]

# Layers, width, heads: llm-foundry's scripts/train/yamls/pretrain/mpt-*.yaml; the table's numbers of parameters agree.
MODELS = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
VOCAB = 50368
CLUSTERS = {"h100_80gb": "h100-roce", "a100_80gb": "a100-80", "a100_40gb": "a100-40"}
# True: gathered parameters are freed and gathered again in the backward.
REGATHERS = {"FULL_SHARD": True, "SHARD_GRAD_OP": False}
# The first FlashAttention: Dao, FlashAttention-2 (arXiv 2307.08691), is twice as fast.
ATTENTION_FRACTION = 0.5
# Composer's mixed precision: DEFAULT reduces gradients in float32, PURE in the type of the computation.
REDUCED = {"DEFAULT": torch.float32, "PURE": torch.bfloat16}

# TransformerEngine's linears in float8, whose scales are those of earlier steps.
LINEARS = {"amp_bf16": "", "bf16": "", "amp_fp8": "fp8"}
KNOWN: Mapping[str, Collection[str]] = {
    "model": MODELS,
    "gpu": CLUSTERS,
    "sharding": REGATHERS,
    "mp_mode": REDUCED,
    "precision": LINEARS,
}


def llmfoundry_runs(rows: Sequence[Row]) -> list[Run]:
    return [_run(row) for row in rows]


def _run(row: Row) -> Run:
    for column, known in KNOWN.items():
        if row.text(column) not in known:
            raise row.fail(column, f"one of {', '.join(known)}")
    layers, width, heads = MODELS[row.text("model")]
    linears = LINEARS[row.text("precision")]
    reduced = REDUCED[row.text("mp_mode")]
    seq, devices, batch = row.whole("seq_len"), row.whole("gpus"), row.whole("global_bs")
    return Run(
        label=row.place,
        group=f"{row.text('model')} on {devices} {row.text('gpu')}{f' in {linears}' if linears else ''}",
        decoder=Decoder("gpt", layers, width, heads, 4 * width, VOCAB, seq),
        cluster=CLUSTERS[row.text("gpu")],
        nodes=-(-devices // 8),
        devices=devices,
        dp=devices,
        tp=1,
        pp=1,
        micro_batch=row.whole("micro_bs"),
        micro_batches=row.whole("grad_accum"),
        measured=Measured(batch * seq / row.number("throughput_tokens_s")),
        software=Software(
            linears=linears, delayed_scales=bool(linears), reduce_dtype=reduced, attention_fraction=ATTENTION_FRACTION
        ),
        sharding="fsdp",
        regathers=REGATHERS[row.text("sharding")],
        recompute="full" if row.text("act_ckpt") == "True" else "none",
        tags=frozenset({row.text("gpu"), *filter(None, (linears,))}),
        weighted=False,
    )
