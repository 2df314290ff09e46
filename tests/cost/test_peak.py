"""Predicted memory, against one rank that runs with real tensors; what recomputation and micro-batches change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.cost.compute.optimizers import OPTIMIZERS, optimizer_of
from autopar.cost.lowered_step import LoweredStep, lower_step
from autopar.cost.memory.local_memory import Storages
from autopar.cost.memory.peak import MemoryCosts, memory
from autopar.errors import AutoparError
from autopar.ir.graph import NamedGraph
from autopar.ir.precision import PRESETS
from autopar.lowering.modules.float8_weights import CastWeights
from autopar.sharding.assignment import StepPlan
from autopar.sharding.layout.language import choose_layout, parse_layout
from autopar.sharding.options import TrainingOptions
from autopar.sharding.propagation import propagate
from autopar.sharding.time_slice import propagate_plan, step_plan
from benchmarks.memory import measure
from examples.gpt import gpt
from examples.moe import moe
from examples.resnet import resnet

GPT_LAYOUTS: Mapping[str, Mapping[str, int]] = {
    "ddp": {"dp": 4},
    "zero1": {"dp": 4},
    "fsdp": {"fsdp": 4},
    "megatron": {"dp": 2, "tp": 2},
    "megatron_sp": {"dp": 2, "tp": 2},
    "fsdp_tp": {"fsdp": 2, "tp": 2},
}
TILES = "batch -> dp; height -> sy; width -> sx; * -> none"


def plan_of(graph: NamedGraph, layout: str, axes: Mapping[str, int], **changes: Any) -> StepPlan:
    return replace(propagate_plan(graph, choose_layout(layout, axes), axes), options=TrainingOptions(**changes))


def predicted(graph: NamedGraph, plan: StepPlan) -> MemoryCosts:
    return memory(LoweredStep(graph, plan))


@pytest.fixture(scope="module")
def small_gpt() -> NamedGraph:
    return autopar.trace(*gpt(layers=3, d_model=96, heads=4, vocab=512, seq=48, batch=8))


def compare(graph: NamedGraph, layout: str, axes: Mapping[str, int], rank: int) -> None:
    plan = plan_of(graph, layout, axes)
    found, real = predicted(graph, plan), measure(graph, plan, rank)
    assert found.peak_bytes == pytest.approx(real.peak_bytes, rel=0.05)
    assert found.saved_bytes == pytest.approx(real.saved_bytes, rel=0.05)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", GPT_LAYOUTS)
def test_a_gpt_is_measured_as_predicted(small_gpt: NamedGraph, layout: str) -> None:
    compare(small_gpt, layout, GPT_LAYOUTS[layout], rank=1)


class Attention(nn.Module):
    """Long attention with few dims, so that scores would be most of the memory."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.widths = (24, 24, 16) if how == "unequal widths" else (16, 16, 16)
        self.project = nn.Linear(64, 4 * sum(self.widths))
        self.out = nn.Linear(64, 64)
        self.bias = nn.Parameter(torch.zeros(4, 320, 320)) if how == "trained mask" else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (4, sum(self.widths))).transpose(1, 2).split(self.widths, -1)
        rate = 0.1 if "dropout" in self.how else 0.0
        causal = self.how in ("causal dropout", "unequal widths")
        if self.how == "one head of keys":
            k, v = k[:, :1], v[:, :1]
        found = functional.scaled_dot_product_attention(q, k, v, self.bias, rate, is_causal=causal)
        return self.out(found.transpose(1, 2).flatten(2)).square().mean()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["batch -> dp; * -> none", "heads -> dp; * -> none"])
@pytest.mark.parametrize("how", ["unequal widths", "trained mask", "one head of keys", "dropout", "causal dropout"])
def test_attention_is_measured_as_predicted(how: str, layout: str) -> None:
    """Dropout is written out with its scores; for the others no rank keeps any."""
    torch.manual_seed(0)
    graph = autopar.trace(Attention(how), (torch.randn(8, 320, 64),), dims={"x": "batch seq d_model"})
    plan = plan_of(graph, layout, {"dp": 2})
    found, real = predicted(graph, plan), measure(graph, plan)
    assert found.saved_bytes == pytest.approx(real.saved_bytes, rel=0.05)
    assert found.peak_bytes == pytest.approx(real.peak_bytes, rel=0.05)
    # Of half of the samples, or of half of the heads.
    scores = 8 * 4 // 2 * 320 * 320 * 4
    assert (found.saved_bytes > scores) == ("dropout" in how)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("layout", "axes"), [("zero1", {"dp": 4}), (TILES, {"dp": 1, "sy": 2, "sx": 2})], ids=["zero1", "tiles"]
)
def test_a_resnet_is_measured_as_predicted(layout: str, axes: Mapping[str, int]) -> None:
    model, inputs = resnet(depth=10, width=8, image=64, batch=8, loss=True, train=True)
    compare(autopar.trace(model, inputs), layout, axes, rank=3)


