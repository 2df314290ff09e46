"""A vision transformer in plain PyTorch, without code for parallelism.

`vit()` is small and on the CPU. ViT-L/16, without its memory, is
`vit(layers=24, d_model=1024, heads=16, side=224, patch=16, classes=1000, batch=256, device="meta")`.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(d_model)
        self.q, self.k, self.v, self.out = (nn.Linear(d_model, d_model) for _ in range(4))
        self.mlp_norm = nn.LayerNorm(d_model)
        self.up = nn.Linear(d_model, 4 * d_model)
        self.down = nn.Linear(4 * d_model, d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.attention_norm(x)
        q, k, v = (part(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        attended = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + self.down(functional.gelu(self.up(self.mlp_norm(x))))


class ViT(nn.Module):
    def __init__(self, layers: int, d_model: int, heads: int, side: int, patch: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, d_model, kernel_size=patch, stride=patch)
        self.positions = nn.Parameter(torch.randn((side // patch) ** 2, d_model) * 0.02)
        self.blocks = nn.ModuleList(Block(d_model, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """The class scores, or the loss when the labels are given."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x).mean(dim=1))
        return scores if labels is None else functional.cross_entropy(scores, labels)


def vit(
    layers: int = 2,
    d_model: int = 48,
    heads: int = 4,
    side: int = 32,
    patch: int = 8,
    classes: int = 10,
    batch: int = 6,
    loss: bool = True,
    device: str = "cpu",
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model and its inputs; without `loss`, the model returns class scores."""
    with torch.device(device):
        model = ViT(layers, d_model, heads, side, patch, classes)
        images, labels = torch.randn(batch, 3, side, side), torch.randint(classes, (batch,))
    return model, {"images": images, "labels": labels} if loss else {"images": images}
