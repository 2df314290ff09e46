"""Exact counts of a step in stages: collectives of parameters, exchanges, live graphs; and bits of gradients.

Messages of values and micro-batches in flight are counted in `test_pipelines`, values that cross in
`tests/plans/test_pipelines`.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.lowering.modules import pipeline_loop
from autopar.runtime.call_cache import CallCache
from tests.runtime.launcher import launch
from tests.runtime.sent import Counted
from tests.runtime.test_pipelines import REGATHERED, loop_of, pair
from tests.runtime.training import gradients

PLAIN = "batch -> dp; * -> none"
ZERO2 = f"{PLAIN}; grad, opt {{ * -> dp | none }}"
GATHERS, SCATTERS = "all_gather_into_tensor", "reduce_scatter_tensor"


def counted(layout: str) -> tuple[dict[str, int], int]:
    """Collectives of one step on this rank, and the exchanges of small numbers with all ranks."""
    _, parallel, inputs = pair(layout, "pp=2,dp=2")
    parallel(**inputs).backward()
    exchanges, old = 0, CallCache.exchange

    def exchange(*args: Any, **others: Any) -> Any:
        nonlocal exchanges
        exchanges += 1
        return old(*args, **others)

    CallCache.exchange = exchange  # type: ignore[method-assign]
    with Counted() as sent:
        parallel(**inputs).backward()
    CallCache.exchange = old  # type: ignore[method-assign]
    return dict(sent.counts), exchanges


def counts() -> dict[tuple[str, str, int], tuple[dict[str, int], int]]:
    found = {}
    rests = {"plain": PLAIN, "fsdp": "fsdp", "zero2": ZERO2, "regathered": REGATHERED}
    for schedule in ("1f1b", "interleaved(2)"):
        for name, rest in rests.items():
            for count in (2, 4):
                found[schedule, name, count] = counted(f"micro {count}; pipeline pp {schedule}; {rest}")
    return found


@pytest.mark.slow
def test_collectives_of_parameters_do_not_depend_on_the_micro_batches() -> None:
    for found in launch(counts, ranks=4, seconds=200):
        for (schedule, name, count), (sent, exchanges) in found.items():
            chunks = 2 if "2" in schedule else 1
            if name == "regathered":
                # Each part gathers for its forward and for its backward of each micro-batch, and reduces after it.
                buckets, rest = divmod(sent[SCATTERS], count)
                assert not rest
                assert buckets >= chunks
                assert sent[GATHERS] == 2 * count * buckets, (schedule, count)
            else:
                assert sent == found[schedule, name, 2][0], (schedule, name)
                assert (GATHERS in sent) == (SCATTERS in sent) == (name != "plain"), (schedule, name, count)
            # The number of targets before the micro-batches, the loss after them.
            assert exchanges <= 2, (schedule, name, count)
            assert exchanges == found[schedule, name, 2][1]


def live(layout: str, mesh: str) -> int:
    """Most graphs of autograd that are alive at once, by the results of forwards."""
    _, parallel, inputs = pair(layout, mesh)
    parallel(**inputs).backward()
    graphs: list[weakref.ref[Tensor]] = []
    most, old = 0, pipeline_loop._Run._run

    def run(one: Any, item: Any, *others: Any) -> None:
        nonlocal most
        before = set(one.alive)
        old(one, item, *others)
        for key in set(one.alive) - before:
            alive = one.alive[key]
            graphs.append(weakref.ref([*alive.sent, *alive.results][0]))
        most = max(most, sum(ref() is not None for ref in graphs))

    pipeline_loop._Run._run = run  # type: ignore[method-assign]
    parallel(**inputs).backward()
    pipeline_loop._Run._run = old  # type: ignore[method-assign]
    return most


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "mesh", "alive"),
    [
        ("micro 8; pipeline pp 1f1b; * -> none", "pp=4", (4, 3, 2, 1)),
        ("micro 4; pipeline pp interleaved(2); * -> none", "pp=2", (5, 3)),
        ("micro 4; pipeline pp gpipe; * -> none", "pp=2", (4, 4)),
        ("micro 4; pipeline pp zero_bubble; * -> none", "pp=2", (2, 1)),
    ],
)
def test_graphs_of_micro_batches_in_flight_are_alive(layout: str, mesh: str, alive: tuple[int, ...]) -> None:
    assert tuple(launch(live, layout, mesh, ranks=len(alive), seconds=100)) == alive


def farthest() -> dict[str, float]:
    """Return the largest relative distance of a gradient from that under `1f1b`, by schedule."""
    found: list[dict[str, Tensor]] = []
    schedules = ("1f1b", "gpipe", "1f1b(+1)", "interleaved(2)", "zero_bubble")
    for schedule in schedules:
        _, parallel, inputs = pair(f"micro 4; pipeline pp {schedule}; * -> none", "pp=2")
        parallel(**inputs).backward()
        assert loop_of(parallel).is_scheduled
        found.append(gradients(parallel))
    first = found[0]
    return {
        schedule: max(float((one[name] - first[name]).abs().max() / first[name].abs().max()) for name in one)
        for schedule, one in zip(schedules, found, strict=True)
    }


@pytest.mark.slow
def test_gradients_have_the_same_bits_under_all_schedules() -> None:
    """Micro-batches add up in their order. Of `zero_bubble` the last bit may differ: a product adds to the sum."""
    for distances in launch(farthest, ranks=2, seconds=100):
        assert distances.pop("zero_bubble") < 4 * torch.finfo(torch.float64).eps
        assert set(distances.values()) == {0.0}