@pytest.mark.filterwarnings("ignore")
def test_a_resnet_that_gathers_again_is_measured_as_predicted() -> None:
    """Statistics of all ranks come from an op of ours with several results: it does not keep what it has read."""
    model, inputs = resnet(depth=10, width=8, image=64, batch=8, loss=True, train=True)
    graph = autopar.trace(model, inputs)
    plan = plan_of(graph, "fsdp", {"fsdp": 4}).with_regather([tensor.name for tensor in graph.parameters])
    found, real = predicted(graph, plan), measure(graph, plan)
    assert found.saved_bytes == pytest.approx(real.saved_bytes, rel=0.01)
    assert found.peak_bytes == pytest.approx(real.peak_bytes, rel=0.05)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["selective", pytest.param("full", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("layout", "axes"), [("ddp", {"dp": 4}), ("fsdp", {"fsdp": 4})], ids=["ddp", "fsdp"])
def test_a_resnet_that_computes_and_gathers_again_is_measured_as_predicted(
    layout: str, axes: Mapping[str, int], mode: str
) -> None:
    """Some stretches of its layers write nothing but statistics."""
    model, inputs = resnet(depth=18, width=8, image=64, batch=8, loss=True, train=True)
    graph = autopar.trace(model, inputs)
    layers = list(graph.ops_of_layers)
    regather = frozenset(tensor.name for tensor in graph.parameters)
    plan = plan_of(graph, layout, axes).with_recompute(dict.fromkeys(layers, mode)).with_regather(regather)
    found, real = predicted(graph, plan), measure(graph, plan)
    assert found.saved_bytes == pytest.approx(real.saved_bytes, rel=0.01)
    assert found.peak_bytes == pytest.approx(real.peak_bytes, rel=0.05)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "megatron_sp"])
def test_offloaded_layers_leave_the_device_as_predicted(layout: str) -> None:
    graph = autopar.trace(*gpt(layers=4, d_model=128, heads=4, vocab=256, seq=96, batch=8))
    layers = list(graph.ops_of_layers)
    plan = plan_of(graph, layout, GPT_LAYOUTS[layout])
    moved = plan.with_recompute(dict.fromkeys(layers, "offload"))
    before, found, real = predicted(graph, plan), predicted(graph, moved), measure(graph, moved)
    assert found.saved_bytes == pytest.approx(real.saved_bytes, rel=0.02)
    assert found.peak_bytes == pytest.approx(real.peak_bytes, rel=0.05)
    assert before.host_bytes == 0.0
    # Two layers are still on the device at most: the one that runs, and the one that comes or goes.
    assert before.saved_bytes - found.saved_bytes == pytest.approx(3 / 4 * found.host_bytes, rel=0.01)
    assert before.peak_bytes - found.peak_bytes > 0.2 * found.host_bytes


@pytest.mark.filterwarnings("ignore")
def test_a_mixture_of_experts_is_measured_as_predicted() -> None:
    model, inputs = moe(batch=8)
    graph = autopar.trace(model, inputs)
    plan = plan_of(graph, "gshard_moe", {"dp": 2, "ep": 2})
    assert predicted(graph, plan).peak_bytes == pytest.approx(measure(graph, plan).peak_bytes, rel=0.1)


