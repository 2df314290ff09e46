"""Llama-3-8B from transformers, on the meta device: the real sizes, and no memory for the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


def llama3_8b(
    layers: int = 32, batch: int = 16, seq: int = 8192, device: str = "meta", loss: bool = False, **shape: Any
) -> tuple[LlamaForCausalLM, dict[str, torch.Tensor]]:
    """The model and its inputs; with `loss`, the labels are given too; `shape`: what in the config is not as in 8B."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "rms_norm_eps": 1e-5,
        "use_cache": False,
    }
    config = LlamaConfig(**{**sizes, **shape}, num_hidden_layers=layers)
    with torch.device(device):
        model = LlamaForCausalLM(config)
        ids = torch.randint(config.vocab_size, (batch, seq))
    return model, {"input_ids": ids, "labels": ids} if loss else {"input_ids": ids}
