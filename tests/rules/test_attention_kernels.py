"""Kernels of GPUs for parts of attention: which one takes a part, and the shapes that it is given and gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.rules.shard_call.attention_kernels import BACKWARD, FORWARD, KeyRange

CUDNN, FLASH = "_scaled_dot_product_cudnn_attention", "_flash_attention_forward"
# Rows, keys, and the part that they are.
PARTS = {
    "keys before": (4, 12, KeyRange(((0, 12, False),)), CUDNN),
    "own square": (4, 4, KeyRange(((0, 4, False),), causal=True), CUDNN),
    "last rows": (4, 12, KeyRange(((0, 12, False),), causal=True), FLASH),
    "window": (4, 6, KeyRange(((0, 6, False),), causal=True, window=3), FLASH),
}


class Kernels(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "attention" in str(func):
            self.seen.append(str(func).split(".")[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", PARTS)
def test_cudnn_takes_what_it_can(name: str) -> None:
    """On the meta device: heads of 32, of which two share a head of keys."""
    rows, keys, part, kernel = PARTS[name]
    q, k, v = (_meta(heads, count) for heads, count in ((4, rows), (2, keys), (2, keys)))
    with Kernels() as found:
        result, sums = FORWARD["cudnn"](q, k, v, part, 0.5)
        gradients = BACKWARD["cudnn"](result, q, k, v, result, sums, part, 0.5)
    backward = kernel.replace("_forward", "") + "_backward"
    assert found.seen == [kernel, backward]
    assert (result.shape, sums.shape) == (q.shape, q.shape[:-1])
    assert [one.shape for one in gradients] == [q.shape, k.shape, v.shape]


def _meta(heads: int, rows: int) -> Tensor:
    return torch.empty(1, heads, rows, 32, dtype=torch.bfloat16, device="meta")