class Again(nn.Module):
    """A block that is computed again in the backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        again: torch.Tensor = checkpoint(self.block, x, use_reentrant=False)
        return again


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["ddp", "megatron"])
def test_checkpoint_regions_are_measured_as_predicted(layout: str) -> None:
    model, inputs = gpt(layers=3, d_model=96, heads=4, vocab=512, seq=48, batch=8)
    blocks: Any = model.get_submodule("blocks")
    for i, block in enumerate(blocks):
        blocks[i] = Again(block)
    graph = autopar.trace(model, inputs)
    plan = plan_of(graph, layout, GPT_LAYOUTS[layout])
    found, real = predicted(graph, plan), measure(graph, plan)
    assert found.peak_bytes == pytest.approx(real.peak_bytes, rel=0.1)
    assert found.saved_bytes == pytest.approx(real.saved_bytes, rel=0.02)


@pytest.mark.filterwarnings("ignore")
def test_dropout_is_measured_as_predicted() -> None:
    graph = autopar.trace(*gpt(layers=3, d_model=96, heads=4, vocab=512, seq=48, batch=8, dropout=0.1))
    plan = plan_of(graph, "megatron", GPT_LAYOUTS["megatron"])
    assert predicted(graph, plan).peak_bytes == pytest.approx(measure(graph, plan).peak_bytes, rel=0.1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["ddp", "zero1"])
def test_master_copies_are_measured_as_predicted(layout: str) -> None:
    model, inputs = gpt(layers=3, d_model=96, heads=4, vocab=512, seq=48, batch=8)
    graph = autopar.trace(model.bfloat16(), inputs)
    plan = plan_of(graph, layout, GPT_LAYOUTS[layout], precision=PRESETS["bf16"])
    assert predicted(graph, plan).peak_bytes == pytest.approx(measure(graph, plan).peak_bytes, rel=0.1)


def test_by_kind(small_gpt: NamedGraph) -> None:
    numel = sum(torch.Size(tensor.shape).numel() for tensor in small_gpt.parameters)
    ddp = predicted(small_gpt, plan_of(small_gpt, "ddp", {"dp": 4}))
    assert (ddp.parameters_bytes, ddp.gradients_bytes, ddp.optimizer_bytes) == (4 * numel, 4 * numel, 8 * numel)
    assert ddp.inputs_bytes == 2 * 8 * 48 * 8
    fsdp = predicted(small_gpt, plan_of(small_gpt, "fsdp", {"fsdp": 4}))
    assert (fsdp.parameters_bytes, fsdp.gradients_bytes, fsdp.optimizer_bytes) == (numel, numel, 2 * numel)
    assert fsdp.saved_bytes > ddp.saved_bytes, "gathered parameters are kept"
    sgd = predicted(small_gpt, plan_of(small_gpt, "ddp", {"dp": 4}, optimizer="sgd"))
    assert sgd.optimizer_bytes == 0
    assert sgd.peak_bytes <= ddp.peak_bytes - 8 * numel


@pytest.mark.filterwarnings("ignore")
def test_regathered_parameters_are_not_kept(small_gpt: NamedGraph) -> None:
    plan = plan_of(small_gpt, "fsdp", {"fsdp": 4})
    less = plan.with_regather([tensor.name for tensor in small_gpt.parameters])
    ddp = predicted(small_gpt, plan_of(small_gpt, "ddp", {"dp": 4}))
    kept, regathered = predicted(small_gpt, plan), predicted(small_gpt, less)
    assert regathered.saved_bytes < kept.saved_bytes
    assert regathered.saved_bytes == pytest.approx(ddp.saved_bytes, rel=0.02)
    real = measure(small_gpt, less)
    assert regathered.saved_bytes == pytest.approx(real.saved_bytes, rel=0.02)
    assert regathered.peak_bytes == pytest.approx(real.peak_bytes, rel=0.05)


def test_recomputation_keeps_less(small_gpt: NamedGraph) -> None:
    layers = list(small_gpt.ops_of_layers)
    assert len(layers) == 3
    plans = {
        mode: plan_of(small_gpt, "ddp", {"dp": 2}).with_recompute(dict.fromkeys(layers, mode))
        for mode in ("none", "selective", "full")
    }
    none, selective, full = (predicted(small_gpt, plan).saved_bytes for plan in plans.values())
    stream = 8 // 2 * 48 * 96 * 4
    # Two norms, q, k and v, attention, the stream between, two that are four times as wide; numbers of each row.
    assert (none - full) / 3 == pytest.approx(15 * stream, rel=0.1)
    # Both norms and what tanh makes are made again; of the stream between, what is added to make it is kept.
    assert (none - selective) / 3 == pytest.approx(6 * stream, rel=0.05)
    one = plan_of(small_gpt, "ddp", {"dp": 2}).with_recompute({layers[0]: "full"})
    assert predicted(small_gpt, one).saved_bytes == pytest.approx(none - (none - full) / 3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "megatron_sp", "fsdp, gathered again"])
def test_recomputation_is_measured_as_predicted(small_gpt: NamedGraph, layout: str, mode: str) -> None:
    layers = list(small_gpt.ops_of_layers)
    name, _, again = layout.partition(", ")
    plan = plan_of(small_gpt, name, GPT_LAYOUTS[name]).with_recompute(dict.fromkeys(layers, mode))
    plan = plan.with_regather([t.name for t in small_gpt.parameters if again])
    found, real = predicted(small_gpt, plan), measure(small_gpt, plan)
    assert found.peak_bytes == pytest.approx(real.peak_bytes, rel=0.05)
    assert found.saved_bytes == pytest.approx(real.saved_bytes, rel=0.01)
    assert real.saved_bytes < measure(small_gpt, plan.with_recompute({})).saved_bytes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ops", ["keep(product every 2, attention)", "only(layer_norm, gelu)"])
def test_lists_of_ops_are_measured_as_predicted(small_gpt: NamedGraph, ops: str) -> None:
    layout = parse_layout(f"batch -> dp; * -> none; recompute {ops} @blocks.*")
    plan = propagate_plan(small_gpt, layout, {"dp": 2})
    found, real = predicted(small_gpt, plan), measure(small_gpt, plan)
    assert found.peak_bytes == pytest.approx(real.peak_bytes, rel=0.05)
    assert found.saved_bytes == pytest.approx(real.saved_bytes, rel=0.01)
    assert real.saved_bytes < measure(small_gpt, plan.with_recompute({})).saved_bytes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", [pytest.param("selective", marks=pytest.mark.slow), "full"])
@pytest.mark.parametrize("regathers", [pytest.param(False, marks=pytest.mark.slow), True])
def test_large_parameters_of_layers_computed_again_are_measured_as_predicted(mode: str, regathers: bool) -> None:
    """Each fills a bucket by itself; what is not gathered again stays, as it is gathered outside the layer."""
    graph = autopar.trace(*gpt(layers=2, d_model=1280, heads=4, vocab=64, seq=16, batch=4))
    layers = list(graph.ops_of_layers)
    plan = plan_of(graph, "fsdp", {"fsdp": 4}).with_recompute(dict.fromkeys(layers, mode))
    plan = plan.with_regather([t.name for t in graph.parameters if regathers])
    found, real = predicted(graph, plan), measure(graph, plan)
    assert found.saved_bytes == pytest.approx(real.saved_bytes, rel=0.01)
    assert found.peak_bytes == pytest.approx(real.peak_bytes, rel=0.05)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("layout", "axes"),
    [
        ("ddp", {"dp": 4}),
        ("zero1", {"dp": 4}),
        ("recompute full @blocks.*; megatron_sp", {"dp": 2, "tp": 2}),
        ("recompute full @blocks.*; regather @*; fsdp_tp", {"fsdp": 2, "tp": 2}),
    ],
)
def test_micro_batches_are_measured_as_predicted(layout: str, axes: Mapping[str, int], precision: str) -> None:
    model, inputs = gpt(layers=3, d_model=128, heads=4, vocab=512, seq=96, batch=32)
    graph = autopar.trace(model, inputs, precision=precision)
    chosen = choose_layout(f"micro 4; {layout}", axes)
    assignment = propagate(graph, chosen, axes)
    options = TrainingOptions(precision=PRESETS[precision])
    plan = replace(step_plan(graph, chosen, assignment), options=options)
    found, real = memory(lower_step(graph, plan)), measure(graph, plan, in_time=assignment)
    assert found.peak_bytes == pytest.approx(real.peak_bytes, rel=0.05 if "regather" in layout else 0.03)


@pytest.mark.filterwarnings("ignore")
def test_weights_in_float8_are_kept_by_all_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops of ours allocate unseen by what measures memory, so the casts are asked."""
    model, inputs = gpt(layers=2, d_model=64, heads=4, vocab=512, seq=16, batch=8)
    chosen, axes = choose_layout("micro 2; zero1", {"dp": 2}), {"dp": 2}
    plans = {}
    for precision in ("bf16", "fp8"):
        graph = autopar.trace(model, inputs, precision=precision)
        assignment = propagate(graph, chosen, axes)
        options = TrainingOptions(precision=PRESETS[precision])
        plans[precision] = graph, replace(step_plan(graph, chosen, assignment), options=options), assignment
    copies = {precision: memory(lower_step(*given)).copies_bytes for precision, (*given, _) in plans.items()}
    kept: dict[object, tuple[Tensor, Tensor]] = {}

    def of(self: CastWeights, *given: Any) -> tuple[Tensor, Tensor]:
        nonlocal kept
        found, kept = plain(self, *given), self._known
        return found

    plain = CastWeights.of
    monkeypatch.setattr(CastWeights, "of", of)
    graph, plan, assignment = plans["fp8"]
    measure(graph, plan, in_time=assignment)
    assert sum(made.nbytes for made, _ in kept.values()) == copies["fp8"] - copies["bf16"] > 0


