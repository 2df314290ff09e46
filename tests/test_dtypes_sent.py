"""Values of every dtype, split, gathered and exchanged on simulated ranks, which send what Gloo sends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.tracing.trace import trace
from tests.ranks import difference


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Any:
        y = (x * 100).to(self.dtype)
        return y.clone(), y.unsqueeze(0).transpose(1, 2).clone()


DTYPES = (
    torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    torch.complex64, torch.complex128,
)  # fmt: skip
LAYOUTS = {
    "gathered": "batch -> a; * -> none",
    "exchanged": "@/clone[batch -> a, features -> none]; @/clone.1[batch -> none, features -> a]; * -> none",
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_sent(dtype: torch.dtype, layout: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6, dtype=torch.float64)
    graph = trace(Cast(dtype), (x,), dims={"x": "batch features"})
    assert difference(graph, LAYOUTS[layout], {"a": 2}, [x]) <= 1e-15  # the loss is summed in another order
