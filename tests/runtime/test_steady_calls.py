"""Calls that are known by now and differ between ranks, on a device that no exchange of its numbers may make wait."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.errors import AutoparError
from autopar.runtime import call_cache
from autopar.runtime.agreement import Agreement
from tests.runtime.launcher import launch

LAYOUTS = ["rows -> a; * -> none", "* -> none", "fsdp(fsdp=a)"]


def call_unalike(layout: str) -> tuple[list[str], float]:
    """What is said of a known shape beside another known one, and of a new one beside a known one; then a good call."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Agreement, "is_cheap", property(lambda self: False))
        patched.setattr(call_cache, "FIRST_CALLS", 0)
        torch.manual_seed(0)
        inputs = [torch.randn(rows, 8) for rows in (4, 8)]
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        parallel = autopar.parallelize(
            model, "a=2", (inputs[0],), layout=layout, dims={"input": "rows columns"}, outputs="full"
        )
        for _ in range(3):
            for x in inputs:
                parallel(x)
        said = []
        for mine in (inputs[dist.get_rank()], torch.randn(2 + 2 * dist.get_rank(), 8)):
            try:
                parallel(mine)
            except AutoparError as error:
                said.append(str(error))
        return said, float((parallel(inputs[1]) - parallel(inputs[1])).detach().abs().max())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steady_calls_of_different_shapes_are_an_error_and_no_hang(layout: str) -> None:
    """Ranks of one host compare every call through its memory, whatever device they have."""
    for said, difference in launch(call_unalike, layout, ranks=2, seconds=150):
        assert len(said) == 2, said
        assert all(text.startswith("the ranks differ in") for text in said), said
        assert difference == 0
