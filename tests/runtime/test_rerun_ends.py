"""The recompute of a whole layer stops when all saved tensors are back: its price, beside counted products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.flop_counter import FlopCounterMode

import autopar
from autopar.cost.hardware.cluster import load_cluster
from autopar.cost.lowered_step import lower_step
from autopar.cost.profile import profile
from autopar.cost.tasks import Task
from autopar.sharding.layout.language import choose_layout
from autopar.sharding.options import TrainingOptions
from autopar.sharding.time_slice import propagate_plan
from tests.runtime.launcher import launch

TOKENS, WIDTH, HIDDEN, LAYERS = 8, 16, 64, 3
MESH = "a=2"
# The hidden dim is split, so that the second product of a layer makes partial sums.
LAYOUT = "d_ff -> a"
AGAIN = "recompute full @blocks.*"


class Layer(nn.Module):
    """Two products, and one of several ends."""

    def __init__(self, end: str) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH), nn.LayerNorm(WIDTH)
        self.end = end

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(torch.relu(self.up(x)))
        if self.end == "norm":
            normed: Tensor = self.norm(x + found)
            return normed
        return x + torch.sigmoid(found) if self.end == "sigmoid" else x + found


class Layers(nn.Module):
    def __init__(self, end: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(end) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def made(end: str) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    return Layers(end), {"x": torch.randn(TOKENS, WIDTH, requires_grad=True)}


def counted(end: str) -> tuple[int, int]:
    """FLOPs of products and messages of a step with recomputation, beyond those of one without."""
    found = []
    for layout in (LAYOUT, f"{LAYOUT}\n{AGAIN}"):
        model, inputs = made(end)
        parallel = autopar.parallelize(model, MESH, inputs, layout=layout)
        with FlopCounterMode(display=False) as flops, CommDebugMode() as messages:
            parallel(**inputs).backward()
        found.append((flops.get_total_flops(), messages.get_total_counts()))
    return found[1][0] - found[0][0], found[1][1] - found[0][1]


def recomputed(end: str, options: TrainingOptions) -> list[Task]:
    """The tasks of the recompute in the price."""
    model, inputs = made(end)
    graph, axes = autopar.trace(model, inputs), autopar.Mesh(MESH).whole
    plan = propagate_plan(graph, choose_layout(f"{LAYOUT}\n{AGAIN}", axes), axes).with_options(options)
    tasks = profile(lower_step(graph, plan), load_cluster("h100")).backward
    return [task for task in tasks if task.direction == "recompute"]


def priced(end: str, options: TrainingOptions) -> tuple[float, int]:
    """FLOPs of products and messages of the recompute in the price."""
    tasks = recomputed(end, options)
    return sum(task.flops for task in tasks if "linear" in task.name), sum(task.sends for task in tasks)


@pytest.mark.parametrize("end", ["product", "norm", "sigmoid"])
def test_price_of_a_recompute(end: str) -> None:
    product = 2 * TOKENS * WIDTH * HIDDEN // 2
    # The last product saves its operands before it runs, and ends the recompute.
    expected = (LAYERS * product, 0) if end == "product" else (LAYERS * 2 * product, LAYERS)
    assert launch(counted, end, ranks=2) == [expected] * 2
    assert priced(end, TrainingOptions()) == expected
    assert priced(end, TrainingOptions(recompute_to_end=True)) == (LAYERS * 2 * product, LAYERS)
