"""Copies of gradients into buckets: the bytes that a backward copies on real ranks are those that are priced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.cost.hardware.cluster import load_cluster
from autopar.cost.lowered_step import lower_step
from autopar.cost.profile import profile
from autopar.sharding.layout.language import choose_layout
from autopar.sharding.time_slice import propagate_plan
from examples.gpt import gpt
from tests.runtime.launcher import launch

SIZE: dict[str, Any] = {"layers": 2, "d_model": 64, "heads": 4, "vocab": 128, "seq": 16, "batch": 8}


class _Copies(TorchDispatchMode):
    """Bytes read and written by joins of flat tensors into a given buffer, and by copies into parts of one."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.cat.out:
            assert isinstance(found, Tensor)
            self.bytes += found.nbytes + sum(x.nbytes for x in args[0])
        if func is torch.ops.aten.copy_.default and args[0].untyped_storage().nbytes() > args[0].nbytes:
            self.bytes += args[0].nbytes + args[1].nbytes
        return found


def copied_bytes(layout: str) -> int:
    torch.manual_seed(0)
    model, inputs = gpt(**SIZE)
    parallel = autopar.parallelize(model, "dp=2", inputs, layout=layout)
    parallel(**inputs).backward()
    with _Copies() as copies:
        parallel(**inputs).backward()
    return copies.bytes


def priced_bytes(layout: str) -> float:
    graph, axes = autopar.trace(*gpt(**SIZE, device="meta")), autopar.Mesh("dp=2").whole
    plan = propagate_plan(graph, choose_layout(layout, axes), axes)
    tasks = profile(lower_step(graph, plan), load_cluster("h100")).backward
    return sum(task.bytes for task in tasks if task.name.endswith(".grad copy"))


@pytest.mark.parametrize("layout", ["ddp", "micro 2; ddp"])
def test_copies_into_buckets_are_priced(layout: str) -> None:
    """All gradients of `ddp` are read and written once a step, whatever the number of micro-batches."""
    parameters = sum(each.numel() for each in gpt(**SIZE, device="meta")[0].parameters())
    assert priced_bytes(layout) == 2 * 4 * parameters
    assert launch(copied_bytes, layout, ranks=2, seconds=150) == [2 * 4 * parameters] * 2
