"""The price of plans: what adds up, what hides, what the same list of conversions says; and the timeline."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.cost.evaluate import evaluate, exposed_seconds
from autopar.cost.hardware.cluster import load_cluster
from autopar.cost.lowered_step import LoweredStep, lower_step
from autopar.cost.profile import Profile, profile
from autopar.cost.tasks import Task
from autopar.cost.timeline import STREAMS, timeline, timeline_of
from autopar.errors import AutoparError
from autopar.ir.graph import NamedGraph
from autopar.sharding.assignment import StepPlan
from autopar.sharding.buckets import BUCKET_BYTES
from autopar.sharding.layout.language import choose_layout
from autopar.sharding.options import TrainingOptions
from autopar.sharding.reshard_insertion import inserted_reshards
from autopar.sharding.time_slice import propagate_plan
from examples.gpt import gpt
from tests.traced import traced

CLUSTER = load_cluster("h100")
LAYOUTS: Mapping[str, Mapping[str, int]] = {
    "ddp": {"dp": 16},
    "zero1": {"dp": 16},
    "fsdp": {"fsdp": 16},
    "megatron": {"dp": 4, "tp": 4},
    "megatron_sp": {"dp": 4, "tp": 4},
}


@pytest.fixture(scope="module")
def graph() -> NamedGraph:
    """Large enough that computing takes longer than launching."""
    model, inputs = gpt(layers=3, d_model=1024, heads=16, vocab=8192, seq=1024, batch=32, device="meta")
    return autopar.trace(model.bfloat16(), inputs)


def plan_of(graph: NamedGraph, layout: str, **changes: Any) -> StepPlan:
    axes = LAYOUTS[layout]
    return replace(propagate_plan(graph, choose_layout(layout, axes), axes), options=TrainingOptions(**changes))


# -- plans ------------------------------------------------------------------------------------------------------------


def test_what_a_layout_says_of_parameters(graph: NamedGraph) -> None:
    names = {tensor.name for tensor in graph.parameters}
    ddp, zero1, fsdp = (plan_of(graph, layout) for layout in ("ddp", "zero1", "fsdp"))
    assert (ddp.keep_gathered, ddp.defer_reduction) == (frozenset(), names)
    assert zero1.keep_gathered == names, "gathered once, until the optimizer steps"
    assert fsdp.keep_gathered == fsdp.defer_reduction == frozenset()


def test_a_plan_is_for_one_graph(graph: NamedGraph) -> None:
    other = traced(gpt)
    assert replace(graph).fingerprint == graph.fingerprint != other.fingerprint
    with pytest.raises(AutoparError, match="the plan is for another graph than this one"):
        evaluate(other, plan_of(graph, "ddp"), CLUSTER)


# -- prices -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_priced_is_what_is_emitted(graph: NamedGraph, layout: str) -> None:
    plan = plan_of(graph, layout)
    listed = inserted_reshards(graph, plan.assignment)
    sent: dict[tuple[str, tuple[str, ...], str], int] = {}
    for one in listed:
        for direction, step in one.collectives():
            key = step.kind.value, step.axes, direction
            sent[key] = sent.get(key, 0) + step.numel * one.itemsize
    priced: dict[tuple[str, tuple[str, ...], str], float] = {}
    for cost in evaluate(graph, plan, CLUSTER).communication:
        key = cost.kind, cost.axes, cost.direction
        priced[key] = priced.get(key, 0.0) + cost.bytes
    assert priced == sent
    assert sent


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_step_is_the_sum_of_its_parts(graph: NamedGraph, layout: str) -> None:
    found = evaluate(graph, plan_of(graph, layout), CLUSTER)
    parts = found.compute.seconds + found.seconds_of("values") + found.exposed_seconds + found.waiting_seconds
    assert found.step_seconds == pytest.approx(parts)
    assert found.communication_seconds == pytest.approx(found.seconds_of("values") + found.seconds_of("parameters"))
    assert found == evaluate(graph, plan_of(graph, layout), CLUSTER), "the same twice"
    assert 0.03 < found.mfu < 0.8


def test_flops(graph: NamedGraph) -> None:
    """6 per parameter and token, and attention's."""
    found = evaluate(graph, plan_of(graph, "ddp"), CLUSTER)
    matrices = sum(prod(t.shape) for t in graph.parameters if len(t.shape) == 2 and "positions" not in t.name)
    tokens = 32 * 1024
    attention = 3 * 3.5 * 4 * 1024 * 1024 / 2  # layers, with the backward, of each token with half of the others
    assert found.flops == pytest.approx(6 * tokens * matrices + tokens * attention, rel=0.01)
    assert found.device_flops * 16 == pytest.approx(found.flops, rel=0.01)
    layers = list(graph.ops_of_layers)
    plan = plan_of(graph, "ddp").with_recompute(dict.fromkeys(layers, "full"))
    again, to_end = (
        evaluate(graph, plan.with_options(replace(plan.options, recompute_to_end=whole)), CLUSTER)
        for whole in (False, True)
    )
    assert again.flops == to_end.flops == found.flops
    assert to_end.device_flops / found.device_flops == pytest.approx(1.28, abs=0.05)
    # The last product of a layer does not run again.
    last = sum(2 * tokens / 16 * prod(t.shape) for t in graph.parameters if t.name.endswith(".down.weight"))
    assert last > 0
    assert to_end.device_flops - again.device_flops == pytest.approx(last)
    assert again.mfu < found.mfu


