"""Inputs of other sizes: calls after the second size are emitted and not traced, and the latest calls are kept."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import autopar
from autopar.errors import AutoparError
from autopar.runtime.garbage import collected_later
from examples.gpt import gpt
from tests.gaps import number
from tests.runtime.launcher import in_turn, launch
from tests.runtime.test_call_cache import TOLERANCE, worst

SMALL: dict[str, Any] = {"layers": 2, "d_model": 24, "heads": 4, "vocab": 32}


def inputs_of(batch: int, seq: int) -> Any:
    torch.manual_seed(batch * seq)
    return gpt(**SMALL, batch=batch, seq=seq)[1]


def varying() -> dict[str, Any]:
    torch.manual_seed(0)
    model, inputs = gpt(**SMALL, batch=4, seq=24)
    found: dict[str, Any] = {}
    parallel = autopar.parallelize(model, "tp=2", inputs, layout="megatron", most_calls=3)
    sizes = ((4, 16), (4, 11), (4, 19), (2, 16), (2, 13), (4, 11))
    found["worst"] = max(worst(parallel, model, inputs_of(*size)) for size in sizes)
    found["traces"], found["kept"] = parallel._plans.kept.traces, len(parallel._plans.kept)
    kept = [call.graph.tensors["ids"].shape for call in parallel._plans.kept]
    found["latest"] = (4, 11) in kept and (4, 16) not in kept
    return found


def rows() -> dict[str, Any]:
    """Rows of each rank alone: shards of other sizes, and an error where they differ."""
    torch.manual_seed(0)
    model, _ = gpt(**SMALL, batch=4, seq=24)
    parallel = autopar.parallelize(model, "dp=2", layout="ddp", local_inputs=True, outputs="local")
    rank, gaps = torch.distributed.get_rank(), []
    for batch, seq in ((4, 16), (4, 11), (6, 19)):
        whole = inputs_of(batch, seq)
        own = {name: tensor.chunk(2)[rank] for name, tensor in whole.items()}
        loss = parallel(**own)
        gaps.append(number((loss - model(**whole)).abs()))
    try:
        parallel(**{name: tensor[: 1 + rank] for name, tensor in inputs_of(4, 16).items()})
        error = "no error"
    except AutoparError as raised:
        error = str(raised)
    return {"worst": max(gaps), "traces": parallel._plans.kept.traces, "error": error}


def test_calls_of_other_sizes() -> None:
    for one in launch(in_turn, (varying, ()), (rows, ()), ranks=2):
        whole, local = one["varying"], one["rows"]
        assert whole["worst"] < TOLERANCE
        assert local["worst"] < TOLERANCE
        # The first size and that of another batch are traced; of rows, both the shard and the whole.
        assert whole["traces"] == 2
        assert local["traces"] == 4
        assert whole["kept"] == 3
        assert whole["latest"]
        assert "shape of" in local["error"]


def test_the_number_of_calls_is_checked() -> None:
    with pytest.raises(AutoparError, match="invalid most_calls=0"):
        autopar.parallelize(torch.nn.Linear(2, 2), "dp=1", layout="ddp", most_calls=0)


def test_garbage_is_collected_as_before_after_a_call_is_made() -> None:
    during = []
    with collected_later():
        during.append(gc.isenabled())
    assert (during, gc.isenabled()) == ([False], True)
    gc.disable()
    try:
        with collected_later():
            pass
        assert not gc.isenabled(), "whoever stopped the collection goes on without it"
    finally:
        gc.enable()
