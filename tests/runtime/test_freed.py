"""Memory of a module that nothing refers to is free again, also after training with collectives."""

from __future__ import annotations

import gc

import torch
from torch.multiprocessing.reductions import StorageWeakRef

import autopar
from examples.gpt import gpt
from tests.runtime.launcher import launch

ZERO3 = "batch -> dp; * -> none; param, grad, opt { * -> dp | none }; regather @*"
LAYOUTS = ("ddp", "zero1", ZERO3, f"micro 2; {ZERO3}", f"{ZERO3}; recompute full @blocks.*", "seq -> dp; * -> none")


def alive(layout: str) -> int:
    """Shards of parameters, gradients and states that are alive after two steps, when the module is gone."""
    storages = trained(layout)
    # The nodes of autograd go with the first collection, what they held with the second.
    gc.collect()
    gc.collect()
    return sum(not one.expired() for one in storages)  # type: ignore[no-untyped-call]


def trained(layout: str) -> list[StorageWeakRef]:
    model, inputs = gpt(batch=4, seq=8, vocab=24, d_model=16, layers=2)
    parallel = autopar.parallelize(model, "dp=2", inputs, layout=layout)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    for _ in range(2):
        parallel(**inputs).backward()
        optimizer.step()
    found = [*parallel.parameters(), *(one.grad for one in parallel.parameters())]
    found += [state["exp_avg"] for state in optimizer.state.values()]
    return [StorageWeakRef(one.to_local().untyped_storage()) for one in found]  # type: ignore[no-untyped-call, union-attr]


def on_two() -> dict[str, int]:
    return {layout: alive(layout) for layout in LAYOUTS}


def test_a_module_that_nobody_needs_is_freed() -> None:
    for found in launch(on_two, ranks=2):
        assert found == dict.fromkeys(LAYOUTS, 0)
