"""What is sent before and after the graph of a call: which sums those are, when they are waited for, what they give."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.errors import AutoparError
from autopar.lowering.collectives.process_groups import device_mesh
from autopar.lowering.modules.late_tensor import LateTensor
from autopar.mesh import Mesh
from autopar.runtime.agreement import Agreement
from autopar.runtime.shared_memory import EXCHANGES, UNREAD, SharedMemory
from tests.gaps import number
from tests.runtime.launcher import endings, launch


class Classifier(nn.Module):
    """`how` makes the loss of the logits and the targets, and what else comes out."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layer = nn.Linear(8, 5)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, targets: Tensor) -> Any:
        logits = self.layer(x)
        loss = F.cross_entropy(logits, targets)
        if self.how == "scaled":
            return -2.0 * (loss / 4)
        if self.how == "twice":
            return loss, loss
        if self.how == "two":
            return loss, logits.square().mean()
        if self.how == "sum of two":
            return loss + 0.01 * logits.square().mean()
        if self.how == "count":
            return loss, (targets >= 0).sum()
        if self.how == "squared":
            return loss.square()
        if self.how == "used again":
            self.seen = self.seen + loss.detach()
            return loss
        return loss


HOW = {
    # How many sums are sent before the graph and after it, how many the graph takes, and how many results are divided
    # after it.
    "plain": (1, 1, 0, 1),
    "scaled": (1, 1, 0, 1),
    "two": (1, 2, 0, 1),
    "twice": (1, 1, 0, 1),
    "sum of two": (1, 1, 1, 0),
    "count": (2, 1, 1, 1),
    "squared": (1, 0, 1, 0),
    "used again": (1, 0, 1, 0),
    "no targets": (1, 1, 0, 1),
}


