"""A model with an op of its own, and the one line that tells autopar how to split it.

Without `register_rule` autopar finds the same rule by running the op on small tensors, and says so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import autopar


@torch.library.custom_op("mylib::squared_relu", mutates_args=())
def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """Imagine a kernel here that PyTorch knows nothing about."""
    return x.relu().square()


@squared_relu.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def save(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    return 2 * x.relu() * gradient


squared_relu.register_autograd(backward, setup_context=save)


class Model(nn.Module):
    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.up = nn.Linear(d_model, d_ff)
        self.down = nn.Linear(d_ff, d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(squared_relu(self.up(self.norm(x))))


def custom_op(
    d_model: int = 48, d_ff: int = 80, batch: int = 6, seq: int = 10, device: str = "cpu"
) -> tuple[nn.Module, tuple[torch.Tensor]]:
    """The model and its inputs; the op acts on each element, so all its dims may be split."""
    autopar.register_rule("mylib::squared_relu", "b s d -> b s d")
    with torch.device(device):
        return Model(d_model, d_ff), (torch.randn(batch, seq, d_model),)