def test_gradients_of_earlier_micro_batches_are_there(small_gpt: NamedGraph) -> None:
    plan = plan_of(small_gpt, "zero1", {"dp": 4})
    one, four = (predicted(small_gpt, replace(plan, options=TrainingOptions(micro_batches=count))) for count in (1, 4))
    assert four.gradients_bytes > one.gradients_bytes, "they add up whole, and are scattered at the end"
    assert four.copies_bytes > one.copies_bytes == 0, "the gathered copy stays"
    fsdp = plan_of(small_gpt, "fsdp", {"fsdp": 4})
    one, four = (predicted(small_gpt, replace(fsdp, options=TrainingOptions(micro_batches=count))) for count in (1, 4))
    assert four.gradients_bytes == one.gradients_bytes
    assert four.peak_bytes > one.peak_bytes


def test_master_copies() -> None:
    model, inputs = gpt(layers=2, d_model=64, vocab=128)
    graph = autopar.trace(model.bfloat16(), inputs)
    numel = sum(torch.Size(tensor.shape).numel() for tensor in graph.parameters)
    plan = plan_of(graph, "ddp", {"dp": 2})
    low = predicted(graph, plan)
    high = predicted(graph, plan.with_options(TrainingOptions(precision=PRESETS["bf16"])))
    assert (low.parameters_bytes, low.copies_bytes, low.optimizer_bytes) == (2 * numel, 0, 4 * numel)
    assert (high.parameters_bytes, high.copies_bytes, high.optimizer_bytes) == (4 * numel, 2 * numel, 8 * numel)
    assert (low.gradients_bytes, high.gradients_bytes) == (2 * numel, 4 * numel)


