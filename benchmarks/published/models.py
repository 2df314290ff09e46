"""Decoders of any size, as the published runs had them.

One class has both families: GPT (Megatron-LM, and llm-foundry's MPT) and Llama (nanotron).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Decoder", "decoder_inputs", "decoder_model", "padded_vocab"]

Family = Literal["gpt", "llama"]


@dataclass(frozen=True)
class Decoder:
    """The sizes of a model, and what its authors' code does in ways that cost time or memory."""

    family: Family
    layers: int
    d_model: int
    heads: int
    d_ff: int
    vocab: int
    seq: int
    tied: bool = True
    # Attention in one kernel; else the scores are written out.
    fused_attention: bool = True
    dropout: float = 0.0
    dtype: torch.dtype = torch.bfloat16

    @property
    def block_parameters(self) -> int:
        """Parameters of one block; biases and norms are left out."""
        matrices = 3 if self.family == "llama" else 2
        return 4 * self.d_model**2 + matrices * self.d_model * self.d_ff

    @property
    def parameters(self) -> int:
        tables = 1 if self.tied else 2
        return self.layers * self.block_parameters + tables * self.vocab * self.d_model


class Attention(nn.Module):
    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder
        bias = decoder.family == "gpt"
        self.qkv = nn.Linear(decoder.d_model, 3 * decoder.d_model, bias=bias)
        self.out = nn.Linear(decoder.d_model, decoder.d_model, bias=bias)
        # In place of rotary positions: one kernel that reads and writes what theirs does, and saves nothing.
        self.rotary: Tensor
        self.register_buffer("rotary", torch.ones(decoder.seq, 1, decoder.d_model // decoder.heads))

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, d_model = x.shape
        heads = self.decoder.heads
        qkv = self.qkv(x).view(batch, seq, 3, heads, d_model // heads)
        if self.decoder.family == "llama":
            q, k, v = self._laid_out(qkv)
        else:
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = self._attend(q, k, v).transpose(1, 2).reshape(batch, seq, d_model)
        found: Tensor = self.out(y)
        return found

    def _laid_out(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As nanotron does it (`CausalSelfAttention` in its models/llama.py): each `contiguous` and `cat` is a copy."""
        q, k, v = qkv.permute(2, 0, 1, 3, 4).contiguous().unbind(0)
        q, k = q * self.rotary, k * self.rotary
        kv = torch.cat([k.unsqueeze(0), v.unsqueeze(0)])
        k, v = kv.permute(1, 2, 0, 3, 4).contiguous().unbind(2)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.decoder.fused_attention:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-2, -1))
        weights = functional.dropout(torch.softmax(scores, -1), self.decoder.dropout)
        return torch.matmul(weights, v)


class Block(nn.Module):
    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder
        bias = decoder.family == "gpt"
        self.attention_norm = norm_of(decoder)
        self.attention = Attention(decoder)
        self.mlp_norm = norm_of(decoder)
        inner = 2 * decoder.d_ff if decoder.family == "llama" else decoder.d_ff
        self.up = nn.Linear(decoder.d_model, inner, bias=bias)
        self.down = nn.Linear(decoder.d_ff, decoder.d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        dropout = self.decoder.dropout
        x = x + functional.dropout(self.attention(self.attention_norm(x)), dropout)
        y = self.mlp_norm(x)
        inner = self._gated(self.up(y)) if self.decoder.family == "llama" else functional.gelu(self.up(y))
        return x + functional.dropout(self.down(inner), dropout)

    def _gated(self, y: Tensor) -> Tensor:
        """Both halves come from one product, so their gradients are put together by a copy."""
        gate, up = y.view(*y.shape[:-1], 2, self.decoder.d_ff).unbind(-2)
        return functional.silu(gate) * up


def norm_of(decoder: Decoder) -> nn.Module:
    """LayerNorm for all of them: nanotron's RMSNorm too is one kernel that saves its input and one number per token."""
    return nn.LayerNorm(decoder.d_model, bias=decoder.family == "gpt")


class DecoderModel(nn.Module):
    """Tokens in, the loss out."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.tokens = nn.Embedding(decoder.vocab, decoder.d_model)
        self.positions = nn.Embedding(decoder.seq, decoder.d_model) if decoder.family == "gpt" else None
        self.blocks = nn.ModuleList(Block(decoder) for _ in range(decoder.layers))
        self.norm = norm_of(decoder)
        self.head = nn.Linear(decoder.d_model, decoder.vocab, bias=False)
        if decoder.tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def padded_vocab(vocab: int, tp: int) -> int:
    """Megatron-LM rounds the vocabulary up, so that each rank has a multiple of 128 rows."""
    return -(-vocab // (128 * tp)) * 128 * tp


def decoder_model(decoder: Decoder) -> nn.Module:
    """Return the model on the meta device."""
    with torch.device("meta"):
        return DecoderModel(decoder).to(decoder.dtype)


def decoder_inputs(decoder: Decoder, batch: int) -> dict[str, Tensor]:
    """Return its inputs for a whole micro-batch of all data-parallel ranks."""
    with torch.device("meta"):
        ids = torch.zeros(batch, decoder.seq, dtype=torch.int64)
    return {"ids": ids, "targets": ids}
