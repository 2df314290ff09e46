"""All-gathers of which several are pending on Gloo: right, and the processes live on."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import autopar
from autopar.lowering.collectives.gather import begin_gather
from examples.gpt import gpt
from tests.runtime.launcher import launch
from tests.runtime.sent import Counted

# Their works on Gloo have names of more than 15 letters.
UNSAFE = frozenset(("all_gather_into_tensor", "all_gather_into_tensor_coalesced", "all_reduce_coalesced"))


def group() -> str:
    assert torch.distributed.group.WORLD is not None
    name: str = torch.distributed.group.WORLD.group_name
    return name


def gathered(dtype: torch.dtype) -> bool:
    """Compare two pending gathers with torch's own."""
    ops, rank = torch.ops._c10d_functional, torch.distributed.get_rank()
    given = [torch.arange(6).add(10 * rank + each).to(dtype) for each in range(2)]
    if dtype.is_complex:
        given = [x * 1j for x in given]
    begun = [begin_gather(x, 2, group()) for x in given]
    expected = [ops.wait_tensor(ops.all_gather_into_tensor(x, 2, group())) for x in given]
    found = [ops.wait_tensor(x) for x in begun]
    return all(x.dtype == dtype and torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def each_gathered(dtypes: list[torch.dtype]) -> list[bool]:
    return list(map(gathered, dtypes))


def stepped(layout: str) -> set[str]:
    torch.manual_seed(0)
    model, inputs = gpt(batch=4, seq=8, vocab=24, d_model=16, heads=4, layers=2)
    parallel: nn.Module = autopar.parallelize(model, "fsdp=2" if layout == "fsdp" else "dp=2", inputs, layout=layout)
    with Counted() as found:
        parallel(**inputs).backward()
    return found.names


def pending(seconds: float) -> int:
    """Begin gathers four at a time, until all ranks have run out of time."""
    ops, x, ended, count = torch.ops._c10d_functional, torch.ones(16), torch.zeros(1), 0
    until = time.monotonic() + seconds
    while not ended.item():
        for _ in range(500):
            begun = [begin_gather(x, 2, group()) for _ in range(4)]
            for whole in begun:
                ops.wait_tensor(whole)
            count += len(begun)
        ended.fill_(time.monotonic() > until)
        torch.distributed.all_reduce(ended)
    return count


def test_pending_gathers_equal_those_of_torch() -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
    for found in launch(each_gathered, dtypes, ranks=2):
        assert found == [True] * len(dtypes)


@pytest.mark.parametrize("layout", ["fsdp", "zero1"])
def test_a_step_begins_no_collective_that_ends_a_process(layout: str) -> None:
    for names in launch(stepped, layout, ranks=2):
        assert "all_gather_into_tensor_out" in names
        assert not names & UNSAFE


@pytest.mark.slow
def test_processes_outlive_many_pending_gathers() -> None:
    # With torch's own op one of the ranks dies within some 20 seconds.
    for count in launch(pending, 60.0, ranks=2):
        assert count > 1000
