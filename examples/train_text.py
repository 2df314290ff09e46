"""Train a small language model on one process or many: a script to start from, which needs nothing beside it.

    python train_text.py                                                    # one process, no autopar
    torchrun --nproc-per-node 4 train_text.py --mesh dp=2,tp=2              # four processes, autopar searches the plan
    torchrun --nproc-per-node 4 train_text.py --mesh dp=4 --layout fsdp     # a published strategy

The plan, and a comparison with one process, without training:

    autopar plan train_text.py:language_model --mesh dp=2,tp=2
    autopar verify train_text.py:language_model --mesh dp=2,tp=2 --layout megatron
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import autopar


class Block(nn.Module):
    """Causal attention and two linears, each with a norm and a residual."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.up, self.down = nn.Linear(d_model, 4 * d_model), nn.Linear(4 * d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, d_model = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, seq, 3, self.heads, d_model // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, seq, d_model))
        return x + self.down(functional.gelu(self.up(self.mlp_norm(x))))


class LanguageModel(nn.Module):
    """The loss of predicting each next character: plain PyTorch, without code for parallelism."""

    def __init__(self, layers: int, d_model: int, heads: int, vocab: int, positions: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, d_model), nn.Embedding(positions, d_model)
        self.blocks = nn.ModuleList(Block(d_model, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d_model), nn.Linear(d_model, vocab, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def language_model(
    layers: int = 2,
    d_model: int = 64,
    heads: int = 4,
    vocab: int = 128,
    seq: int = 64,
    batch: int = 16,
    device: str = "cpu",
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the model and a batch: a TARGET of `autopar plan`, `autopar verify` and others."""
    with torch.device(device):
        return LanguageModel(layers, d_model, heads, vocab, seq), draw(batch, seq)


def draw(batch: int = 16, seq: int = 64) -> dict[str, Tensor]:
    """Return pieces of this file's own text, as numbers below 128; replace it with your data."""
    codes = torch.tensor([min(ord(character), 127) for character in Path(__file__).read_text(encoding="utf-8")])
    starts = torch.randint(len(codes) - seq - 1, (batch, 1))
    pieces = codes[starts + torch.arange(seq + 1)]
    return {"ids": pieces[:, :-1].contiguous(), "targets": pieces[:, 1:].contiguous()}


def main() -> None:
    """Train, and print the loss."""
    options = parse()
    torch.manual_seed(0)  # all processes make the same model and draw the same batches
    model, inputs = language_model()
    if options.mesh is not None:
        model = autopar.parallelize(model, options.mesh, inputs, layout=options.layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(options.steps):
        optimizer.zero_grad()
        loss = model(**draw())
        loss.backward()
        optimizer.step()
        if (step % 10 == 0 or step == options.steps - 1) and int(os.environ.get("RANK", "0")) == 0:
            print(f"step {step:4}  loss {loss.item():.4f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", help="as many ranks as processes: dp=2,tp=2; without it one process trains alone")
    parser.add_argument("--layout", help="a strategy, a .lay file or a layout; without it autopar searches")
    parser.add_argument("--steps", type=int, default=50)
    return parser.parse_args()


if __name__ == "__main__":
    main()
