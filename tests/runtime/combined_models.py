"""Small models with a loss for combinations of features: random weights, batches of any size, names of their dims."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.gpt import gpt
from examples.hf import hf
from examples.lora_llama import lora_llama
from examples.moe import moe
from examples.resnet import resnet

__all__ = ["MODELS", "SEQ", "Inputs", "SmallModel", "batch_of", "loss_of"]

SEQ, VOCAB, CLASSES = 16, 112, 8

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class SmallModel:
    """A model by its maker, its batches, and what is known of it."""

    make: Callable[[], nn.Module]
    # Batch size and length to inputs.
    batch: Callable[[int, int], Inputs]
    dims: tuple[str, ...]
    layers: str | None = None
    # The layers of attention can be folded, and the head and the loss run in pieces.
    is_causal: bool = False
    # Tokens are routed: rounding may route them otherwise.
    has_experts: bool = False
    # The batch has statistics, which no micro-batch has.
    has_batch_statistics: bool = False
    # Rows go to experts, by products that have no kernel in float64.
    routes_rows: bool = False
    generates: bool = False
    # Computes in float32 inside, whatever its dtype.
    is_float32: bool = True
    has_length: bool = True


def _tokens(batch: int, seq: int) -> Inputs:
    """Ids and labels, a part of which does not count: another part of each row."""
    ids = torch.randint(5, VOCAB, (batch, seq))
    labels = torch.randint(5, VOCAB, (batch, seq))
    labels[torch.rand(batch, seq) < torch.rand(batch, 1) * 0.8] = -100
    labels[:, 1] = 7
    return {"input_ids": ids, "labels": labels}


def _ids(batch: int, seq: int) -> Inputs:
    found = _tokens(batch, seq)
    return {"ids": found["input_ids"], "targets": found["labels"]}


def _images(side: int, name: str = "pixel_values") -> Callable[[int, int], Inputs]:
    return lambda batch, seq: {name: torch.randn(batch, 3, side, side), "labels": torch.randint(CLASSES, (batch,))}


def _of_hf(architecture: str, **config: Any) -> Callable[[], nn.Module]:
    return lambda: hf(architecture, batch=2, seq=2 * SEQ, vocab_size=VOCAB, **config)[0]


class Mixed(nn.Module):
    """Loss and logits; a buffer that counts, a weight that two ops read, a value that both halves of a model read."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, 32)
        self.mix = nn.Parameter(torch.randn(32) * 0.5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, VOCAB)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = first = self.table(input_ids) * self.mix
        for block in self.blocks:
            x = x + block(self.norm(x))
        logits = self.head(x * torch.sigmoid(first) * self.mix)
        each = functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
        counts = labels.flatten() >= 0
        if self.training:
            self.seen = self.seen + counts.sum()
        return {"loss": (each * counts).sum() / counts.sum(), "logits": logits}


def _moe_batch(batch: int, seq: int) -> Inputs:
    return {"ids": torch.randint(VOCAB, (batch, seq)), "targets": torch.randint(VOCAB, (batch, seq))}


WORDS = ("batch", "seq", "d_model", "d_ff", "vocab")
HEADS = (*WORDS, "heads", "head_dim")
GROUPS = (*HEADS, "kv_heads")
LAYERS = "model.layers.*"

MODELS: Mapping[str, SmallModel] = {
    "gpt": SmallModel(
        lambda: gpt(d_model=32, vocab=VOCAB, seq=2 * SEQ)[0],
        _ids,
        HEADS,
        "blocks.*",
        is_causal=True,
        is_float32=False,
    ),
    "mixed": SmallModel(Mixed, _tokens, WORDS, "blocks.*"),
    "llama": SmallModel(_of_hf("llama"), _tokens, GROUPS, LAYERS, is_causal=True, generates=True),
    "gpt2": SmallModel(
        _of_hf("gpt2", attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0),
        _tokens,
        HEADS,
        "transformer.h.*",
        is_causal=True,
        generates=True,
    ),
    "qwen3": SmallModel(_of_hf("qwen3"), _tokens, GROUPS, LAYERS, is_causal=True, generates=True),
    "gemma2": SmallModel(_of_hf("gemma2", num_hidden_layers=4), _tokens, GROUPS, LAYERS, generates=True),
    "lora": SmallModel(lambda: lora_llama(seq=SEQ)[0], _tokens, (*GROUPS, "low_rank"), LAYERS, is_causal=True),
    "mixtral": SmallModel(
        _of_hf("mixtral"), _tokens, (*GROUPS, "expert"), LAYERS, is_causal=True, has_experts=True, routes_rows=True
    ),
    "qwen3_moe": SmallModel(
        _of_hf("qwen3_moe"),
        _tokens,
        (*GROUPS, "expert"),
        LAYERS,
        is_causal=True,
        has_experts=True,
        routes_rows=True,
        generates=True,
    ),
    "deepseek_v3": SmallModel(
        _of_hf("deepseek_v3", num_hidden_layers=3),
        _tokens,
        (*HEADS, "expert", "low_rank"),
        LAYERS,
        is_causal=True,
        has_experts=True,
        routes_rows=True,
    ),
    "gshard": SmallModel(
        lambda: moe(d_model=32, vocab=VOCAB)[0],
        _moe_batch,
        (*HEADS, "expert"),
        "blocks.*",
        has_experts=True,
        is_float32=False,
    ),
    "bert": SmallModel(
        _of_hf("bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
        _tokens,
        HEADS,
        "bert.encoder.layer.*",
        is_float32=False,
    ),
    "t5": SmallModel(
        _of_hf("t5", decoder_start_token_id=0, dropout_rate=0.0, num_layers=3, num_decoder_layers=3),
        _tokens,
        HEADS,
        "decoder.block.*",
    ),
    "vit": SmallModel(
        lambda: hf("vit", num_labels=CLASSES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)[0],
        _images(32),
        ("batch", "d_model", "heads", "d_ff", "height", "width"),
        "vit.layers.*",
        has_length=False,
        is_float32=False,
    ),
    "resnet": SmallModel(
        lambda: resnet(width=4, image=64, classes=CLASSES, batch=2)[0],
        _images(64, "images"),
        ("batch", "channels", "height", "width"),
        has_batch_statistics=True,
        has_length=False,
        is_float32=False,
    ),
    "jamba": SmallModel(_of_hf("jamba"), _tokens, (*WORDS, "expert"), has_experts=True, routes_rows=True),
    "bamba": SmallModel(_of_hf("bamba"), _tokens, HEADS, LAYERS),
    "granitemoehybrid": SmallModel(
        _of_hf("granitemoehybrid"), _tokens, (*HEADS, "expert"), LAYERS, has_experts=True, routes_rows=True
    ),
}


def loss_of(found: Any, kind: str = "own") -> Tensor:
    """The scalar of what a model returns: its loss, one of its logits outside of the model, or both."""
    loss: Tensor = found if isinstance(found, Tensor) else found["loss"]
    if kind == "own":
        return loss
    logits = found["logits"]
    outside: Tensor = logits.to(torch.promote_types(logits.dtype, torch.float32)).square().mean()
    return outside if kind == "logits" else loss + 0.5 * outside


def batch_of(model: SmallModel, draw: random.Random, batch: int, seq: int, dtype: torch.dtype) -> Inputs:
    """A batch of a seed of its own; floating inputs in the dtype of the model."""
    with torch.random.fork_rng():
        torch.manual_seed(draw.randrange(2**31))
        found = model.batch(batch, seq)
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in found.items()}
