"""Gathers and reductions of a call with micro-batches run beside its compute, and give the same gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.lowering.modules import loop_buckets
from autopar.lowering.modules.gradient_sums import GradientSums
from autopar.lowering.modules.micro_loop import MicroBatchLoop
from autopar.lowering.modules.pipeline_loop import PipelineLoop
from examples.gpt import gpt
from tests.runtime.launcher import launch
from tests.runtime.sent import Counted
from tests.runtime.training import gradients, worst

SIZES: dict[str, Any] = {"layers": 4, "batch": 8, "seq": 12, "vocab": 104}


def pair(layout: str, mesh: str, **options: Any) -> tuple[nn.Module, Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, inputs = gpt(**SIZES)
    model = model.double()
    return model, autopar.parallelize(model, mesh, inputs, layout=layout, **options), inputs


def loop_of(parallel: Any) -> Any:
    kinds = MicroBatchLoop, PipelineLoop
    (found,) = (one for one in parallel.emitted.graph_module.modules() if isinstance(one, kinds))
    return found


@contextmanager
def events() -> Iterator[list[str]]:
    """Starts and ends of backwards, waits for gathers, and begins of reductions, in their order."""
    found: list[str] = []
    add, begin, arrive = GradientSums.add, loop_buckets._Reduction.__init__, loop_buckets.LoopBucket.arrive

    def added(*args: Any, **others: Any) -> Any:
        found.append("backward")
        try:
            return add(*args, **others)
        finally:
            found.append("end")

    def begun(self: Any, *args: Any) -> None:
        found.append("reduction")
        begin(self, *args)

    def arrived(self: Any) -> None:
        if self._coming is not None:
            found.append("gather")
        arrive(self)

    with (
        mock.patch.object(GradientSums, "add", added),
        mock.patch.object(loop_buckets._Reduction, "__init__", begun),
        mock.patch.object(loop_buckets.LoopBucket, "arrive", arrived),
    ):
        yield found


def order_of(layout: str, mesh: str) -> tuple[list[str], int, dict[str, int], list[str]]:
    """Events of a forward, the number of buckets, collectives of a step, and events of its backward."""
    _, parallel, inputs = pair(layout, mesh)
    parallel(**inputs).backward()
    parallel.zero_grad()
    with events() as found, Counted() as sent:
        loss = parallel(**inputs)
        first = list(found)
        found.clear()
        loss.backward()
    return first, len(loop_of(parallel).buckets.every), dict(sent.counts), found


def before_the_last_backward(found: list[str]) -> int:
    last = len(found) - 1 - found[::-1].index("backward")
    return found[:last].count("reduction")


def within_the_last_backward(found: list[str]) -> int:
    last, end = (len(found) - 1 - found[::-1].index(one) for one in ("backward", "end"))
    return found[last:end].count("reduction")


# Layout, mesh, and by stage: reductions before the last backward, and within it; the others follow it.
ORDERS = [
    ("micro 4; fsdp(fsdp=dp)", "dp=2", [(0, 5, 5)]),
    ("micro 4; ddp", "dp=2", [(0, 1, 1)]),
    ("micro 4; pipeline pp interleaved(2); fsdp(fsdp=dp)", "pp=2,dp=2", [(1, 1, 2), (1, 1, 3)]),
    ("micro 4; zero1", "dp=2", [(0, 5, 5)]),
    # The table of tokens and logits is complete when its gradient has come from the first stage.
    ("micro 4; pipeline pp 1f1b; zero1", "pp=2,dp=2", [(0, 2, 2), (0, 2, 3)]),
    ("micro 4; pipeline pp gpipe; fsdp(fsdp=dp)", "pp=2,dp=2", [(0, 2, 2), (0, 2, 3)]),
]


@pytest.mark.parametrize(
    ("layout", "mesh", "stages"),
    [pytest.param(*case, marks=() if place < 3 else pytest.mark.slow) for place, case in enumerate(ORDERS)],
)
def test_reductions_begin_before_the_end(layout: str, mesh: str, stages: list[tuple[int, int, int]]) -> None:
    results = launch(order_of, layout, mesh, ranks=autopar.Mesh(mesh).size, seconds=120)
    for rank, (found, buckets, sent, backward) in enumerate(results):
        early, within, total = stages[rank * len(stages) // len(results)]
        # Once each, although gradients come in each micro-batch.
        assert found.count("reduction") == buckets == total
        assert before_the_last_backward(found) == early
        assert within_the_last_backward(found) == within
        assert not backward
        if "ddp" not in layout:
            # Each gather is waited for by the graph that reads it. The table of positions is read before the loop.
            assert found.count("gather") == buckets
            assert sent["all_gather_into_tensor"] == sent["reduce_scatter_tensor"]


def kept_apart(layout: str, mesh: str) -> dict[str, float]:
    """Errors of gradients of calls whose reductions began in their forward, or were left to the backward."""
    found: dict[str, float] = {}
    model, parallel, inputs = pair(layout, mesh)

    def compare(name: str, calls: float) -> None:
        model.zero_grad()
        (model(**inputs) * calls).backward()
        found[name] = worst(gradients(parallel), gradients(model))
        parallel.zero_grad()

    for scale in (1.0, 3.0, 0.5):
        (parallel(**inputs) * scale).backward()
    compare("scaled", 4.5)
    loss = parallel(**inputs)
    loss.backward(retain_graph=True)
    loss.backward()
    compare("twice", 2)
    parallel(**inputs)  # its backward never comes
    with parallel.no_sync():
        loss = parallel(**inputs)
    loss.backward()
    parallel(**inputs).backward()
    compare("a backward after no_sync", 2)
    loss = parallel(**inputs)
    with parallel.no_sync():
        (parallel(**inputs) * 2).backward()
        (parallel(**inputs) * 4).backward()
    loss.backward()
    compare("a forward before no_sync", 7)
    first, second = parallel(**inputs), parallel(**inputs)
    (first * 2 + second).backward()
    compare("two forwards", 3)
    with torch.no_grad():
        found["no grad"] = float((parallel(**inputs) - model(**inputs)).abs())
    return found


EXACT = [
    ("micro 2; fsdp(fsdp=dp)", "dp=2"),
    ("micro 2; ddp", "dp=2"),
    ("micro 2; pipeline pp interleaved(2); zero1", "pp=2,dp=2"),
    ("micro 2; zero1", "dp=2"),
    ("micro 2; pipeline pp 1f1b; fsdp(fsdp=dp)", "pp=2,dp=2"),
    ("micro 2; pipeline pp zero_bubble; fsdp(fsdp=dp)", "pp=2,dp=2"),
    ("micro 2; pipeline pp gpipe; ddp", "pp=2,dp=2"),
    ("micro 2; fsdp_tp(fsdp=dp)", "dp=2,tp=2"),
    # ZeRO-1, whose gradients stay whole under `no_sync`, with buckets in the body.
    ("micro 2; regather @*; zero1", "dp=2"),
    ("micro 2; pipeline pp 1f1b; regather @*; zero1", "pp=2,dp=2"),
]


@pytest.mark.parametrize(
    ("layout", "mesh"),
    [pytest.param(*case, marks=() if place in (1, 8) else pytest.mark.slow) for place, case in enumerate(EXACT)],
)
def test_gradients_are_handed_out_at_the_backward(layout: str, mesh: str) -> None:
    for found in launch(kept_apart, layout, mesh, ranks=autopar.Mesh(mesh).size, seconds=200):
        for name, error in found.items():
            assert error < 1e-12, name


class Steep(nn.Module):
    """Two products; the gradients of one half of the first one are large."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)
        nn.init.constant_(self.up.weight, 0.1)
        nn.init.constant_(self.down.weight, 0.001)
        with torch.no_grad():
            self.down.weight[:, :4] = 100

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x)).float().sum()


