"""Models of published sizes on the meta device: architectures of transformers, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

from examples.llama3_8b import llama3_8b

ModelAndInputs = tuple[nn.Module, dict[str, torch.Tensor]]

# Sizes of Llama 3: layers, and the config entries that differ from those of 8B.
SHAPES: dict[str, tuple[int, dict[str, Any]]] = {
    "8b": (32, {}),
    "70b": (80, {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}),
    "405b": (126, {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128}),
}
MIXTRAL_8X22B: dict[str, Any] = {
    "vocab_size": 32768,
    "hidden_size": 6144,
    "intermediate_size": 16384,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 65536,
}
# Three layers of attention among 29 of Mamba-2.
BAMBA_9B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attn_layer_indices": [9, 18, 27],
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_chunk_size": 256,
}
VIT_HUGE: dict[str, Any] = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_attention_heads": 16,
    "patch_size": 14,
    "num_labels": 1000,
}
RESNET: dict[str, Any] = {"num_labels": 1000}
T5_11B: dict[str, Any] = {
    "decoder_start_token_id": 0,
    "d_model": 1024,
    "d_ff": 65536,
    "d_kv": 128,
    "num_heads": 128,
    "dropout_rate": 0.0,
}


def causal_lm(family: str, layers: int, batch: int, seq: int, shape: dict[str, Any]) -> ModelAndInputs:
    """Return a decoder of that family, with its loss; `shape` has the config entries that are not the defaults."""
    if family == "Llama":
        return llama3_8b(layers, batch, seq, loss=True, **shape)
    config = getattr(transformers, f"{family}Config")
    with torch.device("meta"):
        made = config(num_hidden_layers=layers, use_cache=False, **shape)
        model = getattr(transformers, f"{family}ForCausalLM")(made)
        ids = torch.zeros(batch, seq, dtype=torch.int64)
    return model, {"input_ids": ids, "labels": ids}


def vit_huge(layers: int, batch: int) -> ModelAndInputs:
    config = transformers.ViTConfig(num_hidden_layers=layers, **VIT_HUGE)
    with torch.device("meta"):
        return transformers.ViTForImageClassification(config), _images(batch)


def resnet152(layers: int, batch: int) -> ModelAndInputs:
    """Return the network with so many layers in its third stage, 36 in the published one."""
    config = transformers.ResNetConfig(depths=[3, 8, layers, 3], **RESNET)
    with torch.device("meta"):
        return transformers.ResNetForImageClassification(config), _images(batch)


def t5_11b(layers: int, batch: int) -> ModelAndInputs:
    """Return the model with so many layers in the encoder, and as many in the decoder."""
    config = transformers.T5Config(num_layers=layers, use_cache=False, **T5_11B)
    with torch.device("meta"):
        ids = torch.zeros(batch, 512, dtype=torch.int64)
        return transformers.T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids}


def _images(batch: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.zeros(batch, 3, 224, 224), "labels": torch.zeros(batch, dtype=torch.int64)}


@dataclass(frozen=True)
class PublishedModel:
    """Model with its published number of layers, and the samples that each device of a cluster trains it on."""

    make: Callable[[int, int], ModelAndInputs]
    layers: int
    samples: int = 1
    # The model routes tokens to experts.
    has_experts: bool = False

    def made(self, layers: int | None, batch: int, dtype: torch.dtype) -> ModelAndInputs:
        """Return the model with weights of `dtype`; without `layers`, all of them."""
        torch.set_default_dtype(dtype)
        try:
            return self.make(layers or self.layers, batch)
        finally:
            torch.set_default_dtype(torch.float32)


def _decoder(family: str, layers: int, seq: int, shape: dict[str, Any], has_experts: bool = False) -> PublishedModel:
    return PublishedModel(
        lambda count, batch: causal_lm(family, count, batch, seq, shape), layers, has_experts=has_experts
    )


LLAMAS = {shape: _decoder("Llama", layers, 8192, entries) for shape, (layers, entries) in SHAPES.items()}
MODELS = {
    **{f"llama-3-{shape}": model for shape, model in LLAMAS.items()},
    "mixtral-8x22b": _decoder("Mixtral", 56, 4096, MIXTRAL_8X22B, has_experts=True),
    # The sizes of DeepSeek-V3 are the defaults of its config.
    "deepseek-v3": _decoder("DeepseekV3", 61, 4096, {}, has_experts=True),
    "vit-h14": PublishedModel(vit_huge, 32, samples=32),
    "resnet-152": PublishedModel(resnet152, 36, samples=64),
    "t5-11b": PublishedModel(t5_11b, 24, samples=8),
    "bamba-9b": _decoder("Bamba", 32, 4096, BAMBA_9B),
}