def run(how: str, mesh: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Classifier(how).double()
    x, targets = torch.randn(8, 8, dtype=torch.float64), torch.tensor([0, 1, -100, 2, 3, -100, -100, 4])
    parallel = autopar.parallelize(model, mesh, (x, targets), layout="batch -> dp; * -> none")
    for tensor in (x, targets):  # other numbers than those that it was traced with
        tensor.copy_(tensor.flip(0))
    if how == "no targets":
        targets.fill_(-100)
    alone, results = model(x, targets), parallel(x, targets)
    alone, results = [one if isinstance(one, tuple) else (one,) for one in (alone, results)]
    is_late = [type(one) is LateTensor for one in results]
    for expected, found in zip(alone, results, strict=True):
        if found.requires_grad:
            expected.backward(retain_graph=True)
            found.backward(retain_graph=True)
    still = [type(one) is LateTensor for one in results]
    pairs = [(found.detach(), expected.detach()) for found, expected in zip(results, alone, strict=True)]
    pairs += [(p.grad.full_tensor(), q.grad) for p, q in zip(parallel.parameters(), model.parameters(), strict=True)]
    pairs += [(found.clone(), expected) for found, expected in zip(parallel.buffers(), model.buffers(), strict=True)]
    ends = parallel.emitted.ends
    sent = len(ends.early), len(ends.late), len(ends.taken), sum(one.divisor is not None for one in ends.late)
    with torch.no_grad():
        calm = parallel(x, targets)
    return {
        "sent": sent,
        "is late": is_late,
        "still": still,
        "error": max(
            number((a - b).abs().nan_to_num(0.0 if a.isnan().equal(b.isnan()) else 9.0).max()) for a, b in pairs
        ),
        "is nan": bool(pairs[0][0].isnan()),
        "without gradients": [type(one) is LateTensor for one in (calm if isinstance(calm, tuple) else (calm,))],
        "code": parallel.code,
    }


def run_all(mesh: str) -> dict[str, dict[str, Any]]:
    return {how: run(how, mesh) for how in HOW}


def by_gloo(mesh: str) -> dict[str, dict[str, Any]]:
    """As ranks on several hosts exchange numbers."""
    Agreement.open_channel = lambda self: None  # type: ignore[method-assign]
    return run_all(mesh)


def by_collectives(mesh: str) -> dict[str, dict[str, Any]]:
    """As ranks with devices of their own exchange numbers."""
    Agreement.is_cheap = property(lambda self: False)  # type: ignore[assignment,method-assign]
    return run_all(mesh)


@pytest.mark.parametrize(
    "way", [run_all, *(pytest.param(way, marks=pytest.mark.slow) for way in (by_gloo, by_collectives))]
)
@pytest.mark.parametrize(("mesh", "ranks"), [("dp=2", 2), pytest.param("dp=2,tp=2", 4, marks=pytest.mark.slow)])
def test_sums_at_the_ends_of_a_call(way: Any, mesh: str, ranks: int) -> None:
    for found in launch(way, mesh, ranks=ranks, seconds=200):
        for how, sent in HOW.items():
            one, late = found[how], sent[1]
            assert one["sent"] == sent, how
            assert one["is nan"] == (how == "no targets"), "the loss of no target is no number"
            assert one["error"] < 1e-12, how
            assert sum(one["is late"]) == late + (how in ("count", "twice")), how
            assert one["still"] == one["is late"], f"{how}: a backward does not look"
            assert one["without gradients"] == [how == "count" and place == 1 for place in range(len(one["is late"]))]
        assert found["plain"]["code"].index("before") < found["plain"]["code"].index("/cross_entropy_loss[]")


def compiled_around() -> list[float]:
    """Functions that are compiled with a call in them: one goes on with the loss, one has the backward, too."""
    torch.manual_seed(0)
    model, x, targets = Classifier("plain").double(), torch.randn(8, 8).double(), torch.arange(8) % 5
    parallel = autopar.parallelize(model, "dp=2", (x, targets), layout="batch -> dp; * -> none")
    expected = model(x, targets)
    expected.backward()

    def halved() -> Tensor:
        return parallel(x, targets) / 2 + 1

    def stepped() -> Tensor:
        loss: Tensor = parallel(x, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    found = []
    compiled = [torch.compile(function, backend="aot_eager") for function in (halved, stepped)]
    for _ in range(3):
        parallel.zero_grad()
        found.append(float(compiled[0]().detach() - (expected / 2 + 1)))
        found.append(float(compiled[1]() - expected))
        for p, q in zip(parallel.parameters(), model.parameters(), strict=True):
            found.append(float((p.grad.full_tensor() - q.grad).abs().max()))
    return found


def test_in_functions_that_are_compiled() -> None:
    for found in launch(compiled_around, ranks=2, seconds=300):
        assert max(map(number, map(abs, found))) < 1e-12


def compiled_apart() -> list[Any]:
    """A compiled graph that sends nothing runs before the ranks are compared: they differ in a batch, then in sizes."""
    torch.manual_seed(0)
    model, x, targets = Classifier("plain").double(), torch.randn(8, 8).double(), torch.arange(8) % 5
    parallel = autopar.parallelize(model, "dp=2", (x, targets), layout="batch -> dp; * -> none")
    compiled: Any = torch.compile(parallel, backend="aot_eager")
    expected, found = model(x, targets), []
    other = dist.get_rank() == 1
    for given in ((x, targets), (x, targets.flip(0)), (x, targets), (x[:4], targets[:4]), (x, targets)):
        try:
            loss = compiled(*(given if other else (x, targets)))
            loss.backward()
            found.append(float((loss.detach() - expected).abs()))
        except AutoparError as error:
            found.append(str(error))
    return [parallel.emitted.sends, *found]


def test_compiled_graphs_of_ranks_that_differ() -> None:
    for sends, *found in launch(compiled_apart, ranks=2, seconds=300):
        assert not sends
        assert max(number(error) for error in found[::2]) < 1e-12
        assert "targets differs between rank 0 and rank 1" in found[1]
        assert "the ranks differ in shape of" in found[3]


def out_of_step() -> list[str]:
    """A rank leaves a call between its forward and the result of that, and makes another one."""
    torch.manual_seed(0)
    model, x, targets = Classifier("plain"), torch.randn(8, 8), torch.arange(8) % 5
    parallel = autopar.parallelize(model, "dp=2", (x, targets), layout="batch -> dp; * -> none")
    found = []

    def call() -> None:
        parallel(x, targets).item()

    def broken(*args: Any) -> Any:
        raise RuntimeError("out of memory")

    parallel(x, targets).item()
    ends = parallel.emitted.ends
    if dist.get_rank() == 1:
        object.__setattr__(ends, "last", broken)
    for _ in range(1 + dist.get_rank()):
        try:
            call()
            found.append("no error")
        except (AutoparError, RuntimeError) as error:
            found.append(str(error))
        ends.__dict__.pop("last", None)
    return found


def test_a_call_that_is_left_is_an_error_on_all() -> None:
    first, second = launch(out_of_step, ranks=2, seconds=100)
    assert second[0] == "out of memory"
    assert "another rank began a call and did not finish it" in first[0]
    assert "rank 0 stopped, so this rank stops as well" in second[1]


# -- the memory that ranks share --------------------------------------------------------------------------------------


def exchange_many() -> dict[str, Any]:
    talk = Agreement(device_mesh(Mesh("a=3")))
    talk.open_channel()
    me = dist.get_rank()
    begun = []
    for turn in range(5 * EXCHANGES):
        if me == turn % 3:
            time.sleep(0.002)  # each of them is late at times
        begun.append(talk.begin(turn, (me, turn * 0.1 + me, -turn)))
    results = [one.result() for one in begun]
    differ = talk.begin(me, (7,)).result()
    return {"channel": talk.channel is not None, "results": results, "differ": differ}


def test_numbers_go_through_shared_memory() -> None:
    expected = [[[rank, n * 0.1 + rank, -n] for rank in range(3)] for n in range(5 * EXCHANGES)]
    for found in launch(exchange_many, ranks=3, seconds=100):
        assert found["channel"], "three ranks on one host"
        assert found["results"] == expected
        assert found["differ"] is None


def test_ranks_that_never_read_do_not_wait_for_each_other() -> None:
    created = SharedMemory.create(2)
    assert created is not None
    with created[1] as file:
        # In one process: a rank that waits here waits for nobody, which is an error.
        ranks = [SharedMemory(file, me, 2, limit_seconds=0.5) for me in (0, 1)]
        # Each is ahead in turn, by as many exchanges as it may leave unread.
        for turn in range(4 * EXCHANGES):
            for rank in ranks if turn % 2 else ranks[::-1]:
                for number in range(UNREAD):
                    last = rank.send((turn, number))
    assert [row[:2] for row in last.rows()] == [[turn, UNREAD - 1]] * 2


def without_memory() -> tuple[bool, Any]:
    """One rank does not see the file: all of them go without."""
    if dist.get_rank() == 1:
        SharedMemory.open = staticmethod(lambda *_: None)  # type: ignore[method-assign]
    talk = Agreement(device_mesh(Mesh("a=2")))
    talk.open_channel()
    return talk.channel is not None, talk.begin(5, (dist.get_rank(), 0.5)).result()


def test_where_a_rank_does_not_see_the_memory_none_uses_it() -> None:
    assert launch(without_memory, ranks=2, seconds=100) == [(False, [[0, 0.5], [1, 0.5]])] * 2


def wait_for_nobody(how: str) -> None:
    talk = Agreement(device_mesh(Mesh("a=2")))
    talk.open_channel()
    talk.begin(1).result()
    if dist.get_rank() == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)
    talk.begin(2).result()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("killed", "the process of rank 1 of the mesh has ended, but this rank waits for it"),
        ("stuck", "for rank 1 of the mesh to make"),
    ],
)
def test_who_is_waited_for_in_vain_is_told(how: str, said: str) -> None:
    first, _ = endings(wait_for_nobody, how, ranks=2, limit_seconds=3, seconds=100, lost=1)
    assert first.code == 1, first
    assert said in first.log


def test_shared_memory_has_no_name_in_any_folder() -> None:
    before = set(Path("/dev/shm").glob("autopar-*"))
    created = SharedMemory.create(2)
    assert created is not None
    place, file = created
    assert set(Path("/dev/shm").glob("autopar-*")) == before, "nothing is left when a rank dies now"
    assert SharedMemory.open(place, 0, 2, 1.0, file) is not None
    path, _, name = place.rpartition(":")
    assert SharedMemory.open(f"{path}:{name[:-1]}-", 1, 2, 1.0) is None, "another file, on another host"
    file.close()
    assert SharedMemory.open(place, 0, 2, 1.0) is None
    assert SharedMemory.open(None, 0, 2, 1.0) is None
