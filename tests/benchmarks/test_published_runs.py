"""Rows of published tables become the runs that they describe; runs that must cost more do."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.cost.hardware.cluster import load_device
from benchmarks.published.errors import kind_of
from benchmarks.published.models import Decoder, decoder_inputs, decoder_model, padded_vocab
from benchmarks.published.parts import _parts, _propagated
from benchmarks.published.price import price
from benchmarks.published.readers.rows import TableError, read_rows
from benchmarks.published.runs import Measured, Run, Software, layout_text
from benchmarks.published.stages import stages_of
from benchmarks.published.tables import judge, reader_of
from benchmarks.published.traces import expect, few_collections, least_batch, traced

PLAYBOOK = (
    "model,nodes,gpus,dp,tp,pp,zero_stage,mbs_seqs,grad_acc,gbs_seqs,seq_len,tok_s_gpu,gpu_mem_GB,status\n"
    "1B,1,8,4,2,1,1,2,32,256,4096,20000,30.5,ok\n"
    "1B,1,8,4,2,1,1,8,8,256,4096,,,crashed_or_oom\n"
    "1B,1,8,4,2,1,1,1,64,256,4096,,,crashed_or_oom\n"
    "1B,4,32,1,1,32,0,1,256,256,4096,,,crashed_or_oom\n"
)
TABLE_4 = (
    "model,heads,hidden,layers,tp,seq_len,micro_batch,sequence_parallel,recompute,total_ms_per_layer\n"
    "22B,64,6144,48,8,2048,4,yes,selective,20.3\n"
)
FOUNDRY = (
    "model,seq_len,gpus,gpu,micro_bs,grad_accum,global_bs,throughput_tokens_s,precision,mp_mode,sharding,act_ckpt\n"
    "30b,2048,8,h100_80gb,8,1,64,400000,amp_bf16,DEFAULT,FULL_SHARD,False\n"
    "30b,2048,8,h100_80gb,8,1,64,500000,amp_fp8,DEFAULT,FULL_SHARD,False\n"
)
TINY = Decoder("gpt", 4, 64, 4, 256, 512, 32)
RUN = Run(
    label="tiny",
    group="tiny",
    decoder=TINY,
    cluster="a100-80",
    nodes=1,
    devices=8,
    dp=8,
    tp=1,
    pp=1,
    micro_batch=2,
    micro_batches=4,
    measured=Measured(1.0),
    software=Software(),
)


def runs_of(path: Path, text: str) -> list[Run]:
    path.write_text(text)
    reader = reader_of(path)
    assert reader is not None
    return reader(read_rows(path))


def test_playbook_rows(tmp_path: Path) -> None:
    ran, larger, smaller, too_deep = runs_of(tmp_path / "other_e2e_ultrascale_playbook_h100_rows.csv", PLAYBOOK)
    assert (ran.dp, ran.tp, ran.pp, ran.sharding, ran.sequence_parallel) == (4, 2, 1, "zero1", True)
    assert (ran.decoder.layers, ran.decoder.seq, ran.tokens) == (16, 4096, 256 * 4096)
    assert ran.measured.step_seconds == pytest.approx(256 * 4096 / (20000 * 8))
    assert ran.measured.memory_bytes == pytest.approx(30.5 * 2**30)
    assert larger.measured.fits is False
    # Half the micro-batch needs less than the 30.5 GB that were reported, 4 times as much may need 122 GB. 16 blocks
    # make no 32 stages.
    assert smaller.measured.fits is None
    assert too_deep.measured.fits is None


def test_a_crash_of_more_stages_than_ran_is_none_for_memory(tmp_path: Path) -> None:
    """Twice as many stages hold at most twice as much; more tensor parallelism, or fewer stages, proves nothing."""
    header = PLAYBOOK.split("\n")[0]
    ran = "1B,4,32,4,2,4,1,2,32,256,4096,20000,20.5,ok"
    rows = ["1B,4,32,2,2,8,1,2,64", "1B,4,32,2,2,8,1,4,32", "1B,4,32,8,2,2,1,2,16", "1B,4,32,2,4,4,1,2,64"]
    table = "\n".join([header, ran, *(f"{row},256,4096,,,crashed_or_oom" for row in rows)])
    _, deeper, larger, shallower, other = runs_of(tmp_path / "e2e_ultrascale_playbook_h100.csv", f"{table}\n")
    assert deeper.measured.fits is None
    assert (larger.measured.fits, shallower.measured.fits, other.measured.fits) == (False, False, False)


def test_pipelines_gather_again_where_tensor_parallelism_spans_as_many_nodes(tmp_path: Path) -> None:
    header = PLAYBOOK.split("\n")[0]
    rows = "".join(f"1B,16,128,1,{tp},{pp},0,1,256,256,4096,20000,20.5,ok\n" for tp, pp in ((16, 2), (16, 8), (32, 1)))
    found = runs_of(tmp_path / "e2e_ultrascale_playbook_h100.csv", f"{header}\n{rows}")
    assert [run.software.gathers_again for run in found] == [True, False, False]


def test_reserved_memory_is_compared() -> None:
    plain = replace(RUN, measured=Measured(1.0))
    reserving = replace(plain, software=replace(plain.software, reserved_per_live=1.5))
    live, reserved = price(plain), price(reserving)
    assert live.memory_bytes is not None
    assert reserved.memory_bytes == pytest.approx(1.5 * live.memory_bytes)
    assert reserved.step_seconds == live.step_seconds


def test_rows_of_one_block(tmp_path: Path) -> None:
    (run,) = runs_of(tmp_path / "e2e_reducing_act_recompute_tab4_x.csv", TABLE_4)
    assert run.one_block
    assert run.recompute == "selective"
    assert run.measured.step_seconds == pytest.approx(0.0203)


def test_rows_in_float8(tmp_path: Path) -> None:
    plain, scaled = runs_of(tmp_path / "e2e_llmfoundry_x.csv", FOUNDRY)
    assert (plain.software.linears, scaled.software.linears) == ("", "fp8")
    assert (kind_of(plain).bits, kind_of(scaled).bits) == ("16", "8")
    assert plain.group != scaled.group
    assert "fp8" in scaled.tags
    assert price(scaled).step_seconds < price(plain).step_seconds


def test_a_value_that_is_none_of_those_known(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"e2e_ultrascale_playbook_h100\.csv:2: model is '9B'; expected one of 1B, 3B"):
        runs_of(tmp_path / "e2e_ultrascale_playbook_h100.csv", PLAYBOOK.replace("1B,1,8,4,2,1,1,2", "9B,1,8,4,2,1,1,2"))
    with pytest.raises(TableError, match=r":2: tp is 'two'; expected a whole number"):
        runs_of(tmp_path / "e2e_ultrascale_playbook_h100.csv", PLAYBOOK.replace("4,2,1,1,2,32", "4,two,1,1,2,32"))
    with pytest.raises(TableError, match="no column 'status'"):
        runs_of(tmp_path / "e2e_ultrascale_playbook_h100.csv", PLAYBOOK.replace("status", "state"))


def test_decoders_have_their_parameters() -> None:
    """MPT-125M has 125,311,488 parameters at 2,048 positions: llm-foundry's table says so."""
    mpt = Decoder("gpt", 12, 768, 12, 3072, 50368, 2048)
    assert sum(parameter.numel() for parameter in decoder_model(mpt).parameters()) == 125311488


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("fused", [True, False])
def test_decoders_run(family: str, fused: bool) -> None:
    decoder = replace(TINY, family=family, fused_attention=fused, dtype=torch.float32)
    loss = decoder_model(decoder)(**decoder_inputs(decoder, 3))
    assert loss.shape == ()
    assert loss.requires_grad


