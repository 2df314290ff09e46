"""A multi-layer perceptron: the smallest thing worth splitting.

`d_ff -> tp` on a pair of linears needs one all-reduce and no more.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class MLP(nn.Module):
    def __init__(self, layers: int, d_model: int, d_ff: int, dropout: float) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(d_model, d_ff) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(d_ff, d_model) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + self.dropout(down(functional.gelu(up(x))))
        return x if target is None else functional.mse_loss(x, target)


def mlp(
    layers: int = 2,
    d_model: int = 48,
    d_ff: int = 80,
    batch: int = 6,
    dropout: float = 0.0,
    loss: bool = False,
    device: str = "cpu",
) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The model and its inputs; with `loss`, the model returns the loss against a target."""
    with torch.device(device):
        model = MLP(layers, d_model, d_ff, dropout)
        x, target = torch.randn(batch, d_model), torch.randn(batch, d_model)
    return model, (x, target) if loss else (x,)
