"""Memory of the stages of a pipeline where equal stages are simulated once, beside a simulation of each."""

from __future__ import annotations

from dataclasses import replace

import pytest

import autopar
from autopar.cost.equal_stages import equal_stages, stage_key
from autopar.cost.lowered_step import LoweredStep, lower_step
from autopar.cost.memory import peak
from autopar.cost.memory.peak import memory, memory_of_stages
from autopar.ir.graph import NamedGraph
from autopar.ir.precision import PRESETS
from autopar.sharding.layout.language import choose_layout
from autopar.sharding.options import TrainingOptions
from autopar.sharding.time_slice import propagate_plan
from autopar.submesh import SubMesh
from examples.gpt import gpt

STAGES = 4
LAYOUTS = {
    "1f1b": "micro 8; pipeline pp 1f1b; zero1",
    "interleaved": "micro 8; pipeline pp interleaved(2); megatron_sp",
    "zero bubble": "micro 8; pipeline pp zero_bubble; ddp",
    "recompute": "micro 8; recompute full @blocks.*; pipeline pp 1f1b; zero1",
    "recompute some": "micro 8; recompute full @blocks.3; recompute selective @blocks.4; pipeline pp 1f1b; zero1",
    "regather": "micro 8; regather @*; pipeline pp 1f1b; fsdp",
    "regather some": "micro 8; regather @blocks.2.*; regather @blocks.5.*; pipeline pp 1f1b; fsdp",
    "offload": "micro 8; recompute offload @blocks.*; pipeline pp 1f1b; zero1",
    "halves": "micro 8 halves; pipeline pp 1f1b; megatron",
}


@pytest.fixture(scope="module")
def graph() -> NamedGraph:
    model, inputs = gpt(layers=12, d_model=64, heads=4, vocab=512, seq=32, batch=64, device="meta")
    return autopar.trace(model, inputs, precision="bf16")


def lowered(graph: NamedGraph, layout: str) -> LoweredStep:
    axes = {"pp": STAGES, "fsdp": 2} if layout.endswith("fsdp") else {"pp": STAGES, "dp": 2, "tp": 2}
    plan = propagate_plan(graph, choose_layout(layout, SubMesh(axes)), SubMesh(axes))
    return lower_step(graph, replace(plan, options=TrainingOptions(precision=PRESETS["bf16"])))


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_stage_has_the_memory_of_its_own_simulation(graph: NamedGraph, name: str) -> None:
    step = lowered(graph, LAYOUTS[name])
    found = memory_of_stages(step, equal_stages(step))
    for stage, one in enumerate(found):
        assert replace(one, peak_at="") == replace(memory(step.at(stage)), peak_at="")


def test_equal_stages_are_simulated_once(graph: NamedGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    step, count = lowered(graph, LAYOUTS["1f1b"]), 0

    def simulated(own: LoweredStep) -> peak._Simulated:
        nonlocal count
        count += 1
        return plain(own)

    plain = peak._simulated
    monkeypatch.setattr(peak, "_simulated", simulated)
    memory_of_stages(step, equal_stages(step))
    assert count == STAGES - 1, "those in the middle are equal"


@pytest.mark.parametrize("name", ["recompute some", "regather some"])
def test_stages_that_differ_have_other_keys(graph: NamedGraph, name: str) -> None:
    step = lowered(graph, LAYOUTS[name])
    assert len({stage_key(step.at(stage)) for stage in range(STAGES)}) == STAGES