def test_what_a_split_divides(graph: NamedGraph) -> None:
    ddp, megatron = (evaluate(graph, plan_of(graph, layout), CLUSTER) for layout in ("ddp", "megatron"))
    assert megatron.device_flops == pytest.approx(ddp.device_flops, rel=0.02), "as many devices"
    assert megatron.seconds_of("values") > ddp.seconds_of("values")
    assert megatron.seconds_of("parameters") < ddp.seconds_of("parameters")
    assert megatron.memory.parameters_bytes < 0.3 * ddp.memory.parameters_bytes


def test_recomputation_trades_time_for_memory(graph: NamedGraph) -> None:
    layers = list(graph.ops_of_layers)
    none, selective, full = (
        evaluate(graph, plan_of(graph, "megatron").with_recompute(dict.fromkeys(layers, mode)), CLUSTER)
        for mode in ("none", "selective", "full")
    )
    assert none.step_seconds < selective.step_seconds < full.step_seconds
    assert none.memory.saved_bytes > selective.memory.saved_bytes > full.memory.saved_bytes
    # One of the two all-reduces of a layer runs again.
    assert full.compute.recompute_seconds > 0.6 * (full.step_seconds - none.step_seconds)


def test_micro_batches_send_once_what_waits(graph: NamedGraph) -> None:
    for layout, once in (("ddp", True), ("zero1", True), ("fsdp", False)):
        one, four = (evaluate(graph, plan_of(graph, layout, micro_batches=count), CLUSTER) for count in (1, 4))
        ratio = four.seconds_of("parameters") / one.seconds_of("parameters")
        assert ratio == pytest.approx(1 if once else 4)
        assert four.flops == 4 * one.flops
        assert four.compute.optimizer_seconds == one.compute.optimizer_seconds


def test_gathering_again_costs_time(graph: NamedGraph) -> None:
    kept = evaluate(graph, plan_of(graph, "fsdp"), CLUSTER)
    names = frozenset(tensor.name for tensor in graph.parameters)
    again = evaluate(graph, plan_of(graph, "fsdp").with_regather(names), CLUSTER)
    assert again.seconds_of("parameters") > 1.3 * kept.seconds_of("parameters")
    assert again.memory.peak_bytes < kept.memory.peak_bytes


def test_a_compiled_module_reads_and_writes_less(graph: NamedGraph) -> None:
    eager, compiled = (evaluate(graph, plan_of(graph, "ddp", compiled=flag), CLUSTER) for flag in (False, True))
    assert compiled.step_seconds < eager.step_seconds
    assert compiled.flops == eager.flops


# -- overlap ----------------------------------------------------------------------------------------------------------


def task(kind: str, seconds: float, *, overlapped: bool = False, once: bool = False, backward: bool = False) -> Task:
    return Task("x", kind, "backward" if backward else "forward", seconds, overlapped=overlapped, once=once)