def test_without_a_backward_nothing_is_kept() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))).requires_grad_(False)
    graph = autopar.trace(model, (torch.randn(1000, 64),), dims={"input": "batch features"})
    found = predicted(graph, plan_of(graph, "batch -> dp; * -> none", {"dp": 2}))
    value = 500 * 64 * 4
    weights = 8 * 65 * 64 * 4
    assert found.gradients_bytes == found.optimizer_bytes == 0
    assert found.peak_bytes == weights + 4 * value, "the whole input, its slice, and what the first layer makes"


# -- storages and optimizers ------------------------------------------------------------------------------------------


def test_storages() -> None:
    found = Storages()
    found.now = "first"
    one, two = found.new(10), found.new(5)
    found.now = "second"
    found.touch(1)
    assert (found.live, found.peak, found.peak_at) == (15, 16, "second")
    found.take(one)
    found.drop(one)
    assert found.live == 15
    found.drop(one)
    assert found.live == 5
    assert found.alone(two)
    with pytest.raises(AssertionError, match="is freed"):
        found.drop(one)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("sgd", lambda p: torch.optim.SGD(p)),
        ("momentum", lambda p: torch.optim.SGD(p, momentum=0.9)),
        ("adam", torch.optim.Adam),
        ("adamw", torch.optim.AdamW),
        ("adamax", torch.optim.Adamax),
        ("nadam", torch.optim.NAdam),
        ("radam", torch.optim.RAdam),
        ("adagrad", torch.optim.Adagrad),
        ("rmsprop", torch.optim.RMSprop),
        ("adadelta", torch.optim.Adadelta),
        ("adafactor", torch.optim.Adafactor),
    ],
)
def test_optimizer_states_are_those_of_torch(name: str, make: Any) -> None:
    parameter = nn.Parameter(torch.randn(40, 30))
    optimizer = make([parameter])
    parameter.grad = torch.randn(40, 30)
    optimizer.step()
    states = [
        value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor) and value.numel() > 1
    ]
    kind = optimizer_of(name)
    expected = kind.states * 40 * 30 + kind.factored * (40 + 30)
    assert sum(state.numel() for state in states) == expected


def test_unknown_optimizer() -> None:
    with pytest.raises(AutoparError) as error:
        optimizer_of("adamx")
    assert str(error.value) == (
        f"no optimizer is called 'adamx'; did you mean 'adamax'?\nfix: take one of {', '.join(OPTIMIZERS)}"
    )


class SelfAttention(nn.Module):
    """Causal attention whose activations are larger than its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (4, 16)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean()


@pytest.mark.parametrize("pin", ["s -> cp, t -> cp", "s -> cp"])
def test_a_ring_and_a_gather_of_keys(pin: str) -> None:
    """A ring holds keys and values of two ranks beside its own ones and their gradients, a gather those of all."""
    layout = f"fold seq; seq -> cp; op @/folded_attention[{pin}]; * -> none"
    plan = autopar.plan(
        SelfAttention(), "cp=8", (torch.randn(1, 4096, 64),), layout=layout, cluster="h100", cache=False
    )
    assert plan.costs.memory.peak_bytes == pytest.approx(measure(plan.graph, plan.decided).peak_bytes, rel=0.01)
