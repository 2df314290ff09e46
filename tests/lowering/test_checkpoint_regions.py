"""Activation checkpointing of the model's own (`torch.utils.checkpoint`), in the graph that the ranks run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autopar
from tests.runtime.launcher import launch
from tests.runtime.sent import Counted
from tests.runtime.test_parameter_handling import REGATHERED
from tests.runtime.training import gradients, worst

# Nothing is gathered, so nothing is freed and gathered again.
REGATHERED_WHOLE = "batch -> dp; * -> none; regather @*"

MEGATRON = """
batch -> dp; * -> none
d_ff -> tp
"""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = autopar.named(x, "batch seq d_model")
        return x + self.down(autopar.named(self.up(self.norm(x)), "batch seq d_ff").tanh())


class Model(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(8) for _ in range(3)])
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x.pow(2).mean()


def step(layout: str, mesh: str) -> tuple[float, dict[str, dict[str, int]], list[int]]:
    """The error of the gradients; what the backward sends, and the bytes that autograd keeps, with regions and not."""
    found, kept = {}, []
    x = torch.randn(4, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    error = 0.0
    for checkpointed in (True, False):
        torch.manual_seed(0)
        model = Model(checkpointed).double()
        parallel = autopar.parallelize(model, mesh, (x,), layout=layout)
        model(x).backward()
        saved: dict[int, int] = {}

        def pack(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = parallel(x)
        kept.append(sum(saved.values()))
        with Counted() as sent:
            loss.backward()
        found[str(checkpointed)] = dict(sent.counts)
        error = max(error, worst(gradients(parallel), gradients(model)))
    return error, found, kept


@pytest.mark.parametrize(
    ("layout", "mesh"),
    [
        pytest.param("ddp", "dp=2", marks=pytest.mark.slow),
        (REGATHERED, "dp=2"),
        (REGATHERED_WHOLE, "dp=2"),
        pytest.param("fsdp(fsdp=dp)", "dp=2", marks=pytest.mark.slow),
        (MEGATRON, "dp=1,tp=2"),
    ],
)
def test_regions_are_recomputed(layout: str, mesh: str) -> None:
    for error, sent, kept in launch(step, layout, mesh, ranks=2):
        assert error < 1e-12
        assert kept[0] < 0.65 * kept[1]
        # Nothing is sent twice: torch stops recomputing before the sum at the end of a block, which nobody reads again.
        assert sent["True"] == sent["False"]


def a_loop(unused: Any = None) -> list[float]:
    torch.manual_seed(0)
    parallel = autopar.parallelize(Model(True), "dp=2", (torch.ones(4, 6, 8),), layout=REGATHERED)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
    losses = []
    for _ in range(4):
        loss = parallel(torch.ones(4, 6, 8))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def test_losses_fall() -> None:
    for losses in launch(a_loop, ranks=2):
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < losses[0]