@pytest.mark.parametrize(
    ("micro_batches", "overlap", "exposed"), [(1, 1.0, 6.0), (1, 0.5, 8.0), (2, 1.0, 6.0), (2, 0.5, 9.0)]
)
def test_overlap_has_a_capacity(graph: NamedGraph, micro_batches: int, overlap: float, exposed: float) -> None:
    gathers = [task("all_gather", 3.0, overlapped=True)]
    reductions = [task("reduce_scatter", 8.0, overlapped=True, once=True, backward=True)]
    found = Profile(
        (*gathers, task("compute", 4.0), task("all_reduce", 9.0)),
        (*reductions, task("compute", 2.0, backward=True)),
        (),
        0,
    )
    plan = plan_of(graph, "ddp", micro_batches=micro_batches)
    library = replace(CLUSTER.library, overlap_fraction=overlap, processors=0)
    assert exposed_seconds(found, lower_step(graph, plan), replace(CLUSTER, library=library)) == exposed


def test_less_overlap_exposes_more(graph: NamedGraph) -> None:
    plan = plan_of(graph, "fsdp")
    steps = [
        evaluate(graph, plan, replace(CLUSTER, library=replace(CLUSTER.library, overlap_fraction=share))).step_seconds
        for share in (1.0, 0.1, 0.0)
    ]
    assert steps[0] <= steps[1] < steps[2]


# -- buckets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_parameter_is_in_one_bucket(graph: NamedGraph, layout: str) -> None:
    plan = plan_of(graph, layout)
    buckets = LoweredStep(graph, plan).buckets
    members = [one for bucket in buckets for one in bucket.members]
    listed = [one for one in inserted_reshards(graph, plan.assignment) if graph.tensors[one.tensor].kind == "param"]
    keys = [(one.tensor, one.reshard) for one in members]
    assert len(set(keys)) == len(keys)
    assert set(keys) == {(one.tensor, one.reshard) for one in listed}
    for bucket in buckets:
        sizes = [prod(graph.tensors[one.tensor].shape) * one.itemsize for one in bucket.members]
        assert len(sizes) == 1 or sum(sizes) <= BUCKET_BYTES * 4


# -- the timeline -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_timeline_has_every_task_and_no_overlap_within_a_stream(
    graph: NamedGraph, layout: str, micro_batches: int
) -> None:
    plan = plan_of(graph, layout, micro_batches=micro_batches)
    found = timeline(graph, plan, CLUSTER)
    tasks = profile(LoweredStep(graph, plan), CLUSTER)
    often = [task for task in (*tasks.forward, *tasks.backward) if not task.once]
    once = [task for task in (*tasks.forward, *tasks.backward, *tasks.optimizer) if task.once]
    assert len(found.events) == micro_batches * len(often) + len(once) + len(tasks.optimizer)
    for stream in STREAMS:
        own = sorted((event.start_seconds, event.end_seconds) for event in found.events if event.stream == stream)
        assert all(one[1] <= other[0] + 1e-12 for one, other in pairwise(own))
    costs = evaluate(graph, plan, CLUSTER)
    device = costs.step_seconds - costs.waiting_seconds
    assert found.seconds >= device - costs.exposed_seconds - 1e-9
    assert found.seconds == pytest.approx(device, rel=0.35)
    optimizer = next(event for event in found.events if event.task.direction == "optimizer")
    assert optimizer.end_seconds == found.seconds


def test_gathers_are_ahead_and_waited_for() -> None:
    gather, compute = task("all_gather", 2.0, overlapped=True), task("compute", 5.0)
    found = timeline_of(Profile((gather, compute, gather, compute, gather, compute), (), (), 0), 1)
    starts = [(event.task.kind, event.start_seconds) for event in found.events]
    assert starts == [
        *(("all_gather", 0.0), ("compute", 2.0), ("all_gather", 2.0)),
        *(("compute", 7.0), ("all_gather", 7.0), ("compute", 12.0)),
    ]
    reduce, back = task("all_reduce", 3.0, overlapped=True, backward=True), task("compute", 1.0, backward=True)
    found = timeline_of(Profile((), (back, reduce, back, reduce), (task("compute", 1.0),), 0), 1)
    assert [event.start_seconds for event in found.events] == [0.0, 1.0, 1.0, 4.0, 7.0]


def test_the_trace_is_a_chrome_trace(graph: NamedGraph, tmp_path: Path) -> None:
    found = timeline(graph, plan_of(graph, "megatron"), CLUSTER)
    found.save(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert tuple(names.values()) == STREAMS
    timed = [event for event in events if event["ph"] == "X"]
    assert len(timed) == len(found.events)
    assert max(event["ts"] + event["dur"] for event in timed) == pytest.approx(found.seconds * 1e6)
    assert any(event["name"].startswith("all_reduce blocks.0") for event in timed)
