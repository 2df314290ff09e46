"""Prices of frozen weights: no gradients, no states, no masters, no products for them; what the plan says of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import autopar
from autopar.cost.compute.op_time import op_work
from autopar.cost.lowered_step import LoweredStep
from autopar.cost.memory.peak import memory
from autopar.ir.analysis.contractions import ATTENTIONS
from autopar.plans.plan import Plan
from autopar.sharding.layout.language import choose_layout
from autopar.sharding.options import TrainingOptions
from autopar.sharding.time_slice import propagate_plan
from benchmarks.memory import measure
from examples.gpt import gpt
from examples.lora_llama import with_adapters

FSDP = "batch -> fsdp; * -> none; param, grad, opt { * -> fsdp | none }"


def adapted(frozen: bool = True, **sizes: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model, inputs = gpt(**{"layers": 2, "d_model": 64, "heads": 4, "vocab": 96, "seq": 16, "batch": 4, **sizes})
    found = with_adapters(model, 4, ("qkv", "out", "up", "down"))
    return (found if frozen else found.requires_grad_(True)), inputs


def plan_of(layout: str, mesh: str = "fsdp=2", frozen: bool = True, **options: Any) -> Plan:
    model, inputs = adapted(frozen)
    return autopar.plan(model, mesh, inputs, layout=layout, cache=False, **options)


@pytest.mark.parametrize("frozen", [True, False])
def test_flops_are_those_that_torch_counts(frozen: bool) -> None:
    model, inputs = adapted(frozen)
    plan = autopar.plan(model, "dp=1", inputs, layout="ddp", cache=False)
    graph, decided = plan.graph, plan.decided
    ops, device = decided.assignment.ops, plan.cluster.device
    works = [
        op_work(graph, node, ops[node.name], graph.footprints[node.node], decided.axes, device)
        for node in graph.nodes
        if node.op not in ATTENTIONS
    ]
    with FlopCounterMode(display=False) as forward:
        loss = model(**inputs)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert sum(work.forward.flops for work in works) == products(forward)
    assert sum(work.backward.flops for work in works) == products(backward)
    assert products(backward) < 1.4 * products(forward) if frozen else products(backward) > 1.9 * products(forward)


def products(counter: FlopCounterMode) -> int:
    """FLOPs but those of attention, which torch counts without regard to its mask."""
    return sum(count for op, count in counter.get_flop_counts()["Global"].items() if "attention" not in str(op))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_memory_of_parameters(precision: str) -> None:
    """16 bytes of a trained parameter; of a frozen one those of the compute."""
    model, _ = adapted()
    counts = dict.fromkeys((True, False), 0)
    for parameter in model.parameters():
        counts[parameter.requires_grad] += parameter.numel()
    plan = plan_of("ddp", "dp=2", precision=precision)
    costs = plan.costs.memory
    each = 4 if precision == "fp32" else 2
    assert costs.parameters_bytes == 4 * counts[True] + each * counts[False]
    assert costs.gradients_bytes == 4 * counts[True]
    assert costs.optimizer_bytes == 8 * counts[True]
    assert costs.copies_bytes == (0 if precision == "fp32" else 2 * counts[True])
    (sent,) = [one for one in plan.costs.communication if one.of == "parameters"]
    assert (sent.kind, sent.direction, sent.bytes) == ("all_reduce", "backward", 4 * counts[True])


def test_fsdp_of_frozen_weights_gathers_only() -> None:
    plan = plan_of("fsdp", precision="bf16")
    gathered, reduced = (
        sum(one.bytes for one in plan.costs.communication if one.kind == kind)
        for kind in ("all_gather", "reduce_scatter")
    )
    assert gathered == 2 * plan.graph.numel
    assert reduced == 4 * plan.graph.trained_numel


@pytest.mark.parametrize(
    "layout",
    [
        "batch -> fsdp; * -> none",
        FSDP,
        f"{FSDP}; recompute full @blocks.*",
        f"{FSDP}; regather @blocks.*",
        f"{FSDP}; regather @blocks.*; recompute full @blocks.*",
    ],
)
def test_peak_is_that_of_a_rank_that_runs(layout: str) -> None:
    """The backward frees what it gathered again, also where no gradient of the parameter tells that it is over."""
    graph = autopar.trace(*adapted(layers=3, d_model=96, vocab=512, seq=48, batch=8))
    axes = {"fsdp": 4}
    plan = replace(propagate_plan(graph, choose_layout(layout, axes), axes), options=TrainingOptions())
    found, real = memory(LoweredStep(graph, plan)), measure(graph, plan)
    assert found.peak_bytes == pytest.approx(real.peak_bytes, rel=0.05)
    assert found.saved_bytes == pytest.approx(real.saved_bytes, rel=0.001)


def test_search_gathers_frozen_weights_again_where_memory_binds() -> None:
    model, inputs = adapted(layers=4, d_model=256, seq=8, batch=2, vocab=32)
    options: dict[str, Any] = {"cluster": "h100", "precision": "bf16", "cache": False}
    kept = autopar.plan(model, "fsdp=2", inputs, layout=FSDP, **options)
    again = autopar.plan(model, "fsdp=2", inputs, layout=f"{FSDP}; regather @*", **options)
    assert again.memory_bytes < 0.8 * kept.memory_bytes
    found = autopar.plan(model, "fsdp=2", inputs, layout=f"{FSDP}; d_ff -> ?", memory=again.memory_bytes, **options)
    assert found.fits
    assert any(found.graph.tensors[name].frozen for name in found.decided.regather)


def test_plan_says_what_is_trained() -> None:
    plan = plan_of("fsdp", precision="bf16")
    said = "  trains  8.19 k of 115.46 k parameters; the others are frozen, stored in bfloat16, without gradients and "
    assert f"{said}states" in plan.summary().splitlines()
    assert plan.to_json()["parameters"] == {"numel": plan.graph.numel, "trained_numel": plan.graph.trained_numel}
    base = str(plan.explain("blocks.0.up.base_layer.weight"))
    assert "param, frozen\n" in base
    assert "stored in bfloat16; no gradient, no states of the optimizer" in base
    assert "stored in float32, gradient summed in float32" in str(plan.explain("blocks.0.up.lora_A.weight"))
    assert "8.19 k of them trained" in str(plan.graph)
    assert "trains" not in plan_of("fsdp", frozen=False).summary()
