"""Experts that multiply in float8, on real processes, beside one process whose experts do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.lowering.modules.float8_groups import float8_grouped
from autopar.lowering.modules.routed_ops import FLOAT8, GroupedRows
from tests.runtime.launcher import launch
from tests.runtime.training import gradients

moe = pytest.importorskip("transformers.integrations.moe")
import transformers  # noqa: E402  # after the skip

EXPERTS, WIDTH, HIDDEN = 8, 32, 48


class Experts(nn.Module):
    """The experts of one layer, with the router."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_local_experts": EXPERTS}
        config = transformers.MixtralConfig(num_hidden_layers=1, vocab_size=32, **sizes)
        self.mlp = transformers.MixtralModel(config).layers[0].mlp

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.mlp(x).float().square().sum()
        return found


def experts() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = Experts()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model, torch.randn(8, 6, WIDTH)


@contextmanager
def in_float8() -> Iterator[None]:
    """Let products by expert of transformers multiply in float8."""
    kept = moe._grouped_mm

    def product(rows: Tensor, matrices: Tensor, offs: Tensor) -> Tensor:
        return float8_grouped(rows, matrices, None, offs)

    moe._grouped_mm = product
    try:
        yield
    finally:
        moe._grouped_mm = kept


def alone() -> tuple[float, dict[str, Tensor]]:
    model, x = experts()
    loss = model.bfloat16()(x.bfloat16())
    loss.backward()
    return float(loss.detach()), gradients(model)


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((found[name].float() - one.float()).norm() / one.float().norm()) for name, one in expected.items())


def run(mesh: str, layout: str) -> tuple[float, float, float, int]:
    """Differences of the loss and the gradients, those of products in bfloat16, and the float8 products by group."""
    with in_float8():
        expected, reference = alone()
    _, in_bfloat16 = alone()
    model, x = experts()
    parallel = autopar.parallelize(model, mesh, (x,), layout=layout, precision="fp8-rows", outputs="full")
    loss = parallel(x)
    loss.backward()
    found = gradients(parallel)
    modules = parallel.emitted.graph_module.modules()
    count = sum(isinstance(one, GroupedRows) and one.product == FLOAT8 for one in modules)
    count += sum(node.target is float8_grouped for node in parallel.emitted.graph_module.graph.nodes)
    return abs(float(loss.detach()) - expected) / expected, apart(found, reference), apart(found, in_bfloat16), count


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("batch -> ep\n@*experts* { expert -> ep }", id="exchanged"),
        pytest.param("batch -> ep", id="gathered", marks=pytest.mark.slow),
        pytest.param("@*experts* { d_ff -> ep }", id="within an expert", marks=pytest.mark.slow),
        # So many slots that none is dropped.
        pytest.param("capacity 8\nbatch -> ep\n@*experts* { expert -> ep }", id="slots", marks=pytest.mark.slow),
    ],
)
def test_experts_on_ranks_are_those_of_one(layout: str) -> None:
    for loss, gradient, rounding, count in launch(run, "ep=2", layout, ranks=2):
        assert count == 2
        assert loss < 2e-3
        # Where rows or columns of one scale are on several ranks, scales of ranks differ.
        assert gradient < (0.01 if "expert ->" in layout else 0.06)
        assert rounding > 0.02, "a product in bfloat16 has other numbers"
