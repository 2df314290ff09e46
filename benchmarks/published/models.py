"""Decoders of any size, as the published runs had them, cut into the stages of a pipeline.

One class has both families: GPT (Megatron-LM, and llm-foundry's MPT) and Llama (nanotron). A stage has the embedding if
it is the first, the head and the loss if it is the last, and any number of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Decoder", "Stage", "padded_vocab", "stage_inputs", "stage_model", "stage_names"]

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
    fused_attention: bool = True
    """Attention in one kernel; else the scores are written out."""
    dropout: float = 0.0
    dtype: torch.dtype = torch.bfloat16

    @property
    def block_parameters(self) -> int:
        """Of one block; what is as small as a bias is left out."""
        matrices = 3 if self.family == "llama" else 2
        return 4 * self.d_model**2 + matrices * self.d_model * self.d_ff

    @property
    def parameters(self) -> int:
        tables = 1 if self.tied else 2
        return self.layers * self.block_parameters + tables * self.vocab * self.d_model


@dataclass(frozen=True)
class Stage:
    """A part of a decoder: the blocks of one stage of a pipeline, with what stands before and after them."""

    decoder: Decoder
    layers: int
    first: bool = True
    last: bool = True


class Attention(nn.Module):
    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder
        bias = decoder.family == "gpt"
        self.qkv = nn.Linear(decoder.d_model, 3 * decoder.d_model, bias=bias)
        self.out = nn.Linear(decoder.d_model, decoder.d_model, bias=bias)
        # In place of rotary positions: one kernel that reads and writes what theirs does, and saves nothing.
        self.register_buffer("rotary", torch.ones(decoder.seq, decoder.d_model // decoder.heads))

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, d_model = x.shape
        heads = self.decoder.heads
        qkv = self.qkv(x).view(batch, seq, 3, heads, d_model // heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        if self.decoder.family == "llama":
            q, k = q * self.rotary, k * self.rotary
        y = self._attend(q, k, v).transpose(1, 2).reshape(batch, seq, d_model)
        return self.out(y)

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
        self.up = nn.Linear(decoder.d_model, decoder.d_ff, bias=bias)
        if decoder.family == "llama":
            self.gate = nn.Linear(decoder.d_model, decoder.d_ff, bias=False)
        self.down = nn.Linear(decoder.d_ff, decoder.d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        dropout = self.decoder.dropout
        x = x + functional.dropout(self.attention(self.attention_norm(x)), dropout)
        y = self.mlp_norm(x)
        inner = functional.silu(self.gate(y)) * self.up(y) if self.decoder.family == "llama" else self._gelu(y)
        return x + functional.dropout(self.down(inner), dropout)

    def _gelu(self, y: Tensor) -> Tensor:
        return functional.gelu(self.up(y))


def norm_of(decoder: Decoder) -> nn.Module:
    """LayerNorm for all of them: nanotron's RMSNorm too is one kernel that saves its input and one number per token."""
    return nn.LayerNorm(decoder.d_model, bias=decoder.family == "gpt")


class StageModel(nn.Module):
    """Tokens or the stream in; the stream or the loss out."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        decoder = stage.decoder
        self.stage = stage
        if stage.first:
            self.tokens = nn.Embedding(decoder.vocab, decoder.d_model)
            if decoder.family == "gpt":
                self.positions = nn.Embedding(decoder.seq, decoder.d_model)
        self.blocks = nn.ModuleList(Block(decoder) for _ in range(stage.layers))
        if stage.last:
            self.norm = norm_of(decoder)
            self.head = nn.Linear(decoder.d_model, decoder.vocab, bias=False)
            if stage.first and decoder.tied:
                self.head.weight = self.tokens.weight

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        if self.stage.first:
            ids = x
            x = self.tokens(ids)
            if self.stage.decoder.family == "gpt":
                x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        if targets is None:
            return x
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def padded_vocab(vocab: int, tp: int) -> int:
    """Megatron-LM rounds the vocabulary up, so that each rank has a multiple of 128 rows."""
    return -(-vocab // (128 * tp)) * 128 * tp


def stage_names(stage: Stage) -> dict[str, str]:
    """The names of dims that the part alone does not show."""
    return {"head.weight": "vocab d_model"} if stage.last else {}


def stage_model(stage: Stage) -> nn.Module:
    """The stage on the meta device."""
    with torch.device("meta"):
        return StageModel(stage).to(stage.decoder.dtype)


def stage_inputs(stage: Stage, batch: int) -> dict[str, Tensor]:
    """Its inputs for a whole micro-batch of all data-parallel ranks."""
    decoder = stage.decoder
    with torch.device("meta"):
        ids = torch.zeros(batch, decoder.seq, dtype=torch.int64)
        stream = torch.zeros(batch, decoder.seq, decoder.d_model, dtype=decoder.dtype, requires_grad=True)
    inputs = {"x": ids if stage.first else stream}
    return inputs | {"targets": ids} if stage.last else inputs
