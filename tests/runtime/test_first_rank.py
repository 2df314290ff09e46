"""Weights that the first rank alone has: scattered into shards, and gathered on that rank alone."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.errors import AutoparError
from tests.runtime.launcher import launch

# Splits over one axis and over both, uneven ones (7 rows over 2 ranks) among them.
LAYOUT = "seq -> dp; * -> none; param, grad, opt { d_ff -> tp pad; low_rank -> dp; vocab -> tp; * -> none }"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.lin = nn.Linear(6, 7)
        self.norm = nn.BatchNorm1d(7)
        self.out = nn.Linear(7, 6)
        self.back = nn.Linear(6, 10, bias=False)
        self.back.weight = self.embed.weight  # tied
        self.register_buffer("odd", torch.tensor([True, False, True]))

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.out(torch.relu(self.norm(self.lin(self.embed(x)))))).square().mean()


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an op gave back."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if type(found) is Tensor and not found.is_meta:  # a DTensor says the size of the whole
            self.numel = max(self.numel, found.numel() * found.element_size())
        return found


def made(first: bool, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    with nullcontext() if first else torch.device("meta"):
        return Net().to(torch.float64)


def ids() -> Tensor:
    return torch.arange(8) % 10


def run(layout: str, mesh: str) -> dict[str, Any]:
    first = dist.get_rank() == 0
    parallel = autopar.parallelize(made(first), mesh, (ids(),), layout=layout, outputs="full")
    found: dict[str, Any] = {"state": parallel.full_state_dict(), "loss": float(parallel(ids()).detach())}
    other = {name: 2 * value for name, value in made(True, seed=1).state_dict().items() if value.is_floating_point()}
    other = {**made(True, seed=1).state_dict(), **other}
    with Largest() as largest:
        parallel.load_full_state_dict(other if first else None)
    found["loaded"], found["largest"] = parallel.full_state_dict(), largest.numel
    for given in (None, other if dist.get_rank() < 2 else None):
        with pytest.raises(AutoparError, match=r"expected one on every rank, or on the first rank alone, got none on"):
            parallel.load_full_state_dict(given)
    with pytest.raises(AutoparError, match=r"lacks odd|rank 0 stopped"):
        parallel.load_full_state_dict({name: x for name, x in other.items() if name != "odd"} if first else None)
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def check(results: list[dict[str, Any]], largest: int) -> None:
    whole = made(True)
    first, *others = results
    assert same(first["state"], whole.state_dict())
    twice = {name: 2 * x if x.is_floating_point() else x for name, x in made(True, seed=1).state_dict().items()}
    assert same(first["loaded"], twice)
    for one in results:
        assert one["loss"] == pytest.approx(float(whole(ids()).detach()), rel=1e-12)
    for one in others:
        assert one["state"] == one["loaded"] == {}
        # No rank but the first has the table of 10 x 6 whole.
        assert one["largest"] <= largest


def test_weights_of_the_first_rank_alone() -> None:
    check(launch(run, LAYOUT, "dp=2,tp=2", ranks=4), largest=7 * 6 * 8)


@pytest.mark.slow
def test_stages_get_their_weights_from_the_first_rank() -> None:
    found = launch(run_stages, ranks=4)
    assert same(found[0], dict(Stack().to(torch.float64).state_dict()))
    assert found[1:] == [{}] * 3


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.out = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.first(x))).square().mean()


def run_stages() -> dict[str, Tensor]:
    with nullcontext() if dist.get_rank() == 0 else torch.device("meta"):
        model = Stack().to(torch.float64)
    layout = "pipeline pp gpipe; micro 2; cut pp before @out; batch -> dp; * -> none"
    parallel = autopar.parallelize(model, "pp=2,dp=2", (torch.ones(8, 6, dtype=torch.float64),), layout=layout)
    found: dict[str, Tensor] = parallel.full_state_dict()
    return found
