"""Replicas that meet through servers, on real processes: exact where all wait, within `stale` where they need not."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.runtime.launcher import launch
from tests.runtime.test_drift import PIPELINE, SGD, add, apart, batches, parallel, train, weights
from tests.runtime.test_drift_meetings import resumed

pytestmark = pytest.mark.slow


def beside_the_mean(line: str, mean: str, mesh: str, inner: str) -> float:
    """Return how far replicas with servers are from those that meet in their mean."""
    served, averaged = parallel(f"drift pod -> {line}; {inner}", mesh), parallel(f"drift pod -> {mean}; {inner}", mesh)
    pairs = zip(train(served, 6), train(averaged, 6), strict=True)
    worst = max(apart(a, b) for (_, a), (_, b) in pairs)
    served.replicas.finish()
    return worst


@pytest.mark.parametrize(
    ("line", "mean", "mesh", "inner"),
    [
        ("server(2)", "mean", "pod=4", "ddp"),
        ("server(3) every 2, outer nesterov(0.7, 0.9)", "mean every 2, outer nesterov(0.7, 0.9)", "pod=4", "ddp"),
        ("server(1)", "mean", "pod=2,dp=2", "fsdp(fsdp=dp)"),
    ],
)
def test_servers_that_all_wait_for_are_the_mean(line: str, mean: str, mesh: str, inner: str) -> None:
    assert max(launch(beside_the_mean, line, mean, mesh, inner, ranks=4)) < 1e-12


def with_a_slow_rank(line: str, steps: int) -> tuple[int, float, Tensor, Tensor]:
    """Train beside a rank that sleeps; return the widest difference of clocks, the time, and the weights."""
    module = parallel(f"drift pod -> {line}; ddp")
    optimizer = SGD(module.parameters(), lr=0.05)
    begun = 0.0
    for number, batch in enumerate(batches(steps)):
        if number == 1:  # the first step starts the servers
            begun = time.monotonic()
        if module.replicas.index == 3:
            time.sleep(0.05)
        optimizer.zero_grad()
        module(**batch).backward()
        optimizer.step()
    seconds = time.monotonic() - begun
    meeting: Any = module.replicas.meeting
    widest = meeting.widest()
    start = weights(parallel("drift pod -> mean; ddp"))
    module.replicas.finish()
    return widest, seconds, weights(module), start


@pytest.mark.parametrize(("stale", "least", "most"), [("0", 1, 1), ("2", 2, 3), ("4", 4, 5), ("any", 6, 20)])
def test_clocks_differ_by_no_more_than_stale(stale: str, least: int, most: int) -> None:
    found = launch(with_a_slow_rank, f"server(2), stale {stale}", 20, ranks=4)
    # A push counts before it waits.
    assert all(least <= widest <= most for widest, *_ in found)
    for _, _, after, start in found:
        assert torch.equal(after, found[0][2]), "all get the parameters of the servers at the end"
        assert apart(after, start) > 0.01, "they were trained"


@pytest.mark.parametrize(
    "line", ["drift pod -> server(2) every 2, outer nesterov(0.7, 0.9)", "drift pod -> server(1) as int8"]
)
def test_a_run_goes_on_from_a_checkpoint(line: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = str(Path(folder, "checkpoint"))
        for worst, error in launch(resumed, line, "pod=2", "ddp", place, 3, ranks=2):
            assert (error, worst) == ("", 0.0)


@pytest.mark.parametrize("line", ["drift pod -> server(1), stale 2", "drift pod -> exponential, stale any"])
def test_replicas_that_are_apart_go_on_from_a_checkpoint(line: str) -> None:
    """Each from its own parameters; a run that loads nothing ends further away. Runs differ a little: nobody waits."""
    with tempfile.TemporaryDirectory() as folder:
        place = str(Path(folder, "checkpoint"))
        for worst, error in launch(resumed, line, "pod=2,dp=2", "ddp", place, 3, ranks=4):
            assert error == ""
            assert worst < 0.5


# -- asynchronous push -------------------------------------------------------------------------------------------------


def on_several_ranks(line: str, inner: str) -> tuple[list[tuple[str, Tensor]], float]:
    """Train replicas of two ranks; return the local parameters at the end, and how far the loss fell."""
    module = parallel(f"drift pod -> {line}; {inner}", "pod=2,dp=2")
    optimizer, losses = SGD(module.parameters(), lr=0.05), list[float]()
    rank = torch.distributed.get_rank()
    for batch in batches(1) * 12:
        if rank >= 2:
            time.sleep(0.03 * (1 + rank % 2))  # the ranks of a replica see different messages
        optimizer.zero_grad()
        loss = module(**batch)
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    module.replicas.state_dict()
    named = list(module.named_parameters())
    local = [(name, one.detach().to_local().clone()) for name, one in named]  # type: ignore[attr-defined]
    module.replicas.finish()
    return local, losses[-1] / losses[0]


@pytest.mark.parametrize(
    ("line", "inner"),
    [
        ("server(2), stale 2", "ddp"),
        ("server(1), stale any", PIPELINE),
        ("exponential, stale any", "ddp"),
        ("exponential, stale any", "fsdp(fsdp=dp)"),
    ],
)
def test_stale_replicas_of_several_ranks(line: str, inner: str) -> None:
    """Ranks with the same shard have the same values, whatever messages each of them has seen."""
    first, second, *others = launch(on_several_ranks, line, inner, ranks=4)
    for one, other in ((first, second), others):
        for (name, mine), (_, theirs) in zip(one[0], other[0], strict=True):
            if inner == "ddp":
                assert torch.equal(mine, theirs), name
            assert mine.isfinite().all()
    assert all(fell < 0.9 for _, fell in (first, second, *others))


def pushed(steps: int, lr: float) -> tuple[Tensor, Tensor, float, float]:
    """Return the weights at the start and at the end, the weight in the sum, and the time; one rank sleeps."""
    module = parallel("drift pod -> exponential, stale any; ddp")
    add(module, float(module.replicas.index))
    start, begun = weights(module), 0.0
    optimizer = SGD(module.parameters(), lr=lr)
    for number, batch in enumerate(batches(steps)):
        if number == 1:
            begun = time.monotonic()
        if module.replicas.index == 3:
            time.sleep(0.05)
        optimizer.zero_grad()
        module(**batch).backward()
        optimizer.step()
    seconds = time.monotonic() - begun
    meeting: Any = module.replicas.meeting
    state = module.replicas.state_dict()  # takes in what is under way
    assert float(state[f"replica{module.replicas.index}"]["weight"]) == meeting.w
    module.replicas.finish()
    return start, weights(module), meeting.w, seconds


def test_pushes_conserve_the_mean() -> None:
    found = launch(pushed, 30, 0.0, ranks=4)
    starts, ends = (torch.stack([one[i] for one in found]) for i in (0, 1))
    masses = torch.tensor([one[2] for one in found], dtype=torch.float64)
    assert float(masses.sum()) == pytest.approx(4.0, abs=1e-12)
    assert apart((masses[:, None] * ends).sum(0) / 4, starts.mean(0)) < 1e-10
    spread = [float((one - one.mean(0)).norm()) for one in (starts, ends)]
    assert spread[1] < 0.5 * spread[0], "they have come nearer"


def test_pushes_train() -> None:
    for start, end, mass, _ in launch(pushed, 40, 0.05, ranks=4):
        assert end.isfinite().all()
        assert apart(start, end) > 0.01
        assert 0 < mass < 4
