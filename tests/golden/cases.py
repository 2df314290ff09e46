"""The named graphs whose whole text is kept: the examples, and one encoder of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from examples.custom_op import custom_op
from examples.gpt import gpt
from examples.hf import hf
from examples.llama3_8b import llama3_8b
from examples.mlp import mlp
from examples.moe import moe
from examples.resnet import resnet

__all__ = ["CASES", "FOLDER"]

FOLDER = Path(__file__).parent

CASES: Mapping[str, Callable[[], Any]] = {
    "mlp": mlp,
    "gpt": gpt,
    "llama3_8b": lambda: llama3_8b(layers=3),
    "resnet": resnet,
    "moe": moe,
    "custom_op": custom_op,
    "bert": lambda: hf("bert"),
}
