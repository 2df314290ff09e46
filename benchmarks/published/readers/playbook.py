"""Hugging Face's Ultra-Scale Playbook: Llama-like models trained by nanotron on nodes of 8 H100."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.published.models import Decoder
from benchmarks.published.readers.rows import Row
from benchmarks.published.runs import TP_HOST_SECONDS, VOCAB_PARALLEL_LOSS, Measured, Run, Sharding, Software

__all__ = ["MODELS", "playbook_runs"]

# Sizes: nanotron's scripts/scaling_benchmarks.py at e24d2483. Without a number of key-value heads it gives every head
# its own. The table's 8B and 80B follow the same script.
MODELS = {
    "1B": Decoder("llama", 16, 2048, 32, 8192, 131072, 4096),
    "3B": Decoder("llama", 28, 3072, 32, 8192, 131072, 4096),
    "8B": Decoder("llama", 32, 4096, 32, 14336, 131072, 4096, tied=False),
    "80B": Decoder("llama", 80, 8192, 64, 28672, 131072, 4096, tied=False),
}
# Gradients add up in float32 (ACCUMULATE_GRAD_IN_FP32) and are sent so while the last micro-batch's backward runs.
# Under ZeRO-1 they are summed whole, in one call after the last backward, and the parameters gathered in one call
# (make_ddp and sync_gradients_across_dp in trainer.py at 9055c664, _all_gather_params in optim/zero.py). Beside a
# gather products run in three pieces: the rank's own shard, those before it, those after it
# (tp_linear_async_communication). What was gathered is kept, as most of the reported memory says. Pipelines of no more
# stages than tensor parallelism spans nodes report half of that and less, so they must have gathered again. A stage
# sends two messages about a tensor before the tensor (parallel/pipeline_parallel/p2p.py).
# In every block the bounds of sequences are made anew (two of zeros, sums and running sums each), the backward of norms
# sums the gradients of their weights apart, and that of FlashAttention has four kernels, of zeroing and casting too.
# Norms and rotary positions are eight Triton kernels, each of which takes its host 62 us more (triton-lang/triton, pull
# request 3503: kernels of many parameters, Triton 2).
# The reported memory is what torch's allocator reserved: 1.11 times what lives in the median of one half of the rows
# without a pipeline, 1.10 times in the other half.
# Two more constants are read off rows of this table, as nothing else measures them. A collective over several nodes
# takes 0.2 ms more for each of them. A block of a pipeline over several nodes takes 2.3 ms + 2.65 ms tp at least,
# whatever its micro-batch; nobody knows why. In one half of the rows, steps of blocks that wait so take 11, 14, 25 and
# 51 ms for each block at tp = 2, 4, 8 and 16, in the other half 9, 16, 24 and 53 ms.
SOFTWARE = Software(
    logit_bytes=VOCAB_PARALLEL_LOSS,
    gathers_beside=False,
    sums_at_once=True,
    send_rounds=3,
    sums_tied=True,
    pieces=3,
    block_launches=6 + 2 + 3,
    block_host_seconds=8 * 62e-6,
    tp_host_seconds=TP_HOST_SECONDS,
    node_seconds=0.2e-3,
    pipeline_floor_seconds=(2.3e-3, 2.65e-3),
    reserved_per_live=1.1,
)
RANKS_PER_NODE = 8
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
        software=replace(SOFTWARE, gathers_again=1 < pp <= tp // RANKS_PER_NODE),
        sharding=SHARDING[row.text("zero_stage")],
        sequence_parallel=tp > 1,
        balanced=True,
        tags=frozenset({_tag(pp, row.whole("nodes"))}),
    )


def _tag(pp: int, nodes: int) -> str:
    return "pp=1" if pp == 1 else f"pp>1 on {'one node' if nodes == 1 else 'several nodes'}"


def _not_for_memory(row: Row, ran: Sequence[Row], decoder: Decoder) -> bool:
    """Return True if a crash had another cause: more stages than blocks, or less memory than there is."""
    if row.whole("pp") > decoder.layers:
        return True
    return any(_at_most_bytes(row, other, decoder) < FULL_BYTES for other in ran if _comparable(row, other))


# Runs of this table went through with up to 77 GB.
FULL_BYTES = 70 * 2**30
# Bytes of each parameter that ZeRO-1 shards: a float32 copy and AdamW's two moments.
STATES_BYTES = 12


def _comparable(one: Row, other: Row) -> bool:
    """Return whether the other run is on the same grid of devices, or has fewer stages and more replicas instead."""
    same = all(one.text(column) == other.text(column) for column in ("model", "nodes", "tp", "seq_len"))
    return same and other.whole("pp") <= one.whole("pp")


def _at_most_bytes(row: Row, ran: Row, decoder: Decoder) -> float:
    """Return an upper bound of a run's bytes, by what was measured of a comparable one.

    Memory grows no faster than the micro-batch. Without ZeRO-1 its states are whole; a stage has up to twice its share.
    More stages have fewer blocks each, of as many more micro-batches in flight, and whole blocks up to twice as much.
    """
    measured = (ran.maybe("gpu_mem_GB") or math.inf) * 2**30
    if row.text("pp") != ran.text("pp"):
        measured *= 2
    if row.text("zero_stage") == "0" and ran.text("zero_stage") == "1":
        measured += 2 * STATES_BYTES * decoder.parameters / (row.whole("tp") * row.whole("pp"))
    return measured * max(1.0, row.whole("mbs_seqs") / ran.whole("mbs_seqs"))
