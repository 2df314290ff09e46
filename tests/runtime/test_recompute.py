"""Layers that a layout has computed again in the backward: gradients, what is sent, and what is kept in between."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.sharding.layout.language import load_strategy
from examples.gpt import gpt
from examples.moe import moe
from examples.resnet import resnet
from tests.runtime.launcher import launch
from tests.runtime.sent import Counted
from tests.runtime.training import Inputs, gap, gradient_gap, gradients, worst

MODES = ("none", "selective", "full")
LAYOUTS = {
    "fsdp": ({"fsdp": ("a", "b")}, "regather @*"),
    "megatron_sp": ({"dp": ("a",), "tp": ("b",)}, ""),
}


def layout_of(strategy: str, mode: str, lines: str = "") -> str:
    """A strategy on the axes of the test, with lines of one's own."""
    axes, more = LAYOUTS[strategy]
    return f"{load_strategy(strategy).on_axes(axes)}\n{more}\n{lines}\nrecompute {mode} @blocks.*"


def small_gpt(dropout: float) -> tuple[nn.Module, Inputs]:
    torch.manual_seed(0)
    model, inputs = gpt(batch=4, seq=8, vocab=24, d_model=16, heads=4, layers=2, dropout=dropout)
    return model.double().train(), inputs


def step(parallel: nn.Module, inputs: Inputs) -> tuple[Tensor, dict[str, Tensor], dict[str, int]]:
    torch.manual_seed(5)
    with Counted() as sent:
        loss = parallel(**inputs)
        loss.backward()
    found = gradients(parallel)
    parallel.zero_grad()
    return loss.detach(), found, dict(sent.counts)


def with_dropout(mesh: str) -> dict[str, Any]:
    """Each mode beside `none`, with the same masks, and beside one process."""
    model, inputs = small_gpt(0.2)
    torch.manual_seed(5)
    expected = model(**inputs)
    expected.backward()
    found: dict[str, Any] = {}
    for strategy in LAYOUTS:
        plain: tuple[Tensor, dict[str, Tensor], dict[str, int]] | None = None
        for mode in MODES:
            layout = layout_of(strategy, mode)
            parallel = autopar.parallelize(copy.deepcopy(model), mesh, inputs, layout=layout)
            loss, given, sent = step(parallel, inputs)
            with parallel.exact_randomness():
                exact_loss, exact, _ = step(parallel, inputs)
            plain = plain or (loss, given, sent)
            found[f"{strategy}, {mode}"] = max(gap(loss, plain[0]), worst(given, plain[1]))
            found[f"{strategy}, {mode}, exact"] = max(gap(exact_loss, expected), worst(exact, gradients(model)))
            found[f"{strategy}, {mode}, sent"] = sent
            found[f"{strategy}, {mode}, notes"] = {"all": parallel.code.count("all_gather(")}
    return found


def compiled(mesh: str) -> dict[str, Any]:
    """The compiled module beside the module."""
    model, inputs = small_gpt(0.2)
    found: dict[str, Any] = {}
    for strategy, mode in (("megatron_sp", "selective"), ("fsdp", "full")):
        torch._dynamo.reset()
        counters.clear()
        parallel = autopar.parallelize(model, mesh, inputs, layout=layout_of(strategy, mode))
        loss, expected, _ = step(parallel, inputs)
        again: Any = torch.compile(parallel, backend="aot_eager")
        torch.manual_seed(5)
        value = again(**inputs)
        value.backward()
        found[f"{strategy}, {mode}"] = max(gap(value, loss), worst(gradients(parallel), expected))
        found[f"{strategy}, {mode}, graphs"] = abs(counters["stats"]["unique_graphs"] - 1)
        parallel.zero_grad()
    return found


def around_a_loop(mesh: str, stages: str) -> dict[str, tuple[float, int]]:
    """Errors of gradients, and messages of a step, of layers that have ops before and behind the micro-batches."""
    torch.manual_seed(0)
    model, inputs = moe(batch=4, seq=8, vocab=24, d_model=16)
    model = model.double()
    model(**inputs).backward()
    found = {}
    for mode in MODES:
        layout = f"micro 2; {stages}recompute {mode} @blocks.*; * -> none"
        parallel = autopar.parallelize(copy.deepcopy(model).requires_grad_(), mesh, inputs, layout=layout)
        _, given, sent = step(parallel, inputs)
        found[mode] = worst(given, gradients(model)), sum(sent.values())
    return found


@pytest.mark.parametrize(
    ("mesh", "stages"), [("a=2", ""), pytest.param("pp=2", "pipeline pp gpipe; ", marks=pytest.mark.slow)]
)
def test_no_loop_over_micro_batches_runs_again(mesh: str, stages: str) -> None:
    """The balance of a router takes a mean over the batch, so the end of a layer stands behind the loop."""
    for found in launch(around_a_loop, mesh, stages, ranks=2):
        for mode, (error, sent) in found.items():
            assert error < 1e-11, mode
            assert sent == found["none"][1], mode


class Block(nn.Module):
    """A block with a norm of its own and a map that all blocks share."""

    def __init__(self, shared: nn.Module, checkpointed: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.shared = shared
        self.down = nn.Linear(8, 8)
        self.checkpointed = checkpointed

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.shared(self.norm(x)))

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)
        return x + torch.sin(self.down(y))  # type: ignore[no-any-return]


