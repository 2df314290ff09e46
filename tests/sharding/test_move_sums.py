"""Sums move along chains of ops to smaller tensors: what is sent, and that the numbers stay."""

from __future__ import annotations

from collections import Counter
from math import prod

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.mesh import SubMesh
from autopar.plans.to_layout import write_layout
from autopar.sharding.assignment import Assignment
from autopar.sharding.layout.language import parse_layout
from autopar.sharding.propagation import propagate
from autopar.sharding.reshard_insertion import inserted_reshards
from tests.ranks import difference_of

BATCH, SEQ, D, F, EACH = 2, 4, 6, 8, 3


class Rows(nn.Module):
    """A product of several rows for each token, whose results are weighted and added up."""

    def __init__(self, end: str) -> None:
        super().__init__()
        self.end = end
        self.up, self.down = nn.Parameter(torch.randn(D, F)), nn.Parameter(torch.randn(F, D))
        self.share, self.scale = nn.Parameter(torch.randn(EACH)), nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.unsqueeze(2).expand(-1, -1, EACH, -1)
        rows = torch.tanh(wide @ self.up) @ self.down
        if self.end == "relu":
            rows = rows.relu()
        if self.end == "read twice":
            return rows.square().sum(2) + (rows * self.share[:, None]).sum(2)
        found = (rows * self.share[:, None]).sum(2)
        return found if self.end == "returned" else found.tanh()


class Parallel(nn.Module):
    """Two branches of one input, each a sum, and both added to the stream."""

    def __init__(self, end: str) -> None:
        super().__init__()
        self.end = end
        self.a, self.b = nn.Linear(D, F), nn.Linear(D, F)
        self.c, self.e = nn.Linear(F, D), nn.Linear(F, D)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.c(self.a(x).tanh()), self.e(functional.gelu(self.b(x)))
        if self.end == "halved":
            return x + (first / 2 + self.dropout(second))
        return x + first + second if self.end == "one by one" else x + (first + second)


def made(model: nn.Module, layout: str, **dims: str) -> tuple[autopar.NamedGraph, Assignment, tuple[Tensor]]:
    torch.manual_seed(0)
    inputs = (torch.randn(BATCH, SEQ, D, dtype=torch.float64, requires_grad=True),)
    graph = autopar.trace(model.double(), inputs, dims={"x": "batch seq d", **dims})
    return graph, propagate(graph, parse_layout(layout), SubMesh({"a": 2, "b": 2})), inputs


def sent(graph: autopar.NamedGraph, assignment: Assignment) -> Counter[tuple[str, int]]:
    """Return the elements of each sum of a value or an input, by direction."""
    found: Counter[tuple[str, int]] = Counter()
    for one in inserted_reshards(graph, assignment):
        if graph.tensors[one.tensor].kind in ("activation", "input"):
            for direction, step in one.collectives():
                # Of an input, gradients of slices are gathered too.
                found[direction, prod(graph.tensors[one.tensor].shape)] += step.kind.value == "all_reduce"
    return found


TOKENS, ROWS = BATCH * SEQ * D, BATCH * SEQ * EACH * D


@pytest.mark.parametrize(
    ("end", "forward"),
    [("", TOKENS), ("returned", TOKENS), ("relu", ROWS), ("read twice", ROWS)],
)
def test_sums_of_rows(end: str, forward: int) -> None:
    graph, assignment, inputs = made(Rows(end), "f -> a; * -> none", up="d f", down="f d")
    found = sent(graph, assignment)
    assert found["forward", forward] == 1
    assert found["backward", TOKENS] == 1  # of x, and not of its copies
    assert sum(size for (_, size), count in found.items() for _ in range(count)) < 2 * ROWS
    assert difference_of(graph, assignment, inputs) < 1e-12


@pytest.mark.parametrize(("end", "count"), [("", 1), ("halved", 1), ("one by one", 2)])
def test_sums_that_are_added(end: str, count: int) -> None:
    dims = {"a.weight": "f d", "b.weight": "g d", "c.weight": "d f", "e.weight": "d g"}
    graph, assignment, inputs = made(Parallel(end), "(f, g) -> a; batch -> b; * -> none", **dims)
    assert sent(graph, assignment)["forward", TOKENS] == count
    assert difference_of(graph, assignment, inputs) < 1e-12


PINNED = "f -> a; * -> none; op @/mul[none -> a*b]"


def test_the_sum_does_not_move_over_a_pinned_op() -> None:
    graph, assignment, inputs = made(Rows(""), PINNED, up="d f", down="f d")
    assert sent(graph, assignment)["forward", ROWS] == 1
    assert difference_of(graph, assignment, inputs) < 1e-12


@pytest.mark.parametrize("layout", ["f -> a; * -> none", PINNED])
def test_a_written_plan_has_its_sums_at_the_same_places(layout: str) -> None:
    graph, assignment, _ = made(Rows(""), layout, up="d f", down="f d")
    again = propagate(graph, write_layout(graph, assignment).layout, assignment.axes)
    assert again.ops == assignment.ops
    assert again.values == assignment.values
