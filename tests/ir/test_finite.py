"""Sums are held back through an op only where what it multiplies with is finite by the graph; on simulated ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import LayoutError
from autopar.ir.graph import NamedGraph
from autopar.lowering.emit import emit
from autopar.sharding.assignment import Assignment
from autopar.sharding.layout.language import parse_layout
from autopar.sharding.propagation import propagate
from autopar.tracing.trace import trace
from tests.ranks import SimulatedGroups, on_ranks

TP = {"tp": 2}
PINS = "d_ff -> tp; * -> none; @left/linear[* -> none] + partial(tp); "
Function = Callable[["Scaled", Tensor, Tensor, Tensor], Tensor]


class Scaled(nn.Module):
    """A product whose sum may be held back, and a function of it, of what went in and of another input."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.up, self.left = nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.function(self, self.left(self.up(x).relu()), x, other)


INFINITE: dict[str, Function] = {
    "a number": lambda m, y, x, other: y * float("inf"),
    "by zero": lambda m, y, x, other: y / 0.0,
    "by a whole zero": lambda m, y, x, other: y / 0,
    "an input": lambda m, y, x, other: y * other,
    "by an input": lambda m, y, x, other: y / (other - other.clamp(-9, 9)),
    "a quotient": lambda m, y, x, other: y * (m.scale / (x * 0)),
    "a logarithm": lambda m, y, x, other: y * (x * 0).abs().log(),
    "a mask that is filled": lambda m, y, x, other: y * torch.zeros_like(x).masked_fill(x > 0, float("inf")),
    "an exponential": lambda m, y, x, other: y * other.exp(),
    "a sum of squares that is nothing": lambda m, y, x, other: y / (x * 0).square().sum(-1, keepdim=True),
}
FINITE: dict[str, Function] = {
    "a number": lambda m, y, x, other: y * 3.0,
    "by a number": lambda m, y, x, other: y / 3,
    "a parameter": lambda m, y, x, other: y * m.scale,
    "a softmax": lambda m, y, x, other: y * x.softmax(-1),
    "shares of a softmax": lambda m, y, x, other: y * _shares(x),
    "integers": lambda m, y, x, other: y * (x > 0).to(torch.int64),
    "a norm that is written out": lambda m, y, x, other: y * (m.scale.square().mean() + 1e-6).rsqrt(),
    "by squares and a number": lambda m, y, x, other: y / (x.square() + 1e-3),
}


def _shares(x: Tensor) -> Tensor:
    chosen = x.softmax(-1).topk(1, -1).values
    return chosen / (chosen.sum(-1, keepdim=True) + 1e-20)


def graph_of(function: Function) -> tuple[NamedGraph, list[Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(4, 8, dtype=torch.float64)
    other = torch.where(x > 0.5, float("inf"), x)
    dims = {"x": "batch d_model", "up.weight": "d_ff d_model"}
    return trace(Scaled(function).double(), (x, other), dims=dims), [x, other]


def last(graph: NamedGraph) -> str:
    """The op that takes the sum."""
    (name,) = (node.name for node in graph.nodes if "left/linear" in node.operands)
    return name


def results(graph: NamedGraph, assignment: Assignment, inputs: list[Tensor]) -> list[Tensor]:
    names = dict(graph.model.named_parameters())
    values = {p.name: names.get(p.name) for p in graph.exported.placeholders}

    def run(groups: SimulatedGroups) -> Tensor:
        given = iter(inputs)
        module = emit(graph, assignment, groups, "full", False).graph_module
        at = groups.coordinate["tp"]
        parts = {
            "up.weight": graph.model.up.weight.chunk(2)[at],  # type: ignore[union-attr]
            "left.weight": graph.model.left.weight.chunk(2, 1)[at],  # type: ignore[union-attr]
        }
        found: tuple[Tensor, ...] = module(
            *(next(given) if value is None else parts.get(name, value) for name, value in values.items())
        )
        return found[0].detach()

    return on_ranks(TP, run)


@pytest.mark.parametrize("name", INFINITE)
def test_a_sum_is_made_before_what_may_be_infinite(name: str) -> None:
    graph, inputs = graph_of(INFINITE[name])
    assignment = propagate(graph, parse_layout(PINS + f"@{last(graph)}[* -> none] + partial(tp)"), TP)
    assert not any(way for _, way in assignment.ops[last(graph)].choice.passes)
    expected = graph.model(*inputs).detach()
    for found in results(graph, assignment, inputs):
        torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("name", FINITE)
def test_a_sum_is_held_back_through_what_is_finite(name: str) -> None:
    graph, inputs = graph_of(FINITE[name])
    assignment = propagate(graph, parse_layout(PINS + f"@{last(graph)}[* -> none] + partial(tp)"), TP)
    assert str(assignment.ops[last(graph)].choice) == "0 partial(tp)"
    for found in results(graph, assignment, inputs):
        torch.testing.assert_close(found, graph.model(*inputs).detach())


def test_an_op_that_is_pinned_to_pass_such_a_sum_is_refused() -> None:
    graph, _ = graph_of(INFINITE["an input"])
    with pytest.raises(LayoutError, match=r"(?s)cannot be split as it is pinned.*may be infinite, or what divides"):
        propagate(graph, parse_layout(f"d_ff -> tp; * -> none; op @{last(graph)}[partial.0 -> tp]"), TP)
