"""Hugging Face's Ultra-Scale Playbook: Llama-like models trained by nanotron on nodes of 8 H100."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.published.models import Decoder
from benchmarks.published.readers.rows import Row
from benchmarks.published.runs import Measured, Run, Sharding, Software

__all__ = ["MODELS", "playbook_runs"]

# Sizes: nanotron's scripts/scaling_benchmarks.py at e24d2483. Without a number of key-value heads it gives every head
# its own. The table's 8B and 80B follow the same script.
MODELS = {
    "1B": Decoder("llama", 16, 2048, 32, 8192, 131072, 4096),
    "3B": Decoder("llama", 28, 3072, 32, 8192, 131072, 4096),
    "8B": Decoder("llama", 32, 4096, 32, 14336, 131072, 4096, tied=False),
    "80B": Decoder("llama", 80, 8192, 64, 28672, 131072, 4096, tied=False),
}
# Gradients add up in float32 (ACCUMULATE_GRAD_IN_FP32) and are sent so, in DDP's buckets of 25 MB, while the backward
# of the last micro-batch runs.
# Beside a gather products run in three pieces: the rank's own shard, those before it, those after it
# (tp_linear_async_communication). What was gathered is gathered again in the backward (tp_recompute_allgather).
SOFTWARE = Software(bucket_bytes=25 * 2**20, gathers_again=True, pieces=3)
SHARDING: dict[str, Sharding] = {"0": "none", "1": "zero1"}


def playbook_runs(rows: Sequence[Row]) -> list[Run]:
    """One run per row; a row that crashed is one that did not fit, unless it cannot have been for memory."""
    ran = [row for row in rows if row.text("status") == "ok"]
    return [_run(row, ran) for row in rows]


def _run(row: Row, ran: Sequence[Row]) -> Run:
    name = row.text("model")
    if name not in MODELS:
        raise row.fail("model", f"one of {', '.join(MODELS)}")
    if row.text("zero_stage") not in SHARDING:
        raise row.fail("zero_stage", "0 or 1")
    decoder = replace(MODELS[name], seq=row.whole("seq_len"))
    ok = row.text("status") == "ok"
    tokens = row.whole("gbs_seqs") * row.whole("seq_len")
    memory = row.maybe("gpu_mem_GB")
    measured = Measured(
        tokens / (row.number("tok_s_gpu") * row.whole("gpus")) if ok else None,
        memory * 2**30 if memory is not None else None,
        True if ok else None if _not_for_memory(row, ran, decoder) else False,
    )
    tp, pp = row.whole("tp"), row.whole("pp")
    return Run(
        label=row.place,
        group=f"{name} on {row.text('nodes')} nodes",
        decoder=decoder,
        cluster="h100-efa",
        nodes=row.whole("nodes"),
        devices=row.whole("gpus"),
        dp=row.whole("dp"),
        tp=tp,
        pp=pp,
        micro_batch=row.whole("mbs_seqs"),
        micro_batches=row.whole("grad_acc"),
        measured=measured,
        software=SOFTWARE,
        sharding=SHARDING[row.text("zero_stage")],
        sequence_parallel=tp > 1,
        balanced=True,
        tags=frozenset({"pp=1" if pp == 1 else "pp>1"}),
    )


def _not_for_memory(row: Row, ran: Sequence[Row], decoder: Decoder) -> bool:
    """Whether a crash must have had another cause: more stages than blocks, or what needs as much went through."""
    if row.whole("pp") > decoder.layers:
        return True
    return any(_needs_no_less(other, row) for other in ran)


def _needs_no_less(one: Row, other: Row) -> bool:
    """Whether one run takes at least the memory of another, on each device."""
    same = all(one.text(column) == other.text(column) for column in ("model", "nodes", "dp", "tp", "pp", "seq_len"))
    return same and (
        one.whole("mbs_seqs") >= other.whole("mbs_seqs") and one.whole("zero_stage") <= other.whole("zero_stage")
    )