def test_vocabularies_are_padded() -> None:
    assert padded_vocab(50257, 1) == 50304
    assert padded_vocab(50257, 8) == 51200


def test_even_stages() -> None:
    assert [stage.blocks for stage in stages_of(replace(TINY, layers=7), 3, balanced=False)] == [3, 2, 2]


def test_balanced_stages_count_the_head() -> None:
    """nanotron on 1B: 16 blocks and a head as large as 4; over half of 20 is 11."""
    decoder = Decoder("llama", 16, 2048, 32, 8192, 131072, 4096)
    two = stages_of(decoder, 2, balanced=True)
    assert [stage.blocks for stage in two] == [11, 5]
    eight = stages_of(decoder, 8, balanced=True)
    assert sum(stage.blocks for stage in eight) == 16
    assert [stage.last for stage in eight].count(True) == 1
    assert eight[0].first


@pytest.mark.parametrize(
    ("sharding", "lines"),
    [("none", []), ("zero1", ["opt {"]), ("fsdp", ["param, grad, opt {"])],
)
def test_layouts_say_where_states_lie(sharding: str, lines: list[str]) -> None:
    text = layout_text(sharding, sequence_parallel=True, tensor_parallel=True)
    assert "strategy megatron_sp" in text
    assert all(line in text for line in lines)
    assert ("opt {" in text) == bool(lines)


