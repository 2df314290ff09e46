"""Meetings in parts, late, coded and with neighbours, on real processes; checkpoints of all of them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import autopar
from autopar.runtime.module import ParallelModule
from tests.runtime.launcher import launch
from tests.runtime.test_drift import PIPELINE, add, apart, batches, parallel, train, weights

pytestmark = pytest.mark.slow


def still(line: str, steps: int, mesh: str = "pod=4") -> list[Tensor]:
    """Return the weights of a replica, from the start on, where no step changes anything and each starts elsewhere."""
    module = parallel(f"{line}; ddp", mesh)
    add(module, float(module.replicas.index) ** 2)
    return [weights(module), *(after for _, after in train(module, steps, lr=0.0))]


def stills(line: str, steps: int, mesh: str = "pod=4") -> Tensor:
    """Return the weights of all replicas, by step."""
    found = launch(still, line, steps, mesh, ranks=autopar.Mesh(mesh).size)
    return torch.stack([torch.stack(one) for one in found], dim=1)


def check_constant_mean(found: Tensor) -> None:
    assert apart(found.mean(1), found[:1].mean(1).expand_as(found[:, 0])) < 1e-12


# -- neighbours --------------------------------------------------------------------------------------------------------


def test_a_ring_contracts_by_a_third() -> None:
    found = stills("drift pod -> ring", 4)
    check_constant_mean(found)
    spread = (found - found.mean(1, keepdim=True)).flatten(1).norm(dim=1)
    assert apart(spread[1:], spread[:-1] / 3) < 1e-12


@pytest.mark.parametrize("replicas", [2, 3])
def test_small_rings(replicas: int) -> None:
    found = stills("drift pod -> ring every 2", 4, f"pod={replicas}")
    check_constant_mean(found)
    expected = found[0]
    for step in range(1, 5):
        if step % 2 == 0:
            expected = (expected.roll(1, 0) + expected + expected.roll(-1, 0)) / 3
        assert apart(found[step], expected) < 1e-12


def test_exponential_neighbours_agree_after_log_n_meetings() -> None:
    found = stills("drift pod -> exponential", 3)
    check_constant_mean(found)
    spread = (found - found.mean(1, keepdim=True)).abs().flatten(1).amax(1)
    assert spread[1] > 0.1
    assert spread[2] < 1e-12


# -- parts, late -------------------------------------------------------------------------------------------------------


def test_parts_meet_one_after_the_other() -> None:
    found = stills("drift pod -> mean every 4, parts 2", 10)
    check_constant_mean(found)
    half = found.shape[2] // 2
    equal = [(found[step] - found[step][:1]).abs().amax(0) < 1e-12 for step in range(11)]
    assert [bool(one[:half].all()) for one in equal] == [step >= 4 for step in range(11)]
    assert [bool(one[half:].all()) for one in equal] == [step >= 6 for step in range(11)]


def test_late_meetings_count_for_a_half() -> None:
    found = stills("drift pod -> mean every 4, late 2", 11)
    check_constant_mean(found)
    spread = (found - found.mean(1, keepdim=True)).flatten(1).norm(dim=1)
    halves = [0 if step < 6 else 1 if step < 10 else 2 for step in range(12)]
    assert apart(spread, spread[0] / 2.0 ** torch.tensor(halves, dtype=torch.float64)) < 1e-12


def streamed(line: str) -> tuple[list[Tensor], list[float], float]:
    module = parallel(f"{line}; ddp", width=200)
    found = train(module, 24)
    module.replicas.finish()
    return [after for _, after in found], [loss for loss, _ in found], module.replicas.sent_bytes


@pytest.mark.parametrize("coder", ["bfloat16", "int8", "topk 100%"])
def test_coded_meetings_are_near_plain_ones(coder: str) -> None:
    line = "drift pod -> mean every 8, outer nesterov(0.7, 0.9), parts 2, late 2"
    plain, coded = launch(streamed, line, ranks=4), launch(streamed, f"{line} as {coder}", ranks=4)
    size = plain[0][0][0].numel()
    bounds = {"bfloat16": 1e-3, "int8": 1e-2, "topk 100%": 1e-12}
    shares = {"bfloat16": 1 / 4, "int8": 1 / 8, "topk 100%": None}  # of float64
    for (one, _, sent), (other, _, coded_bytes) in zip(plain, coded, strict=True):
        assert apart(one[-1], other[-1]) < bounds[coder]
        assert apart(one[-1], one[0]) > 0.01, "it was trained"
        meetings = 3 + 2  # of the first part at 8, 16, 24, of the second at 12, 20
        assert sent == pytest.approx(meetings * 2 * 3 / 4 * 8 * size / 2, rel=0.02)
        if (share := shares[coder]) is not None:
            assert coded_bytes == pytest.approx(share * sent, rel=0.15), "with scales and numbers of rows"


def test_coded_gradients() -> None:
    """Each replica decodes the same sums, so replicas stay equal; what is lost comes later."""
    plain, coded = (launch(streamed, f"drift pod -> mean every 0{code}", ranks=4) for code in ("", " as bfloat16"))
    for (one, *_), (other, *_) in zip(plain, coded, strict=True):
        assert torch.equal(other[-1], coded[0][0][-1])
        assert 0 < apart(one[-1], other[-1]) < 1e-3


# -- checkpoints -------------------------------------------------------------------------------------------------------


def resumed(line: str, mesh: str, inner: str, folder: str, at: int) -> tuple[float, str]:
    """Return how far a run that was saved and loaded ends from one that went on."""

    def make() -> tuple[ParallelModule, Any]:
        module = parallel(f"{line}; {inner}", mesh)
        return module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

    def go(module: ParallelModule, optimizer: Any, first: int, last: int) -> None:
        for batch in batches(last)[first:]:
            optimizer.zero_grad()
            module(**batch).backward()
            optimizer.step()

    def state(module: ParallelModule, optimizer: Any) -> dict[str, Any]:
        own = module.replicas.own({"optimizer": get_optimizer_state_dict(module, optimizer)})
        return {"model": module.state_dict(), "drift": module.replicas.state_dict(), **own}

    module, optimizer = make()
    go(module, optimizer, 0, at)
    try:
        saved = state(module, optimizer)
    except autopar.AutoparError as error:
        return 0.0, str(error)
    dcp.save(saved, checkpoint_id=folder)
    go(module, optimizer, at, at + 7)
    other, again = make()
    add(other, 1.0)  # a run that loads nothing ends elsewhere
    loaded = state(other, again)
    dcp.load(loaded, checkpoint_id=folder)
    other.load_state_dict(loaded["model"])
    other.replicas.load_state_dict(loaded["drift"])
    own = next(iter(other.replicas.own(None)))
    set_optimizer_state_dict(other, again, loaded[own]["optimizer"])
    go(other, again, at, at + 7)
    dist.barrier()
    return apart(weights(module), weights(other)), ""


@pytest.mark.parametrize(
    ("line", "mesh", "inner", "at"),
    [
        ("drift pod -> mean every 3, outer nesterov(0.7, 0.9)", "pod=2,dp=2", "fsdp(fsdp=dp)", 6),
        ("drift pod -> mean every 6, outer nesterov(0.7, 0.9), parts 2, late 2 as int8", "pod=2,dp=2", "ddp", 7),
        ("drift pod -> mean every 3, outer nesterov(0.7, 0.9)", "pod=2,dp=2", PIPELINE, 6),
        ("drift pod -> mean every 6, parts 2, late 2", "pod=2", "ddp", 10),
        ("drift pod -> mean every 4 as topk 20%", "pod=2", "ddp", 4),
        ("drift pod -> exponential", "pod=4", "ddp", 5),
    ],
)
def test_a_run_goes_on_from_a_checkpoint(line: str, mesh: str, inner: str, at: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = str(Path(folder, "checkpoint"))
        for worst, error in launch(resumed, line, mesh, inner, place, at, ranks=autopar.Mesh(mesh).size):
            assert (error, worst) == ("", 0.0)


def test_a_checkpoint_between_meetings_is_an_error() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = launch(resumed, "drift pod -> mean every 4", "pod=2", "ddp", folder, 6, ranks=2)
    assert {error.splitlines()[0] for _, error in found} == {
        "a checkpoint at step 6 would mix replicas that differ: expected a step right after a meeting, got 2 steps "
        "after one"
    }
    assert all(error.endswith("fix: save at step 8, or another one after a meeting") for _, error in found)
