"""All-reduces by level on four processes: gradients in buckets and values, as a plan says and as links are priced."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from tests.runtime.launcher import launch
from tests.runtime.sent import Counted

SLOW_NETWORK = Path(__file__).parents[1] / "cost" / "slow_network.toml"
MESH = "pod=2,dp=2"
BY_LEVEL = {("reduce_scatter", ("dp",)), ("all_reduce", ("pod",)), ("all_gather", ("dp",))}


class Wide(nn.Module):
    """Weights large enough for three collectives, a bias of odd length, and a loss that is too small for them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 301)
        self.second = nn.Linear(301, 301)

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(torch.tanh(self.first(x))) ** 2).mean()


def made() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Wide().to(torch.float64), torch.randn(8, 16, dtype=torch.float64)


def steps(model: nn.Module, x: Tensor, count: int) -> tuple[list[float], Counter[str]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    counted = Counted()
    for number in range(count):
        with counted if number == count - 1 else nullcontext():
            optimizer.zero_grad()
            loss = model(x)
            loss.backward()
            optimizer.step()
        losses.append(float(loss.detach()))
    return losses, counted.counts


Listed = tuple[str, str, tuple[str, ...], int, str]


def planned(folder: Path, layout: str = "batch -> pod*dp; * -> none") -> tuple[str, list[Listed]]:
    """The file of a plan, made once for all ranks, and what it says that a step sends."""
    model, x = made()
    plan = autopar.plan(model, MESH, (x,), layout=layout, cluster=SLOW_NETWORK, cache=False)
    plan.save(folder / "by_level.lay")
    return str(folder / "by_level.lay"), listed(plan.collectives)


def listed(collectives: Any) -> list[Listed]:
    return [(one.direction, one.kind, one.axes, one.bytes, one.tensor) for one in collectives]


def trained(path: str) -> tuple[list[float], Counter[str], list[Listed]]:
    model, x = made()
    parallel = autopar.parallelize(model, MESH, (x,), layout=Path(path), outputs="full")
    return (*steps(parallel, x, 3), listed(parallel.collectives()))


def expected() -> list[float]:
    return steps(*made(), 3)[0]


def test_gradients_are_summed_by_level(tmp_path: Path) -> None:
    path, said = planned(tmp_path)
    assert "#   by_level        dp, pod from" in Path(path).read_text()
    for losses, counts, found in launch(trained, path, ranks=4):
        assert losses == pytest.approx(expected(), rel=1e-12)
        assert found == said
        assert {(kind, axes) for way, kind, axes, _, _ in found if way == "backward"} >= BY_LEVEL
        assert counts["reduce_scatter_tensor"] > 0


def other_ways(path: str) -> dict[str, float]:
    """Errors of gradients: of two backwards under no_sync, and of a compiled module."""
    errors = {}
    for name in ("no_sync", "compiled"):
        (model, x), (whole, _) = made(), made()
        parallel = autopar.parallelize(model, MESH, (x,), layout=Path(path), outputs="full")
        run = torch.compile(parallel) if name == "compiled" else parallel
        with parallel.no_sync() if name == "no_sync" else nullcontext():
            run(x).backward()
        run(x).backward()
        for _ in range(2):
            whole(x).backward()
        pairs = zip(parallel.parameters(), whole.parameters(), strict=True)
        errors[name] = max(float((a.grad.full_tensor() - b.grad).abs().max()) for a, b in pairs)  # type: ignore[union-attr,operator]
    return errors


@pytest.mark.slow
def test_without_synchronisation_and_compiled(tmp_path: Path) -> None:
    path, _ = planned(tmp_path)
    for errors in launch(other_ways, path, ranks=4):
        assert errors == pytest.approx({"no_sync": 0.0, "compiled": 0.0}, abs=1e-12)


@pytest.mark.slow
def test_micro_batches(tmp_path: Path) -> None:
    path, _ = planned(tmp_path, "micro 2; batch -> pod*dp; * -> none")
    for losses, counts, _ in launch(trained, path, ranks=4):
        assert losses == pytest.approx(expected(), rel=1e-12)
        assert counts["reduce_scatter_tensor"] > 0