def test_more_work_takes_longer_and_more_room() -> None:
    one = price(RUN)
    assert price(replace(RUN, micro_batches=8)).step_seconds > 1.5 * one.step_seconds
    larger = price(replace(RUN, decoder=replace(TINY, layers=8)))
    assert larger.step_seconds > one.step_seconds
    assert larger.memory_bytes > one.memory_bytes


def test_sharding_saves_memory() -> None:
    whole, optimizer, everything = (price(replace(RUN, sharding=kind)) for kind in ("none", "zero1", "fsdp"))
    assert everything.memory_bytes < optimizer.memory_bytes < whole.memory_bytes


def test_recomputation_takes_time_and_saves_memory() -> None:
    wide = replace(RUN, decoder=replace(TINY, d_model=1024, d_ff=4096, seq=512, layers=8), micro_batch=16)
    plain, again = price(wide), price(replace(wide, recompute="full"))
    assert plain.step_seconds < again.step_seconds < 1.6 * plain.step_seconds
    assert again.memory_bytes < plain.memory_bytes


def test_a_pipeline_has_a_bubble() -> None:
    """Four equal stages and two micro-batches: 5 / 2 of the time that their work takes."""
    wide = replace(RUN, decoder=replace(TINY, d_model=1024, d_ff=4096, seq=512, layers=32), dp=1)
    few = price(replace(wide, pp=4, micro_batches=2)).step_seconds
    many = price(replace(wide, pp=4, micro_batches=64)).step_seconds
    assert 2.0 < (few / 2) / (many / 64) < 2.6


def with_software(run: Run, **changes: Any) -> float:
    return price(replace(run, software=replace(run.software, **changes))).step_seconds


def test_whole_sums_under_zero1_are_not_hidden() -> None:
    sharded = replace(RUN, sharding="zero1", micro_batches=1)
    assert with_software(sharded, sums_at_once=True) > price(sharded).step_seconds
    assert with_software(RUN, sums_at_once=True) == price(RUN).step_seconds, "nothing is sharded"


def test_a_loss_takes_what_its_logits_are_read_and_written() -> None:
    logits = 2 * TINY.seq * TINY.vocab
    one, two = (with_software(RUN, logit_bytes=(count, 0)) for count in (10**6, 2 * 10**6))
    assert two - one == pytest.approx(RUN.micro_batches * 10**6 * logits / load_device("a100-80").stream)


def test_stages_that_wait_for_messages() -> None:
    piped = replace(RUN, dp=4, pp=2, micro_batches=8)
    assert with_software(piped, send_rounds=3) > price(piped).step_seconds
    tied = replace(piped, decoder=replace(TINY, tied=True))
    assert with_software(tied, sums_tied=True) > price(tied).step_seconds
    assert with_software(RUN, send_rounds=3, sums_tied=True) == price(RUN).step_seconds, "there is one stage"


def test_the_host_of_tensor_parallel_layers() -> None:
    """Small layers take their host's time: its second more per block and micro-batch is one more in the step."""
    split = replace(RUN, dp=4, tp=2)
    work = split.micro_batches * TINY.layers
    hosts = [with_software(split, tp_host_seconds=seconds) for seconds in (1.0, 2.0)]
    assert hosts[1] - hosts[0] == pytest.approx(work, rel=0.01)
    assert with_software(RUN, tp_host_seconds=1.0) == price(RUN).step_seconds, "no layer is split"


def test_collectives_of_layers_that_nodes_share() -> None:
    """Megatron's block has two sums forward and two backward; a device that waits for them takes so much longer."""
    wide = replace(RUN, decoder=replace(TINY, heads=16), nodes=2, devices=16, dp=1, tp=16)
    slow, slower = (with_software(wide, node_seconds=seconds) for seconds in (1.0, 2.0))
    assert slower - slow == pytest.approx(wide.micro_batches * TINY.layers * 4 * 2, rel=0.01)
    one_node = replace(wide, nodes=1, devices=8, tp=8)
    assert with_software(one_node, node_seconds=1.0) == price(one_node).step_seconds


