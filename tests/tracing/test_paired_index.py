"""Lookups in which an index only counts a dim: what they give, and that this dim can be split."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.sharding.layout.language import parse_layout
from autopar.sharding.propagation import propagate
from autopar.sharding.reshard_insertion import inserted_reshards

B, T, D = 4, 6, 3
ONE = torch.tensor([5, 0, -2, 3])
MANY = torch.tensor([[5, 0], [-2, 3], [1, 1], [0, -6]])


def rows() -> Tensor:
    return torch.arange(B)


CASES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "one of each row": lambda x, i: x[rows(), i[:, 0]],
    "as whole numbers of 32 bits": lambda x, i: x[rows(), i[:, 0].int()],
    "the largest": lambda x, i: x[rows(), x[:, :, 0].argmax(-1)],
    "several of each row": lambda x, i: x[rows()[:, None], i],
    "the same of each row": lambda x, i: x[rows()[:, None], i[0]],
    "as columns": lambda x, i: x[rows(), i.T],
    "two dims beside each other": lambda x, i: x[rows()[:, None], i[:, :1] * 0, torch.arange(D)],
    "neither is looked up": lambda x, i: x[rows()[:, None], torch.arange(T)],
    "the other way round": lambda x, i: x[rows(), torch.arange(T)[:, None]],
    "with a dim between": lambda x, i: x[rows(), :, i[:, 0] % D],
    "behind a dim": lambda x, i: x.transpose(0, 1)[:, rows(), i[:, 0] % D],
    "counted in steps": lambda x, i: x[(torch.arange(0, 2 * B, 2) // 2).repeat(1), i[:, 0]],
}


class Lookup(nn.Module):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.scale = nn.Parameter(torch.linspace(1, 2, D))

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        return CASES[self.case](x * self.scale, i).pow(2)


@pytest.mark.parametrize("case", CASES)
def test_what_is_given(case: str) -> None:
    torch.manual_seed(0)
    model, x = Lookup(case), torch.randn(B, T, D, requires_grad=True)
    graph = autopar.trace(model, (x, MANY), dims={"x": "batch seq d", "i": "batch k"})
    assert not any("index" in node.op for node in graph.nodes)
    traced = graph.module()
    expected = torch.autograd.grad(model(x, MANY).sum(), (x, model.scale))
    found = torch.autograd.grad(traced(x, MANY).sum(), (x, model.scale))
    assert torch.equal(traced(x, MANY), model(x, MANY))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("the same of each row", "as columns")])
def test_the_dim_that_is_counted_can_be_split(case: str) -> None:
    x = torch.randn(B, T, D)
    graph = autopar.trace(Lookup(case), (x, MANY), dims={"x": "batch seq d", "i": "batch k"})
    assignment = propagate(graph, parse_layout("batch -> dp; * -> none"), {"dp": 2})
    forward = [step for one in inserted_reshards(graph, assignment, "local", True) for way, step in one.collectives()]
    assert {step.kind.value for step in forward} <= {"all_reduce"}, "of the gradient of the parameter"


@pytest.mark.parametrize(
    "index",
    [
        lambda i: (torch.arange(B - 1), i[: B - 1, 0]),
        lambda i: (torch.arange(B).flip(0), i[:, 0]),
        lambda i: (i[:, 1] % B, i[:, 0]),
        lambda i: (torch.arange(B) * i[0, 1], i[:, 0]),
        lambda i: (torch.arange(B), i[:, 0], i[:, 1] % D),
    ],
    ids=["too few", "backwards", "not known", "not known by sizes", "two lookups"],
)
def test_other_lookups_stay(index: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    class Other(nn.Module):
        def forward(self, x: Tensor, i: Tensor) -> Tensor:
            return x[index(i)]

    x = torch.randn(B, T, D)
    graph = autopar.trace(Other(), (x, MANY))
    assert any("index" in node.op for node in graph.nodes)
    assert torch.equal(graph.module()(x, MANY), x[index(MANY)])


# -- writes -----------------------------------------------------------------------------------------------------------


def put(x: Tensor, places: tuple[Tensor | slice, ...], values: Tensor, accumulate: bool = False) -> Tensor:
    """`x[places] = values` in a copy."""
    copy = x.clone()
    if accumulate:
        return copy.index_put(places, values, accumulate=True)
    copy[places] = values
    return copy


# Written twice, the last value stays or both are added: here no place is met twice, but where they are added.
WRITES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "one of each row": lambda x, i, v: put(x, (rows(), i[:, 0]), v),
    "added to one of each row": lambda x, i, v: put(x, (rows(), i[:, 0]), v, accumulate=True),
    "several of each row": lambda x, i, v: put(x, (rows()[:, None], i), v[:, None]),
    "added, some of them twice": lambda x, i, v: put(x, (rows()[:, None], i * 0), v[:, None], accumulate=True),
    "one value for all": lambda x, i, v: put(x, (rows(), i[:, 0]), v.sum()),
    "neither is looked up": lambda x, i, v: put(x, (rows()[:, None], torch.arange(T)), v[:, None] * v[:1, None]),
    "added to all": lambda x, i, v: put(x, (rows()[:, None], torch.arange(T)), v[:, None], accumulate=True),
    "with a dim between": lambda x, i, v: put(x, (rows(), slice(None), i[:, 0] % D), v[:, :1] * torch.ones(T)),
    "behind a dim": lambda x, i, v: put(x.transpose(0, 1), (slice(None), rows(), i[:, 0] % D), v[:, 0]),
    "as columns": lambda x, i, v: put(x, (rows(), torch.stack([i[:, 0], i[:, 0] + 6]).clamp(-6, 5)[:1]), v[None]),
}


class Write(nn.Module):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.scale = nn.Parameter(torch.linspace(1, 2, D))

    def forward(self, x: Tensor, i: Tensor, v: Tensor) -> Tensor:
        return WRITES[self.case](x * self.scale, i, v).pow(2)


PLACES = torch.tensor([[5, 0], [-2, 3], [1, 2], [0, -1]])


@pytest.mark.parametrize("case", WRITES)
def test_what_is_written(case: str) -> None:
    torch.manual_seed(0)
    model = Write(case)
    x, v = torch.randn(B, T, D, requires_grad=True), torch.randn(B, D, requires_grad=True)
    graph = autopar.trace(model, (x, PLACES, v), dims={"x": "batch seq d", "i": "batch k", "v": "batch d"})
    assert not any("index_put" in node.op for node in graph.nodes)
    traced = graph.module()
    assert torch.equal(traced(x, PLACES, v), model(x, PLACES, v))
    expected = torch.autograd.grad(model(x, PLACES, v).sum(), (x, v, model.scale))
    found = torch.autograd.grad(traced(x, PLACES, v).sum(), (x, v, model.scale), materialize_grads=True)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("case", [case for case in WRITES if case not in ("one value for all", "neither is looked up")])
def test_what_is_written_can_be_split(case: str) -> None:
    x, v = torch.randn(B, T, D), torch.randn(B, D)
    graph = autopar.trace(Write(case), (x, PLACES, v), dims={"x": "batch seq d", "i": "batch k", "v": "batch d"})
    assignment = propagate(graph, parse_layout("batch -> dp; * -> none"), {"dp": 2})
    sent = [step for one in inserted_reshards(graph, assignment, "local", True) for way, step in one.collectives()]
    assert {step.kind.value for step in sent} <= {"all_reduce"}, "of the gradient of the parameter"
