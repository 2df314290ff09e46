"""Causal attention whose queries are split over ranks: nothing of the size of the scores, and what one process gets."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from tests.masks import Masks
from tests.runtime.launcher import launch

ROWS, HEADS, GROUPS, WIDTH = 48, 4, 2, 8
DIMS = {"x": "batch seq d_model"}


class Block(nn.Module):
    """Grouped causal attention; queries, keys and values are used a second time."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(HEADS * WIDTH, HEADS * WIDTH)
        self.kv = nn.Linear(HEADS * WIDTH, 2 * GROUPS * WIDTH)
        self.back = nn.Linear(GROUPS * WIDTH, HEADS * WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, (k, v) = self.q(x), self.kv(x).chunk(2, -1)
        q_heads, k_heads, v_heads = (y.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for y in (q, k, v))
        mixed = functional.scaled_dot_product_attention(
            q_heads, k_heads, v_heads, is_causal=True, scale=0.4, enable_gqa=True
        )
        return x + mixed.transpose(1, 2).flatten(2) + q.tanh() + self.back(k * v)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


LAYOUTS = {
    "a=2": ["seq -> a; * -> none", "seq -> a; recompute full @blocks.*; * -> none"],
    "a=2,b=2": [
        "seq -> a*b; * -> none",
        "batch -> a; seq -> b; * -> none",
        "seq -> a*b; recompute selective @blocks.*; * -> none",
    ],
}


def compare(mesh: str, layout: str, rows: int, dtype: torch.dtype, backend: str | None) -> tuple[float, int, int, str]:
    """The largest difference from one process, the largest tensors that are made, and the code."""
    torch.manual_seed(4)
    model = Model().to(dtype)
    x = torch.randn(2, rows, HEADS * WIDTH, dtype=dtype)
    given = copy.deepcopy(model)
    parallel = autopar.parallelize(given, mesh, (x,), layout=layout, dims=DIMS, outputs="full")
    call: Any = torch.compile(parallel, backend=backend) if backend else parallel
    made = Masks()
    expected = model(x)
    expected.square().sum().backward()
    with made:
        found = call(x)
        found.square().sum().backward()
    pairs = [(expected, found)]
    for name, parameter in model.named_parameters():
        gradient: Any = parallel.get_parameter(name).grad
        pairs.append((parameter.grad, gradient.full_tensor()))
    worst = max(float((one - other).detach().abs().max() / one.detach().abs().max()) for one, other in pairs)
    return worst, made.truths, made.numel, parallel.code


def compare_all(mesh: str, rows: int) -> list[tuple[float, int, int, str]]:
    return [compare(mesh, layout, rows, torch.float64, None) for layout in LAYOUTS[mesh]]


@pytest.mark.parametrize("mesh", LAYOUTS)
def test_split_queries_make_no_mask(mesh: str) -> None:
    ranks = {"a=2": 2, "a=2,b=2": 4}[mesh]
    for found in launch(compare_all, mesh, 192, ranks=ranks):
        for layout, (worst, truths, _, code) in zip(LAYOUTS[mesh], found, strict=True):
            assert worst < 3e-15, (layout, worst)
            assert truths < 192 * 192 // ranks, (layout, truths)
            assert "bool" not in code
            assert "_split" in code


def compare_uneven() -> list[tuple[float, int, int, str]]:
    """Seven queries over four ranks are 2, 2, 2 and 1; five are 2, 2, 1 and none."""
    layout = "seq -> a*b pad; * -> none"
    return [compare("a=2,b=2", layout, rows, torch.float64, None) for rows in (7, 5)]


def test_uneven_and_empty_shards() -> None:
    for found in launch(compare_uneven, ranks=4):
        assert max(worst for worst, *_ in found) < 3e-15


def compare_compiled() -> list[tuple[float, int, int, str]]:
    layouts = LAYOUTS["a=2"]
    return [compare("a=2", layout, ROWS, torch.float64, "aot_eager") for layout in layouts]


def test_compiled() -> None:
    for found in launch(compare_compiled, ranks=2):
        assert max(worst for worst, *_ in found) < 3e-15


def compare_short() -> tuple[float, int, int, str]:
    return compare("a=2", LAYOUTS["a=2"][0], ROWS, torch.bfloat16, None)


def test_bfloat16() -> None:
    for worst, *_ in launch(compare_short, ranks=2):
        assert worst < 0.03
