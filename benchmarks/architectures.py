"""The architectures that autopar is measured on: names for `examples/hf.py`."""

from __future__ import annotations


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Every op of these has a rule in the table, and all standard dims are found by structure.
STANDARD = _names(
    "gpt2 llama mistral qwen3 gemma2 phi3 bert deberta-v2 t5 bart vit swin resnet convnext whisper wav2vec2 clip"
)