def test_the_floor_of_pipelines_over_nodes() -> None:
    """A block takes the floor at least, not in addition to its host and device."""
    piped = replace(RUN, nodes=2, devices=16, dp=4, tp=2, pp=2)
    low, high = (with_software(piped, pipeline_floor_seconds=floor) for floor in ((1.0, 0.5), (2.0, 1.0)))
    assert high == pytest.approx(2 * low, rel=0.01)
    assert with_software(piped, pipeline_floor_seconds=(1e-9, 0.0)) == pytest.approx(price(piped).step_seconds)
    for other in (replace(piped, nodes=1, devices=8, dp=2), replace(piped, pp=1)):
        assert with_software(other, pipeline_floor_seconds=(1.0, 0.5)) == price(other).step_seconds


def test_scales_of_earlier_steps_take_fewer_casts() -> None:
    wide = replace(
        RUN, decoder=replace(TINY, d_model=4096, d_ff=16384, heads=32, seq=2048), cluster="h100", micro_batch=32
    )
    narrow = replace(wide, software=Software(linears="fp8"))
    faster, again = ({"delayed_scales": True}, {"delayed_scales": True, "linears": ""})
    assert with_software(narrow, **faster) < price(narrow).step_seconds
    assert with_software(wide, **again) == price(wide).step_seconds, "nothing is cast"
    # Forward and backward read and write 11 bytes of each of 6 operands, or 4 of each of 3 tensors.
    rows, params = wide.micro_batch * 2048, 4 * 4096**2 + 2 * 4096 * 16384
    widths = (4096 + 3 * 4096) + 2 * 4096 + 2 * (4096 + 16384)
    saved = 4 * wide.micro_batches * (22 - 4) * (rows * widths + params) / load_device("h100").stream
    saving = price(narrow).step_seconds - with_software(narrow, **faster)
    assert saving == pytest.approx(saved, rel=0.1)


def test_a_strategy_is_that_of_the_least_batch_to_come() -> None:
    decoder = replace(TINY, layers=2, tied=False, vocab=640)
    runs = [replace(RUN, decoder=replace(decoder, layers=4), micro_batch=size, dp=4) for size in (1, 2, 3, 4, 8)]
    one_by_one = [price(run).step_seconds for run in runs]
    traced.cache_clear()
    _propagated.cache_clear()
    _parts.cache_clear()
    expect(runs)
    assert [least_batch(decoder, batch, 4) for batch in (32, 4)] == [4, 4]
    assert least_batch(decoder, 1, 1) == 1
    # Five sizes are captured with a symbolic batch: the same prices.
    with few_collections():
        assert [price(run).step_seconds for run in runs] == one_by_one
    assert gc.isenabled()


def test_copies_of_gradients_count_once_per_step() -> None:
    """Sums of whole gradients begin with copies into buckets, in the last micro-batch alone."""
    wide = replace(RUN, decoder=replace(TINY, d_model=1024, d_ff=4096), software=Software(overlaps=False))
    few, many = (price(replace(wide, micro_batches=count)).step_seconds for count in (100, 200))
    ones = price(replace(wide, micro_batches=300)).step_seconds
    assert ones - many == pytest.approx(many - few)
    copies = 2 * 4 * wide.decoder.parameters / load_device("a100-80").stream
    micro_batch = (many - few) / 100
    assert few - 100 * micro_batch > copies


def test_the_fastest_of_the_ways_counts() -> None:
    slow = replace(RUN, micro_batches=64, tries=(RUN,))
    assert price(slow).step_seconds == price(RUN).step_seconds
    assert price(slow).run is slow


def test_judging_by_group() -> None:
    runs = [replace(RUN, measured=Measured(seconds)) for seconds in (1.0, 2.0, 4.0)]
    priced = [replace(price(run), step_seconds=guess) for run, guess in zip(runs, (2.0, 1.0, 4.0), strict=True)]
    part, *_ = judge("table", priced)
    assert part.tau == pytest.approx(1 / 3)
    assert part.regret == pytest.approx(1.0)
    assert part.time_error == pytest.approx(0.5)
    assert part.does_not_fit is None
