"""Layers whose saved tensors go to the host: the same numbers to the last bit, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.lowering.modules.host_copies import OffloadedOps
from autopar.sharding.layout.language import load_strategy
from examples.gpt import gpt
from tests.runtime.launcher import launch
from tests.runtime.training import Inputs, gap, gradient_gap, gradients

ONE = "* -> none"
ZERO3 = "batch -> a; * -> none\nparam, grad, opt { * -> a | none }\nregather @*"
LAYOUTS = {
    "zero3": ZERO3,
    "megatron_sp": str(load_strategy("megatron_sp").on_axes({"dp": (), "tp": ("a",)})),
    "micro": f"micro 2; {ZERO3}",
}


def small_gpt(dropout: float = 0.0) -> tuple[nn.Module, Inputs]:
    """Saved tensors of two ranks are larger than the smallest that is moved."""
    torch.manual_seed(0)
    model, inputs = gpt(batch=8, seq=64, vocab=24, d_model=64, heads=4, layers=3, dropout=dropout)
    return model.double().train(), inputs


def step(parallel: nn.Module, inputs: Inputs, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(5)
    loss = parallel(**inputs)
    loss.backward(**options)
    found = {name: gradient.clone() for name, gradient in gradients(parallel).items()}
    parallel.zero_grad()
    return loss.detach(), found


def moved(parallel: Any) -> int:
    return sum(isinstance(module, OffloadedOps) for module in parallel.emitted.graph_module.modules())


def differing(mesh: str, layouts: dict[str, str]) -> list[str]:
    """Return the gradients that differ from those without offloading in any bit."""
    model, inputs = small_gpt(0.1)
    found: list[str] = []
    for name, lines in layouts.items():
        results = []
        for mode in ("none", "offload"):
            layout = f"{lines}\nrecompute {mode} @blocks.*"
            parallel = autopar.parallelize(copy.deepcopy(model), mesh, inputs, layout=layout)
            results += [step(parallel, inputs) for _ in range(2)]  # the second step begins with memory of the first
            assert bool(moved(parallel)) == (mode == "offload")
        for loss, given in results[1:]:
            found += [name] * (not torch.equal(_local(loss), _local(results[0][0])))
            found += [f"{name}: {key}" for key, value in given.items() if not torch.equal(value, results[0][1][key])]
    return found


def _local(value: Tensor) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value  # type: ignore[no-any-return]


def one_rank() -> dict[str, Any]:
    """Two backwards, two calls, no gradients, second derivatives, and layers with several modes."""
    found: dict[str, Any] = {"differing": differing("a=1", {"one": ONE})}
    model, inputs = small_gpt()
    parallel = autopar.parallelize(copy.deepcopy(model), "a=1", inputs, layout=f"{ONE}; recompute offload @blocks.*")
    total, expected = parallel(**inputs) + parallel(**inputs), 2 * model(**inputs)
    total.backward(retain_graph=True)
    expected.backward(retain_graph=True)
    total.backward()
    expected.backward()
    found["twice"] = max(gap(total, expected), gradient_gap(model, parallel))
    with torch.no_grad():
        found["without gradients"] = gap(parallel(**inputs), model(**inputs))
    mixed = f"{ONE}; recompute offload @blocks.0; recompute full @blocks.1; recompute selective @blocks.2"
    model.zero_grad()
    parallel = autopar.parallelize(copy.deepcopy(model), "a=1", inputs, layout=mixed)
    loss, given = parallel(**inputs), model(**inputs)
    loss.backward()
    given.backward()
    found["mixed"] = max(gap(loss, given), gradient_gap(model, parallel))
    found["second"] = second_derivatives()
    return found


class Smooth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(64, 64) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.pow(2).sum()


def second_derivatives() -> float:
    """Return how far the gradient of a gradient's norm is off."""
    model, x = Smooth().double(), torch.randn(256, 64, dtype=torch.float64)
    layout = f"{ONE}; recompute offload @blocks.*"
    parallel = autopar.parallelize(copy.deepcopy(model), "a=1", (x,), layout=layout, dims={"x": "batch d"})
    for one in (model, parallel):
        first = torch.autograd.grad(_local(one(x)), list(one.parameters()), create_graph=True)
        sum(_local(gradient).pow(2).sum() for gradient in first).backward()  # type: ignore[union-attr]
    return gradient_gap(model, parallel)


def two_ranks() -> list[str]:
    return differing("a=2", LAYOUTS)


def stages() -> list[str]:
    schedules = ("1f1b", "zero_bubble")
    return differing("a=2", {name: f"micro 4; pipeline a {name}; {ONE}" for name in schedules})


def compiled() -> float:
    """Return how far a compiled module is off."""
    model, inputs = small_gpt()
    parallel = autopar.parallelize(copy.deepcopy(model), "a=1", inputs, layout=f"{ONE}; recompute offload @blocks.*")
    some: Any = torch.compile(parallel, backend="aot_eager")
    loss, expected = some(**inputs), model(**inputs)
    loss.backward()
    expected.backward()
    return max(gap(loss, expected), gradient_gap(model, parallel))


def test_one_rank_gives_the_same_bits() -> None:
    (found,) = launch(one_rank, ranks=1)
    assert found.pop("differing") == []
    assert len(found) == 4
    assert max(found.values()) < 1e-12, found


@pytest.mark.slow
def test_two_ranks_give_the_same_bits() -> None:
    assert launch(two_ranks, ranks=2) == [[], []]


@pytest.mark.slow
def test_stages_give_the_same_bits() -> None:
    assert launch(stages, ranks=2) == [[], []]


@pytest.mark.slow
def test_a_compiled_module_runs_these_layers_uncompiled() -> None:
    (different,) = launch(compiled, ranks=1)
    assert different < 1e-12
