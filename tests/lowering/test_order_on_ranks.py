"""All ranks send in one order, whatever the order in which Python goes through a set on each of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.lowering.emit import emit
from autopar.lowering.verify import order_of_messages
from autopar.mesh import SubMesh
from autopar.sharding.layout.language import parse_layout
from autopar.sharding.propagation import propagate
from tests.ranks import difference_of, on_ranks

WIDTH = 8


class Layer(nn.Module):
    """Products with values of parameters, which are gathered before a loop over micro-batches, each by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ self.first.exp() + x @ self.second.cos())
        return x + hidden @ self.third.sin()


class Stack(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


ROWS = "seq -> b*a; f -> b | none !1; * -> none"
LAYOUTS = {
    "recomputed": f"micro 2; recompute full @layers.*; {ROWS}",
    "recomputed in part": f"micro 2; recompute keep(product every 2) @layers.*; {ROWS}",
    "selective": f"micro 2; recompute selective @layers.*; {ROWS}",
    "plain": f"micro 2; {ROWS}",
    "halves": f"micro 2 halves; recompute full @layers.*; {ROWS}",
    "one micro-batch": f"recompute full @layers.*; {ROWS}",
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_one_order_on_all_ranks(layout: str) -> None:
    torch.manual_seed(0)
    model, inputs = Stack().double(), (torch.randn(4, 8, WIDTH, dtype=torch.float64),)
    weights = {"first": "d f", "second": "d f", "third": "f d"}
    graph = autopar.trace(model, inputs, dims={"x": "batch seq d", **weights})
    assignment = propagate(graph, parse_layout(layout), SubMesh({"a": 2, "b": 2}))
    for _ in range(3):
        made = on_ranks(assignment.axes, lambda groups: emit(graph, assignment, groups, "full", False))
        orders = {order_of_messages(one.graph_module) for one in made}
        assert len(orders) == 1
        assert "all_gather" in orders.pop()
    assert difference_of(graph, assignment, inputs) < 1e-12
