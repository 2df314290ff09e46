"""Models whose linears multiply in float8, on real processes, beside one process that multiplies in float8."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.lowering.modules.float8 import FLOAT8_LINEAR, float8_linear
from tests.runtime.launcher import launch
from tests.runtime.sent import Counted
from tests.runtime.training import gradients

WIDTH, HIDDEN = 32, 64
REGATHERED = "batch -> fsdp; * -> none; param, grad, opt { * -> fsdp | none }; regather @*"


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.float().square().mean()


@contextmanager
def linears_in_float8(model: nn.Module, rows: bool) -> Iterator[None]:
    """Replace the linears of a model: float8 operands, computed in bfloat16 around them."""
    kept: list[tuple[nn.Linear, Callable[..., Tensor]]] = []
    for one in model.modules():
        if isinstance(one, nn.Linear):
            kept.append((one, one.forward))
            one.forward = lambda x, one=one: float8_linear(x, one.weight, one.bias, rows)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for one, forward in kept:
            one.forward = forward  # type: ignore[method-assign]


def alone(precision: str) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Mlp().bfloat16()
    x = torch.randn(32, WIDTH).bfloat16()
    with linears_in_float8(model, rows=precision == "fp8-rows"):
        loss = model(x)
        loss.backward()
    return float(loss), gradients(model)


def run(precision: str, mesh: str, layout: str) -> tuple[float, float, int, dict[str, set[str]]]:
    """Differences of the loss and of the gradients from those of one process, number of float8 linears, dtypes sent."""
    expected, reference = alone(precision)
    torch.manual_seed(0)
    model = Mlp()
    x = torch.randn(32, WIDTH)
    parallel = autopar.parallelize(model, mesh, (x,), layout=layout, precision=precision, outputs="full")
    with Counted() as seen:
        loss = parallel(x)
        loss.backward()
    found = gradients(parallel)
    worst = max(float((found[name] - one.float()).norm() / one.float().norm()) for name, one in reference.items())
    count = sum(node.target is FLOAT8_LINEAR for node in parallel.emitted.graph_module.graph.nodes)
    return abs(float(loss) - expected) / expected, worst, count, seen.dtypes


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        ("fsdp=4", "fsdp"),
        pytest.param("dp=2,tp=2", "batch -> dp; d_ff -> tp; * -> none", marks=pytest.mark.slow),
        pytest.param(
            "fsdp=2",
            "batch -> fsdp; * -> none; param, grad, opt { * -> fsdp | none }; regather @*",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.parametrize("precision", ["fp8", pytest.param("fp8-rows", marks=pytest.mark.slow)])
def test_float8_on_ranks_is_near_float8_on_one(precision: str, mesh: str, layout: str) -> None:
    ranks = 2 if mesh == "fsdp=2" else 4
    for loss, gradient, count, _ in launch(run, precision, mesh, layout, ranks=ranks):
        assert count == 4
        # Each rank has scales of its own, which round otherwise: half a step of a mantissa of two or three bits.
        assert loss < 2e-3
        assert gradient < 0.06
