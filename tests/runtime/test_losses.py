"""Losses made outside of the module, in each way that docs/running.md shows: gradients are those of one process."""

from __future__ import annotations

import copy
import math
import operator
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, kl_div, linear

import autopar
from autopar.sharding.options import Outputs
from tests.runtime.launcher import in_turn, launch
from tests.runtime.training import error_of, gradients, worst

PAGE = Path(__file__).parents[2] / "docs" / "running.md"
CLASSES, ROWS = 8, 8
MESHES = {
    2: (("ddp", "dp=2"), ("fsdp", "fsdp=2"), ("zero1", "dp=2"), ("megatron", "dp=1,tp=2")),
    4: (
        ("ddp", "dp=4"),
        ("fsdp", "fsdp=4"),
        ("zero1", "dp=4"),
        ("megatron", "dp=2,tp=2"),
        ("fsdp_tp", "fsdp=2,tp=2"),
    ),
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


# -- loops of one process, unchanged ----------------------------------------------------------------------------------

HEAD = torch.linspace(-1, 1, 3 * CLASSES, dtype=torch.float64).reshape(3, CLASSES)
ONE_HOT = torch.eye(CLASSES, dtype=torch.float64)
PLAIN: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "mean": cross_entropy,
    "sum": lambda y, t: cross_entropy(y, t, reduction="sum"),
    "none": lambda y, t: cross_entropy(y, t, reduction="none").mean(),
    "weights, smoothing": nn.CrossEntropyLoss(HEAD[0].abs(), label_smoothing=0.1),
    "ignored targets": lambda y, t: cross_entropy(y, t.where(t > 1, -100)),
    "a module": lambda y, t: nn.MSELoss()(y, ONE_HOT[t]),
    "operators": lambda y, t: ((y - ONE_HOT[t]) ** 2).mean(),
    "targets first": lambda y, t: (ONE_HOT[t] - y).abs().sum(),
    "by index": lambda y, t: -y.log_softmax(-1)[torch.arange(ROWS), t].mean(),
    "gathered": lambda y, t: -y.log_softmax(-1).gather(1, t[:, None]).mean(),
    "distillation": lambda y, t: kl_div(y.log_softmax(-1), ONE_HOT[t] * 0.9 + 0.1 / CLASSES, reduction="batchmean"),
    "a layer outside": lambda y, t: linear(y, HEAD).square().mean(),
    "outputs alone": lambda y, t: y.square().mean() + 0.1 * y.logsumexp(-1).sum(),
    "alone and with targets": lambda y, t: cross_entropy(y, t) + 0.01 * y.square().mean(),
    "rows, one by one": lambda y, t: torch.stack([row.sigmoid().sum() for row in y]).mean(),
    "into a total": lambda y, t: sum((cross_entropy(y, t), (y * 2).mean()), torch.zeros((), dtype=y.dtype)),
}


def metrics(y: Any, t: Tensor) -> dict[str, Any]:
    loss = cross_entropy(y, t)
    y = y.detach()
    total = torch.zeros((), dtype=torch.float64)
    total += y.sum()
    return {
        "correct": (y.argmax(-1) == t).sum().item(),
        "accuracy": (y.argmax(dim=1) == t).double().mean().item(),
        "top": (y.topk(2, dim=-1).indices == t[:, None]).any(-1).sum().item(),
        "loss": loss.item(),
        "of outputs alone": y.square().mean().item(),
        "largest": y.max().item(),
        "printed": f"{y.mean():.6f}",
        "float": float(y.sum()),
        "total": total.item(),
        "sign": bool(y.sum() > 0),
        "numpy": y.numpy().tolist(),
        "array": np.asarray(y.softmax(-1)).tolist(),
        "list": y.argmax(-1).tolist(),
        "cpu": y.float().cpu().numpy().tolist(),
        "shape": (y.shape, type(y.shape), len(y), y.size(0), y.dtype),
        "rows": [row.sum().item() for row in y],
        "saved": torch.cat([y, y]).mean().item(),
    }


def run_plain_loops() -> dict[str, Any]:
    model, x, targets = perceptron()
    found: dict[str, Any] = {}
    ranks = dist.get_world_size()
    strategies = (
        ("ddp", f"dp={ranks}"),
        ("zero1", f"dp={ranks}"),
        ("fsdp", f"fsdp={ranks}"),
        ("megatron", f"dp={ranks // 2},tp=2"),
        ("batch -> dp; classes -> tp; * -> none", f"dp={ranks // 2},tp=2"),
    )
    for layout, mesh in strategies:
        names = NAMES | ({"2.weight": "classes d_ff"} if "classes" in layout else {})
        parallel = autopar.parallelize(copy.deepcopy(model), mesh, (x,), layout=layout, dims=names)
        for name, loss in PLAIN.items():
            for module in (model, parallel):
                module.zero_grad()
                loss(module(x), targets).backward()
            found[f"{layout}, {name}"] = gradient_gap(model, parallel)
        found[f"{layout}, metrics"] = differing(metrics(parallel(x), targets), metrics(model(x), targets))
        with torch.no_grad():
            found[f"{layout}, metrics without gradients"] = differing(
                metrics(parallel(x), targets), metrics(model(x), targets)
            )
    return found