class Shared(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        shared = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Block(shared, checkpointed) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


ZERO3 = "batch -> a; * -> none; param, grad, opt { * -> a | none }; regather @*"


def shared_parameters() -> dict[str, Any]:
    """A parameter that several layers gather again; checkpoints of the model within layers; two calls, one backward."""
    found: dict[str, Any] = {}
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = Shared(checkpointed).double()
        x = torch.randn(4, 8, dtype=torch.float64)
        for mode in MODES:
            model.zero_grad()
            layout = (
                f"batch -> a; * -> none\nparam, grad, opt {{ * -> a | none }}\nregather @*\nrecompute {mode} @blocks.*"
            )
            parallel = autopar.parallelize(copy.deepcopy(model), "a=2", (x,), layout=layout, dims={"x": "batch d"})
            case = f"{mode}, {checkpointed}"
            total, expected = parallel(x) + parallel(2 * x), model(x) + model(2 * x)
            total.backward(retain_graph=True)
            expected.backward(retain_graph=True)
            found[case] = max(gap(total, expected), gradient_gap(model, parallel))
            total.backward()
            expected.backward()
            found[f"{case}, once more"] = gradient_gap(model, parallel)
            parallel(x)  # and no backward
    return found


def gathered_again(mesh: str) -> dict[str, Any]:
    """Parameters that ops of ours read, some with several results: given up after the forward, every bucket of them."""
    found: dict[str, Any] = {}
    torch.manual_seed(0)
    image, images = resnet(depth=10, width=8, image=16, batch=8, loss=True, train=True)
    text, inputs = gpt(batch=4, seq=8, vocab=24, d_model=16, heads=4, layers=1)
    cases = (("resnet", image, images, "fsdp", "fsdp=a*b"), ("gpt", text, inputs, "fsdp_tp", "fsdp=a, tp=b"))
    for name, model, given, strategy, axes in cases:
        model = model.double()
        given = {key: value.double() if value.is_floating_point() else value for key, value in given.items()}
        meaning = {axis: tuple(over.split("*")) for axis, over in (pair.split("=") for pair in axes.split(", "))}
        layout = f"{load_strategy(strategy).on_axes(meaning)}\nregather @*"
        parallel = autopar.parallelize(copy.deepcopy(model), mesh, given, layout=layout)
        for call in ("first", "second"):
            model.zero_grad()
            parallel.zero_grad()
            value, expected = parallel(**given), model(**given)
            value.backward()
            expected.backward()
            found[f"{name}, {call}"] = max(gap(value, expected), gradient_gap(model, parallel))
        steps = [step for step, _ in parallel.emitted.graph_module.named_children()]
        gathers = [step for step in steps if step.endswith("_start") and "all_gather" in step]
        assert gathers
        assert {f"{step.removesuffix('_start')}_release" for step in gathers} <= set(steps)
    return found


def one_rank() -> dict[str, Any]:
    """On one rank dropout draws from the default generator, as the model does."""
    model, inputs = small_gpt(0.2)
    found: dict[str, Any] = {}
    torch.manual_seed(5)
    expected = model(**inputs)
    expected.backward()
    for mode in MODES:
        layout = f"* -> none\nrecompute {mode} @blocks.*"
        parallel = autopar.parallelize(copy.deepcopy(model), "a=1", inputs, layout=layout)
        torch.manual_seed(5)
        loss = parallel(**inputs)
        torch.rand(3)
        loss.backward()
        found[mode] = max(gap(loss, expected), gradient_gap(model, parallel))
    return found


@pytest.mark.slow
def test_gradients_with_dropout() -> None:
    for found in launch(with_dropout, "a=2,b=2", ranks=4):
        gaps = {case: value for case, value in found.items() if not isinstance(value, dict)}
        assert {case: value for case, value in gaps.items() if not value < 1e-11} == {}
        none, selective, full = (found[f"megatron_sp, {mode}, sent"] for mode in MODES)
        assert found["megatron_sp, none, notes"] == found["megatron_sp, full, notes"], "regions are shown too"
        assert selective == none, "what is dear is not done again, and nothing is sent again"
        assert full["all_gather_into_tensor"] == none["all_gather_into_tensor"] + 2 * 2
        none, selective, full = (found[f"fsdp, {mode}, sent"] for mode in MODES)
        assert none == selective == full, "parameters are gathered again once"


@pytest.mark.slow
def test_compiled() -> None:
    for found in launch(compiled, "a=1,b=2", ranks=2):
        assert len(found) == 4
        assert max(found.values()) < 1e-11, found


@pytest.mark.slow
def test_shared_parameters() -> None:
    for found in launch(shared_parameters, ranks=2):
        assert len(found) == 12
        assert max(found.values()) < 1e-12, found


def test_what_is_gathered_again_is_given_up() -> None:
    for found in launch(gathered_again, "a=2,b=2", ranks=4):
        assert len(found) == 4
        assert max(found.values()) < 1e-11, found


def test_one_rank_draws_what_the_model_draws() -> None:
    (found,) = launch(one_rank, ranks=1)
    assert len(found) == 3
    assert max(found.values()) < 1e-12, found
