"""Losses made outside of the module, in each way that docs/running.md shows: gradients are those of one process."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

import autopar
from autopar.sharding.options import Outputs
from tests.runtime.launcher import in_turn, launch

PAGE = Path(__file__).parents[2] / "docs" / "running.md"
CLASSES, ROWS = 8, 8
MESHES = {
    2: (("ddp", "dp=2"), ("fsdp", "fsdp=2"), ("zero1", "dp=2")),
    4: (("megatron", "dp=2,tp=2"), ("fsdp_tp", "fsdp=2,tp=2")),
}
NAMES = {"0.weight": "d_ff d_model"}


def perceptron() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, CLASSES)).double()
    return model, torch.randn(ROWS, 8, dtype=torch.float64), torch.randint(CLASSES, (ROWS,))


def gap(given: Any, expected: Tensor) -> float:
    given = given.full_tensor() if isinstance(given, DTensor) else given
    given, expected = given.detach(), expected.detach()
    return float((given - expected).abs().max() / expected.abs().max())


def gradient_gap(model: nn.Module, parallel: nn.Module) -> float:
    pairs = ((p.grad, parallel.get_parameter(name).grad) for name, p in model.named_parameters())
    return max(gap(mine, theirs) for theirs, mine in pairs if theirs is not None)


def of_my_rows(whole: Tensor, output: Tensor) -> Tensor:
    """The rows of the batch whose outputs this rank has; the batch is split over the first axis of the mesh."""
    parts = len(whole) // len(output)
    return whole.chunk(parts)[dist.get_rank() // (dist.get_world_size() // parts)]


def square(reduce: str) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    def loss(y: Tensor, targets: Tensor) -> Tensor:
        return getattr(y.square(), reduce)()  # type: ignore[no-any-return]

    return loss, loss


WAYS: dict[str, tuple[Outputs, tuple[Callable[..., Tensor], Callable[..., Tensor]]]] = {
    "full_tensor": ("sharded", (lambda y, t: cross_entropy(y.full_tensor(), t), cross_entropy)),
    "full": ("full", (cross_entropy, cross_entropy)),
    "DTensor mean": ("sharded", square("mean")),
    "DTensor sum": ("sharded", square("sum")),
    "to_local sum": ("sharded", (lambda y, t: y.to_local().square().sum(), lambda y, t: y.square().sum())),
    "local mean": ("local", square("mean")),
    "local": ("local", (lambda y, t: cross_entropy(y, of_my_rows(t, y)), cross_entropy)),
    "local_sum": (
        "local_sum",
        (lambda y, t: cross_entropy(y, of_my_rows(t, y), reduction="sum") / ROWS, cross_entropy),
    ),
}


def learn_from_losses_outside() -> dict[str, float]:
    found = {}
    model, x, targets = perceptron()
    for layout, mesh in MESHES[dist.get_world_size()][:2]:
        for name, (outputs, (mine, theirs)) in WAYS.items():
            model.zero_grad()
            theirs(model(x), targets).backward()
            parallel = autopar.parallelize(copy.deepcopy(model), mesh, (x,), layout=layout, dims=NAMES, outputs=outputs)
            mine(parallel(x), targets).backward()
            found[f"{layout}, {name}"] = gradient_gap(model, parallel)
    return found


def load_parts_and_make_the_loss_outside() -> dict[str, float]:
    """What a loop for DDP does: a part of the batch on each rank, and a loss of its outputs."""
    model, x, targets = perceptron()
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mine, labels = x.chunk(ranks)[rank], targets.chunk(ranks)[rank]
    parallel = autopar.parallelize(
        copy.deepcopy(model), f"dp={ranks}", (mine,), layout="ddp", local_inputs=True, outputs="local"
    )
    for _ in range(2):  # gradients are added up
        cross_entropy(model(x), targets).backward()
        cross_entropy(parallel(mine), labels).backward()
    return {"parts": gradient_gap(model, parallel)}


def run_the_loop_of_the_page() -> dict[str, float]:
    """The function `train` of docs/running.md trains the model on all ranks as on one."""
    source = re.search(r"^def train\(.*?(?=^def )", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert source is not None
    model, _, _ = perceptron()
    batches = torch.randn(3, ROWS, 8, dtype=torch.float64)
    found = {}
    for layout, mesh in MESHES[dist.get_world_size()]:
        alone = copy.deepcopy(model)
        parallel = autopar.parallelize(copy.deepcopy(model), mesh, (batches[0],), layout=layout, dims=NAMES)
        for module in (alone, parallel):
            scope: dict[str, Any] = {"data": batches, "torch": torch}
            exec(source[0], scope)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
            scope["train"](module, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))
        pairs = ((parallel.get_parameter(name), each) for name, each in alone.named_parameters())
        found[f"{layout}: the loop of the page"] = max(gap(mine, theirs) for mine, theirs in pairs)
    return found


def everything() -> dict[str, Any]:
    return in_turn(
        (learn_from_losses_outside, ()), (load_parts_and_make_the_loss_outside, ()), (run_the_loop_of_the_page, ())
    )


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_gradients_are_those_of_one_process(ranks: int) -> None:
    for found in launch(everything, ranks=ranks):
        for gaps in found.values():
            assert gaps
            for name, value in gaps.items():
                assert value < 1e-12, name
