"""A GPT of any size in plain PyTorch, without code for parallelism.

`gpt()` is small and on the CPU. GPT-2 XL, without its memory, is
`gpt(layers=48, d_model=1600, heads=25, vocab=50257, seq=1024, batch=8, device="meta")`.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Attention(nn.Module):
    def __init__(self, d_model: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, d_model = x.shape
        qkv = self.qkv(x).view(batch, seq, 3, self.heads, d_model // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, seq, d_model))


class Block(nn.Module):
    def __init__(self, d_model: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(d_model)
        self.attention = Attention(d_model, heads, dropout)
        self.mlp_norm = nn.LayerNorm(d_model)
        self.up = nn.Linear(d_model, 4 * d_model)
        self.down = nn.Linear(4 * d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.mlp_norm(x)))))


class GPT(nn.Module):
    def __init__(self, layers: int, d_model: int, heads: int, vocab: int, positions: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, d_model)
        self.positions = nn.Embedding(positions, d_model)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(d_model, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, vocab, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(initialise)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """The logits, or the loss when the targets are given."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.dropout(self.tokens(ids) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def gpt(
    layers: int = 2,
    d_model: int = 48,
    heads: int = 4,
    vocab: int = 101,
    seq: int = 10,
    batch: int = 6,
    dropout: float = 0.0,
    loss: bool = True,
    device: str = "cpu",
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model and its inputs; without `loss`, the model returns logits."""
    with torch.device(device):
        model = GPT(layers, d_model, heads, vocab, positions=seq, dropout=dropout)
        ids, targets = torch.randint(vocab, (batch, seq)), torch.randint(vocab, (batch, seq))
    return model, {"ids": ids, "targets": targets} if loss else {"ids": ids}
