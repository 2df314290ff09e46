"""All ranks send in one order, whatever the order in which Python goes through a set on each of them."""

from __future__ import annotations

import random

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
from tests.runtime.combined_models import MODELS, SEQ, batch_of

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
    def __init__(self, layer: type[nn.Module], layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(layers))

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
    model, inputs = Stack(Layer, 4).double(), (torch.randn(4, 8, WIDTH, dtype=torch.float64),)
    weights = {"first": "d f", "second": "d f", "third": "f d"}
    graph = autopar.trace(model, inputs, dims={"x": "batch seq d", **weights})
    assignment = propagate(graph, parse_layout(layout), SubMesh({"a": 2, "b": 2}))
    for _ in range(3):
        made = on_ranks(assignment.axes, lambda groups: emit(graph, assignment, groups, "full", False))
        orders = {order_of_messages(one.graph_module) for one in made}
        assert len(orders) == 1
        assert "all_gather" in orders.pop()
    assert difference_of(graph, assignment, inputs) < 1e-12


class Mlp(nn.Module):
    """A layer that ends with a sum, whose backward needs no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.gate, self.down = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        return x + self.down(self.up(hidden) * torch.sigmoid(self.gate(hidden)))


# Five ranks have 3, 3, 3, 3 and no rows of 12.
UNEVEN = "batch -> a pad | none !1; d_ff -> a pad | none; * -> none"


@pytest.mark.parametrize("mode", ["full", "selective", "keep(product every 2)"])
@pytest.mark.parametrize("ranks", [5, 7])
def test_a_rank_without_elements_recomputes_at_the_same_op(mode: str, ranks: int) -> None:
    torch.manual_seed(0)
    model, inputs = Stack(Mlp, 2).double(), (torch.randn(12, 6, WIDTH, dtype=torch.float64),)
    names = {"up": "d_ff d_model", "gate": "d_ff d_model", "down": "d_model d_ff"}
    dims = {f"layers.*.{name}.weight": text for name, text in names.items()}
    graph = autopar.trace(model, inputs, dims={"x": "batch seq d_model", **dims})
    assignment = propagate(graph, parse_layout(f"recompute {mode} @layers.*; {UNEVEN}"), SubMesh({"a": ranks}))
    made = on_ranks(assignment.axes, lambda groups: emit(graph, assignment, groups, "full", False))
    assert len({order_of_messages(one.graph_module) for one in made}) == 1
    assert any("_empty" in name for name, _ in made[-1].graph_module.named_modules())
    # Simulated ranks compare each message, those of the backward too.
    assert difference_of(graph, assignment, inputs) < 1e-12


def test_halves_take_the_same_turns_on_a_rank_without_elements() -> None:
    torch.manual_seed(0)
    small = MODELS["vit"]
    model, inputs = small.make().double(), batch_of(small, random.Random(0), 12, SEQ, torch.float64)
    graph = autopar.trace(model, inputs)
    splits = "d_model -> a pad | none !10; heads -> a pad | none !12; height -> a pad | none !15"
    layout = f"micro 2 halves; regather @*; recompute full @vit.layers.*; {splits}; grad, opt {{ * -> a | none }}"
    layout += "; use { d_model -> a | none !49 }"
    assignment = propagate(graph, parse_layout(layout), SubMesh({"a": 5}))
    assert difference_of(graph, assignment, inputs) < 1e-12
