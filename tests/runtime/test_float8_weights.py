"""Weights in float8 under micro-batches: how often they are cast, and results beside casts in each micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.lowering.modules import float8, float8_groups
from autopar.lowering.modules.float8_weights import CastWeights
from tests.runtime.launcher import launch
from tests.runtime.test_float8 import REGATHERED, WIDTH, Mlp
from tests.runtime.test_float8_experts import experts
from tests.runtime.training import gradients

# The input of the first linear has no gradient, so its weight is cast for the forward alone.
LINEARS, BOTH_WAYS, COUNT = 4, 7, 4
ZERO1 = "batch -> dp; * -> none; opt { * -> dp | none }"
ZERO3 = "batch -> dp; * -> none; param, grad, opt { * -> dp | none }"


class Casts:
    """Counts casts of weights, by calls of what makes them; `apart`: none is kept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, apart: bool) -> None:
        self.count = 0
        for module in (float8, float8_groups):
            monkeypatch.setattr(module, "cast_weight", self._counted(module.cast_weight, apart))

    def _counted(self, known: Callable[..., Any], apart: bool) -> Callable[..., Any]:
        def cast_weight(weight: Tensor, dim: int | None, cast: Callable[..., Any]) -> Any:
            def counted(*given: Any) -> Any:
                self.count += 1
                return cast(*given)

            return counted(weight, dim) if apart else known(weight, dim, counted)

        return cast_weight


def model_of(kind: str) -> tuple[nn.Module, Tensor]:
    if kind == "experts":
        return experts()
    torch.manual_seed(0)
    return Mlp(), torch.randn(8 * COUNT, WIDTH)


def run(kind: str, mesh: str, layout: str, precision: str) -> tuple[list[int], bool]:
    """Casts of the weights in two steps, kept and apart, and whether losses and gradients are equal to the bit."""
    counts, seen = [], []
    for apart in (False, True):
        with pytest.MonkeyPatch.context() as monkeypatch:
            model, x = model_of(kind)
            parallel = autopar.parallelize(model, mesh, (x,), layout=layout, precision=precision, outputs="full")
            casts = Casts(monkeypatch, apart)
            for _ in range(2):
                loss = parallel(x)
                loss.backward()
            assert CastWeights.running is None
            counts.append(casts.count)
            seen.append([loss.detach(), *gradients(parallel).values()])
    return counts, all(map(torch.equal, *seen))


@pytest.mark.parametrize("precision", ["fp8", pytest.param("fp8-rows", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("layout", "kept", "apart"),
    [
        pytest.param(f"micro {COUNT}; {ZERO1}", BOTH_WAYS, BOTH_WAYS * COUNT, id="whole"),
        # The gathers run beside the first micro-batch.
        pytest.param(f"micro {COUNT}; {ZERO3}", BOTH_WAYS, BOTH_WAYS * COUNT, id="gathered once"),
        pytest.param(
            f"micro {COUNT}; {ZERO1}; recompute full @layers.*", BOTH_WAYS, (LINEARS + BOTH_WAYS) * COUNT, id="again"
        ),
        pytest.param(
            f"micro {COUNT} halves; {ZERO1}", BOTH_WAYS, 2 * BOTH_WAYS * COUNT, id="halves", marks=pytest.mark.slow
        ),
        pytest.param(
            f"micro {COUNT}; {REGATHERED.replace('fsdp', 'dp')}",
            BOTH_WAYS * COUNT,
            BOTH_WAYS * COUNT,
            id="gathered in each",
        ),
    ],
)
def test_weights_are_cast_once_in_a_step(layout: str, kept: int, apart: int, precision: str) -> None:
    for counts, is_equal in launch(run, "mlp", "dp=2", layout, precision, ranks=2):
        assert counts == [2 * kept, 2 * apart], "in two steps"
        assert is_equal


def test_weights_of_stages_are_cast_once_in_a_step() -> None:
    layout = f"micro {COUNT}; pipeline pp 1f1b; * -> none"
    found = launch(run, "mlp", "pp=2", layout, "fp8", ranks=2)
    for counts, is_equal in found:
        assert counts[0] * COUNT == counts[1] > 0
        assert is_equal
    assert sum(counts[0] for counts, _ in found) == 2 * BOTH_WAYS


def test_matrices_of_experts_are_cast_once_in_a_step() -> None:
    # Two products; the rows have no gradient.
    layout = "micro 2; batch -> ep\n@*experts* { expert -> ep }"
    for counts, is_equal in launch(run, "experts", "ep=2", layout, "fp8", ranks=2):
        assert counts == [2 * 3, 2 * 6]
        assert is_equal
