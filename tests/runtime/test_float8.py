"""Models whose linears multiply in float8, on real processes, beside one process that multiplies in float8."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import autopar
from autopar.lowering.collectives.process_groups import device_mesh
from autopar.lowering.modules.float8 import FLOAT8_LINEAR
from autopar.mesh import Mesh
from tests.runtime.float8_model import linears_in_float8
from tests.runtime.launcher import launch
from tests.runtime.sent import Counted, Recorder
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


def alone(precision: str) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Mlp().bfloat16()
    x = torch.randn(32, WIDTH).bfloat16()
    with linears_in_float8(model, rows="fp8-rows" in precision):
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
    parts = [one for one in parallel.emitted.graph_module.modules() if isinstance(one, GraphModule)]
    count = sum(node.target is FLOAT8_LINEAR for part in parts for node in part.graph.nodes)
    return abs(float(loss) - expected) / expected, worst, count, seen.dtypes


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        ("fsdp=4", "fsdp"),
        pytest.param("dp=2,tp=2", "batch -> dp; d_ff -> tp; * -> none", marks=pytest.mark.slow),
        pytest.param("fsdp=2", REGATHERED, marks=pytest.mark.slow),
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


@pytest.mark.parametrize(
    ("layout", "linears"),
    [
        ("fsdp", "fp8"),
        pytest.param("fsdp", "fp8-rows", marks=pytest.mark.slow),
        pytest.param(REGATHERED, "fp8", marks=pytest.mark.slow),
        pytest.param("micro 2; " + REGATHERED, "fp8", marks=pytest.mark.slow),
        pytest.param("micro 2; batch -> fsdp; param, grad, opt { * -> fsdp | none }", "fp8", marks=pytest.mark.slow),
    ],
)
def test_weights_are_gathered_in_float8(layout: str, linears: str) -> None:
    """A shard has a scale of its own; a second rounding changes no number but the smallest."""
    for loss, gradient, count, dtypes in launch(
        run, f"bf16, linears={linears}, gathers=fp8", "fsdp=2", layout, ranks=2
    ):
        assert count in (4, 8), "a loop has a body for its first micro-batch"
        assert loss < 2e-3
        assert gradient < 0.06
        assert dtypes["all_gather_into_tensor"] == {"uint8", "bfloat16"}, "biases are no weights of a product"


def gathered(precision: str) -> tuple[int, int, float]:
    """The bytes of all gathers as the module lists them, as they are sent, and the loss."""
    torch.manual_seed(0)
    x = torch.randn(32, WIDTH)
    parallel = autopar.parallelize(Mlp(), "fsdp=2", (x,), layout="fsdp", precision=precision, outputs="full")
    listed = [one.bytes for one in parallel.collectives() if one.kind == "all_gather"]
    with Recorder(device_mesh(Mesh("fsdp=2"))) as seen:
        loss = parallel(x)
    return sum(listed), sum(one.bytes for one in seen.sent if one.kind == "all_gather"), float(loss.detach())


def test_a_gather_in_float8_sends_half() -> None:
    weights, biases = 2 * 2 * WIDTH * HIDDEN, 2 * (WIDTH + HIDDEN)
    for precision, itemsize in (("fp8", 2), ("fp8, gathers=fp8", 1)):
        for listed, sent, _ in launch(gathered, precision, ranks=2):
            assert listed == itemsize * weights + 2 * biases, "those of the gathered buffers"
            scales = 2 * 4 * 4 if itemsize == 1 else 0
            assert sent == listed + scales, "of each rank's shards"