def on_one_rank(layout: str, mesh: str) -> float:
    """Error of gradients that the first scale of float16 makes infinite on one rank alone."""
    model, x = Steep(), torch.full((8, 4), 0.01)
    parallel = autopar.parallelize(model, mesh, (x,), layout=layout, precision="fp16", outputs="full")
    parallel(x).backward()
    model(x).backward()
    return worst(gradients(parallel), gradients(model))


@pytest.mark.parametrize(
    ("layout", "mesh"),
    [
        ("micro 2; d_ff -> tp; * -> none", "tp=2"),
        pytest.param("micro 2; pipeline pp 1f1b; d_ff -> tp; * -> none", "pp=1,tp=2", marks=pytest.mark.slow),
    ],
)
def test_all_ranks_run_a_loop_again_where_one_overflows(layout: str, mesh: str) -> None:
    """The bodies of the loop send, so a rank that ran it alone would wait for ever."""
    assert max(launch(on_one_rank, layout, mesh, ranks=2, seconds=60)) < 1e-2


def of_each_rank() -> float:
    """Difference of gradients with and without micro-batches, where each rank multiplies its own loss."""
    rank, grads = dist.get_rank(), []
    for layout in ("micro 2; ddp", "ddp"):
        _, parallel, inputs = pair(layout, "dp=2", outputs="local")
        for _ in range(2):
            parallel.zero_grad()
            (parallel(**inputs) * (1 + 2 * rank)).backward()
        grads.append(gradients(parallel))
    return worst(*grads)


def test_each_rank_may_multiply_its_loss() -> None:
    assert max(launch(of_each_rank, ranks=2, seconds=120)) < 1e-12