class TwoResults(nn.Module):
    """Returns a loss, which is pending after a call, and the outputs that it is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, _, _ = perceptron()

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        output = self.layers(x)
        return cross_entropy(output, targets), output


def add_losses() -> dict[str, float]:
    """The loss of the model, and others of its outputs and parameters, in one sum."""
    _, x, targets = perceptron()
    ranks, found = dist.get_world_size(), {}
    for layout, mesh in (("ddp", f"dp={ranks}"), ("fsdp", f"fsdp={ranks}")):
        model = TwoResults()
        parallel = autopar.parallelize(copy.deepcopy(model), mesh, (x, targets), layout=layout)
        totals = []
        for module in (model, parallel):
            loss, output = module(x, targets)
            total = output.logsumexp(-1).mean() + loss + (output - ONE_HOT[targets]).square().mean() + output.std()
            decay: Any = sum(p.square().sum() for p in module.parameters())
            total = total + 0.1 * (decay.full_tensor() if isinstance(decay, DTensor) else decay)
            total.backward()
            totals.append(total)
        found[f"{layout}, total"] = gap(totals[1], totals[0])
        found[f"{layout}, gradients"] = gradient_gap(model, parallel)
    return found


def differing(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """Return the largest difference of numbers; infinite where other values differ."""
    worst = 0.0
    for name, value in expected.items():
        same = found[name] == value
        if not same and isinstance(value, float | list):
            same = torch.tensor(found[name]).shape == torch.tensor(value).shape
            worst = max(
                worst, float((torch.tensor(found[name]) - torch.tensor(value)).abs().max()) if same else math.inf
            )
        worst = worst if same else math.inf
    return worst


def refuse() -> dict[str, str]:
    """Errors that say the fix: rows of this rank, writes."""
    model, x, targets = perceptron()
    ranks, rank = dist.get_world_size(), dist.get_rank()
    parallel = autopar.parallelize(model, f"dp={ranks}", (x,), layout="ddp")
    output: Any = parallel(x)
    return {
        "rows": error_of(lambda: cross_entropy(output, targets.chunk(ranks)[rank])),
        "written": error_of(lambda: output.detach().masked_fill_(x > 0, 0.0)),
        "operator": error_of(lambda: operator.iadd(output.detach(), x)),
    }


class Recurrent(nn.Module):
    """Recurrent layer that takes and returns its state."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRU(8, 8, batch_first=True), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        found, state = self.cell(x, state)
        return self.out(found[:, -1]), state


def pass_states_on() -> dict[str, float]:
    """Outputs of a call are inputs of the next one, beside plain tensors: detached, and with their history."""
    torch.manual_seed(0)
    ranks, worst = dist.get_world_size(), dict[str, float]()
    for layout in ("ddp", "* -> none"):
        model = Recurrent().double()
        x, targets = torch.randn(3, ROWS, 5, 8, dtype=torch.float64), torch.randint(CLASSES, (3, ROWS))
        state: Any = torch.zeros(1, ROWS, 8, dtype=torch.float64)
        parallel = autopar.parallelize(copy.deepcopy(model), f"dp={ranks}", (x[0], state), layout=layout)
        for module in (model, parallel):
            one, total = state, torch.zeros(())
            for step in range(3):
                output, one = module(x[step], one.detach() if step == 2 else one)
                total = total + cross_entropy(output, targets[step])
            total.backward()
        worst[layout] = gradient_gap(model, parallel)
    return worst


class Unrolled(nn.Module):
    """Recurrent cell, step by step: in a sequence of one step its weight is seen as another product of dims."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.cell = nn.Parameter(torch.ones(1, 8)), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        state = self.start.expand((x.shape[0], -1))
        for step in range(x.shape[1]):
            state = torch.tanh(self.cell(torch.cat([x[:, step], state], 1)))
        return state


def call_with_other_products() -> dict[str, float]:
    """Parameters stay where the first call has split them, however a later call sees their dims."""
    torch.manual_seed(0)
    model, x = Unrolled().double(), torch.randn(ROWS, 3, 8, dtype=torch.float64)
    parallel = autopar.parallelize(copy.deepcopy(model), f"dp={dist.get_world_size()}", (x,), layout="zero1")
    for module in (model, parallel):
        for steps in (3, 1):
            module(x[:, :steps]).square().mean().backward()
    return {"gradients": gradient_gap(model, parallel)}


def everything() -> dict[str, Any]:
    return in_turn(
        (learn_from_losses_outside, ()),
        (load_parts_and_make_the_loss_outside, ()),
        (run_the_loop_of_the_page, ()),
        (run_plain_loops, ()),
        (add_losses, ()),
        (pass_states_on, ()),
        (call_with_other_products, ()),
        (refuse, ()),
    )


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_gradients_are_those_of_one_process(ranks: int) -> None:
    for found in launch(everything, ranks=ranks):
        errors = found.pop("refuse")
        assert errors["rows"].startswith(
            f"cross_entropy of an output of shape [{ROWS}, {CLASSES}] and a tensor of shape"
        )
        assert all("cannot be done in shards" in errors[name] for name in ("written", "operator"))
        for gaps in found.values():
            assert gaps
            for name, value in gaps.items():
                assert value < 1e-12, name


class WithLoss(nn.Module):
    """A loss, which is pending at first, beside logits."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 6)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(x)
        return cross_entropy(logits, y), logits


def with_a_term_of_logits() -> list[float]:
    """Errors of gradients of a loss of the model and a term of its outputs."""
    torch.manual_seed(0)
    model, x, y = WithLoss().double(), torch.randn(8, 8).double(), torch.randint(6, (8,))
    found = []
    for layout in ("ddp", "micro 2; ddp"):
        parallel = autopar.parallelize(model, "dp=2", (x, y), layout=layout)
        for turned in (False, True):
            for one in (model, parallel):
                one.zero_grad()
                loss, logits = one(x, y)
                term = 0.5 * logits.square().mean()
                (term + loss if turned else loss + term).backward()
            found.append(worst(gradients(parallel), gradients(model)))
    return found


def test_a_pending_loss_is_added_to_a_term_of_outputs() -> None:
    for found in launch(with_a_term_of_logits, ranks=2):
        assert max(found) < 1e-12
