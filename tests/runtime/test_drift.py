"""Replicas that drift, on real processes: what they have after each meeting, by hand and by one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.runtime.module import ParallelModule
from tests.runtime.launcher import launch

BATCH = 24
# Replicas of two stages.
PIPELINE = "micro 2; pipeline dp 1f1b; batch -> none; * -> none"
SGD = torch.optim.SGD


class Regression(nn.Module):
    """A small model that returns its loss."""

    def __init__(self, width: int = 10, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, 3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.layers(x) - y).square().mean()


def batches(count: int, rows: int = BATCH) -> list[dict[str, Tensor]]:
    """Return the same global batches in every process."""
    draw = torch.Generator().manual_seed(7)
    shapes = {"x": 6, "y": 3}
    return [
        {name: torch.randn(rows, size, generator=draw, dtype=torch.float64) for name, size in shapes.items()}
        for _ in range(count)
    ]


def parallel(layout: str, mesh: str = "pod=4", width: int = 10) -> ParallelModule:
    (inputs,) = batches(1)
    return autopar.parallelize(Regression(width).double(), mesh, inputs, layout=layout)


def weights(module: ParallelModule) -> Tensor:
    """Return all parameters of a replica as one vector."""
    every: list[Any] = [parameter.detach() for parameter in module.parameters()]
    return torch.cat([one.full_tensor().reshape(-1) for one in every])


def add(module: ParallelModule, value: float) -> None:
    """Move all parameters of this replica, as if it had another start."""
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.add_(value * (number + 1))


def train(module: ParallelModule, steps: int, optimizer: Any = None, lr: float = 0.1) -> list[tuple[float, Tensor]]:
    """Train, and return the loss of the replica and its weights after each step."""
    optimizer = optimizer or SGD(module.parameters(), lr=lr)
    found = []
    for batch in batches(steps):
        optimizer.zero_grad()
        loss = module(**batch)
        loss.backward()
        optimizer.step()
        found.append((float(loss.detach()), weights(module)))
    return found


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


# -- the mean of parameters is that of gradients -----------------------------------------------------------------------


def averaged(mesh: str, line: str, inner: str) -> tuple[float, float, float]:
    """Return how far losses and weights are from those of data parallelism."""
    drifting = parallel(f"{line}; {inner}", mesh)
    axes = {axis.name: axis.size for axis in autopar.Mesh(mesh).declared}
    whole = parallel(f"ddp(dp={'*'.join(axes)})", mesh)
    expected, found = train(whole, 10), train(drifting, 10)
    means = [float(drifting.replicas.mean(torch.tensor(loss))) for loss, _ in found]
    losses = max(abs(a - b) for (a, _), b in zip(expected, means, strict=True))
    worst = max(apart(a, b) for (_, a), (_, b) in zip(expected, found, strict=True))
    return losses, worst, drifting.replicas.sent_bytes


@pytest.mark.parametrize(
    ("mesh", "line", "inner"),
    [
        ("pod=4", "drift pod -> mean", "ddp"),
        pytest.param("pod=2,dp=2", "drift pod -> mean", "ddp", marks=pytest.mark.slow),
        pytest.param("pod=2,dp=2", "drift pod -> mean", "fsdp(fsdp=dp)", marks=pytest.mark.slow),
        pytest.param("pod=2,dp=2", "drift pod -> mean every 0", "fsdp(fsdp=dp)", marks=pytest.mark.slow),
        pytest.param("pod=2,dp=2", "drift pod -> mean", PIPELINE, marks=pytest.mark.slow),
        pytest.param("dc=2,pod=2", "drift dc*pod -> mean every 0", "ddp", marks=pytest.mark.slow),
    ],
)
def test_meetings_after_each_step_are_data_parallelism(mesh: str, line: str, inner: str) -> None:
    for losses, worst, _ in launch(averaged, mesh, line, inner, ranks=4):
        assert losses < 1e-6  # printed losses are float32
        assert worst < 1e-12


# -- the mean every H steps --------------------------------------------------------------------------------------------


def from_different_starts(mesh: str, inner: str) -> tuple[Tensor, Tensor]:
    """Return the weights before and after a meeting of replicas that train nothing."""
    module = parallel(f"drift pod -> mean; {inner}", mesh)
    add(module, float(module.replicas.index))
    before = weights(module)
    train(module, 1, lr=0.0)
    return before, weights(module)


def every(line: str, steps: int) -> list[Tensor]:
    module = parallel(f"{line}; ddp")
    return [after for _, after in train(module, steps)]


def check_means(mesh: str, inner: str) -> None:
    found = launch(from_different_starts, mesh, inner, ranks=4)
    starts = torch.stack([before for before, _ in found])
    for _, after in found:
        assert torch.equal(after, found[0][1]), "one meeting makes all replicas equal"
        assert apart(after, starts.mean(0)) < 1e-12


@pytest.mark.slow
def test_a_meeting_makes_replicas_equal() -> None:
    check_means("pod=4", "ddp")


@pytest.mark.slow
def test_a_meeting_makes_replicas_of_several_ranks_equal() -> None:
    check_means("pod=2,dp=2", "fsdp(fsdp=dp)")


def differ(runs: list[list[Tensor]], step: int) -> bool:
    """Return whether two replicas differ after a step, counted from 1."""
    return any(not torch.equal(run[step - 1], runs[0][step - 1]) for run in runs)


@pytest.mark.slow
def test_replicas_are_equal_at_meetings_alone() -> None:
    runs = launch(every, "drift pod -> mean every 16", 33, ranks=4)
    assert [step for step in range(1, 34) if not differ(runs, step)] == [16, 32]
    runs = launch(every, "drift pod -> mean every 4, warmup 3", 12, ranks=4)
    assert [step for step in range(1, 13) if not differ(runs, step)] == [1, 2, 3, 7, 11]


# -- outer optimizers --------------------------------------------------------------------------------------------------


def outer_steps() -> dict[str, Any]:
    """Return what outer optimizers make of the same training."""
    outers = ("", ", outer sgd(1.0)", ", outer nesterov(1.0)", ", outer nesterov(0.7, 0.9)", ", outer sgd(0.5, 0.8)")
    runs = {line: [one for _, one in train(parallel(f"drift pod -> mean every 3{line}; ddp"), 6)] for line in outers}
    start = weights(parallel("drift pod -> mean; ddp"))
    apart_from_all = [one for _, one in train(parallel("drift pod -> mean every 100; ddp"), 3)][-1]
    return {**runs, "start": start, "trained": apart_from_all}


@pytest.mark.slow
def test_outer_optimizers() -> None:
    found = launch(outer_steps, ranks=4)
    mean = found[0][""]
    for line in (", outer sgd(1.0)", ", outer nesterov(1.0)"):
        for step in (3, 6):
            assert apart(found[0][line][step - 1], mean[step - 1]) < 1e-12
    start = found[0]["start"]
    delta = torch.stack([start - one["trained"] for one in found]).mean(0)
    by_hand = start - 0.7 * 1.9 * delta
    assert apart(found[0][", outer nesterov(0.7, 0.9)"][2], by_hand) < 1e-12
    assert apart(found[0][", outer sgd(0.5, 0.8)"][2], start - 0.5 * delta) < 1e-12


# -- unequal shares ----------------------------------------------------------------------------------------------------


def in_shares(
    line: str, optimizer: Callable[..., Any], clip: bool, mesh: str = "pod=2", is_local: bool = True
) -> tuple[float, list[float]]:
    """Train replicas with 12 and 4 rows, and one process with all rows; return how far their weights are.

    The rows are given by each rank, or cut from the whole batch as the line says.
    """
    rows, start = ((12, 0), (4, 12))[torch.distributed.get_rank() * 2 // autopar.Mesh(mesh).size]
    part = slice(start, start + rows) if is_local else slice(None)
    inputs = {name: value[part] for name, value in batches(1, 16)[0].items()}
    module = autopar.parallelize(Regression().double(), mesh, inputs, layout=f"{line}; ddp", local_inputs=is_local)
    alone = Regression().double()
    own, other = optimizer(module.parameters()), optimizer(alone.parameters())
    for batch in batches(5, 16):
        own.zero_grad(), other.zero_grad()
        module(**{name: value[part] for name, value in batch.items()}).backward()
        alone(**batch).backward()
        if clip:
            module.replicas.average_gradients()
            for parameters in (module.parameters(), alone.parameters()):
                torch.nn.utils.clip_grad_norm_(parameters, 0.1)
        own.step(), other.step()
    expected = torch.cat([parameter.detach().reshape(-1) for parameter in alone.parameters()])
    return apart(weights(module), expected), [module.replicas.weight]


def adam(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=1e-2)


@pytest.mark.parametrize("clip", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_unequal_shares_are_one_process(clip: bool) -> None:
    found = launch(in_shares, "drift pod -> mean every 0", adam, clip, ranks=2)
    assert max(worst for worst, _ in found) < 1e-12
    assert [weight for _, weight in found] == [[0.75], [0.25]]


@pytest.mark.slow
def test_shares_of_a_line_cut_the_whole_batch() -> None:
    """On replicas of two ranks, which split their 12 and 4 rows evenly."""
    found = launch(in_shares, "drift pod -> mean every 0, by 3:1", adam, False, "pod=2,dp=2", False, ranks=4)
    assert max(worst for worst, _ in found) < 1e-12
    assert [weight for _, (weight,) in found] == [0.75, 0.75, 0.25, 0.25]


def by_speed() -> tuple[int, float, str]:
    """Return the rows of this replica and its weight after a step, and the error without a cluster."""
    (inputs,) = batches(1, 4000)
    layout = "drift pod -> mean every 0, by speed; ddp"
    model = Regression(width=4096).double()
    module = autopar.parallelize(model, "pod=2@network", inputs, layout=layout, cluster="h100-a100")
    module(**inputs).backward()
    SGD(module.parameters(), lr=0.1).step()
    try:
        autopar.parallelize(Regression(), "pod=2", inputs, layout=layout)
        error = ""
    except autopar.AutoparError as found:
        error = str(found).splitlines()[0]
    return module.graph.dims["batch"].size, module.replicas.weight, error


@pytest.mark.slow
def test_shares_by_the_speeds_of_a_cluster() -> None:
    """The first replica is on an H100, the second one on an A100; without a cluster nothing is known of them."""
    found = launch(by_speed, ranks=2)
    (fast, fast_weight, _), (slow, slow_weight, _) = found
    assert fast + slow == 4000
    assert fast > 2 * slow
    assert (fast_weight, slow_weight) == (fast / 4000, slow / 4000)
    assert all("E5: the speeds of the replicas along pod are unknown" in error for *_, error in found)


def odd_rows() -> str:
    """Return the error of replicas of two ranks one of which has rows that they cannot split."""
    try:
        (inputs,) = batches(1, 7)
        autopar.parallelize(
            Regression().double(), "pod=2,dp=2", inputs, layout="drift pod -> mean, by 4:3; batch -> dp; * -> none"
        )
    except autopar.AutoparError as error:
        return str(error).splitlines()[0]
    return ""


@pytest.mark.slow
def test_rows_that_a_replica_cannot_split_are_an_error_everywhere() -> None:
    first, second, *others = launch(odd_rows, ranks=4)
    what = "E4: the dim 'batch' of x can take no alternative of its rule: dp = 2 does not divide 3"
    assert others == [what, what]
    assert first == second == f"rank 2 stopped, so this rank stops as well: {what}"


def sgd(parameters: Any) -> Any:
    return SGD(parameters, lr=0.1)


@pytest.mark.slow
def test_the_mean_of_parameters_counts_rows() -> None:
    assert max(worst for worst, _ in launch(in_shares, "drift pod -> mean", sgd, False, ranks=2)) < 1e-12


def under_strategies() -> dict[str, float]:
    """Train three steps under each strategy of replicas; return how far its weights went."""
    found = {}
    for name in ("local_sgd", "diloco", "gossip", "parameter_server"):
        module = parallel(name, "pod=2,dp=2")
        start = weights(module)
        steps = train(module, 3)
        module.replicas.finish()
        found[name] = apart(start, steps[-1][1])
    return found


@pytest.mark.slow
def test_strategies_of_replicas_run() -> None:
    for found in launch(under_strategies, ranks=4):
        assert all(0.001 < moved < 10 for moved in found.values()), found


# -- several optimizers, dropout, copies -------------------------------------------------------------------------------


def with_two_optimizers() -> tuple[list[Tensor], list[Tensor], str]:
    one = parallel("drift pod -> mean every 2; ddp", "pod=2")
    two = parallel("drift pod -> mean every 2; ddp", "pod=2")
    parts = [list(two.parameters())[:2], list(two.parameters())[2:]]
    both = [SGD(part, lr=0.1) for part in parts]

    class Both:
        def zero_grad(self) -> None:
            for each in both:
                each.zero_grad()

        def step(self) -> None:
            for each in both:
                each.step()

    first, second = train(one, 4), train(two, 4, Both())
    partly = parallel("drift pod -> mean every 2; ddp", "pod=2")
    try:
        train(partly, 2, SGD(list(partly.parameters())[:2], lr=0.1))
        error = ""
    except autopar.AutoparError as found:
        error = str(found)
    return [after for _, after in first], [after for _, after in second], error


def dropped(mesh: str, inner: str) -> Tensor:
    """Return the first gradients of replicas that have the same rows and the same generators."""
    inputs = {name: value[:4] for name, value in batches(1)[0].items()}
    model = Regression(dropout=0.5).double()
    module = autopar.parallelize(model, mesh, inputs, layout=f"drift pod -> mean; {inner}", local_inputs=True)
    torch.manual_seed(3)
    module(**inputs).backward()
    gradients: list[Any] = [parameter.grad for parameter in module.parameters()]
    return torch.cat([one.full_tensor().reshape(-1) for one in gradients])


@pytest.mark.slow
def test_two_optimizers_make_one_step() -> None:
    for first, second, error in launch(with_two_optimizers, ranks=2):
        assert all(map(torch.equal, first, second))
        assert error.startswith("no optimizer has layers.3.weight, layers.3.bias: expected a step of all 4 trained")


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "inner"), [("pod=4", "ddp"), ("pod=2,dp=2", "* -> none")])
def test_replicas_drop_other_elements(mesh: str, inner: str) -> None:
    found = launch(dropped, mesh, inner, ranks=4)
    size = 4 // autopar.Mesh(mesh).extent("pod")
    replicas = found[::size]
    assert all(torch.equal(one, found[i - i % size]) for i, one in enumerate(found)), "ranks of a replica agree"
    assert all(apart(one, other) > 1e-3 for i, one in enumerate(replicas) for other in replicas[:i])
