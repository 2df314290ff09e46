"""Open sizes of a mesh in `parallelize`: from the number of processes, by search, or an error."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import autopar
from autopar.errors import AutoparError
from examples.gpt import gpt
from tests.runtime.launcher import launch
from tests.runtime.training import batches, error_of, losses


def on_open_meshes() -> dict[str, Any]:
    torch.manual_seed(0)
    model, inputs = gpt(batch=4, seq=8, vocab=40, d_model=16, layers=1)
    model = model.double()
    data = batches(inputs, 2)

    def train(mesh: str, **options: Any) -> tuple[dict[str, int], list[float]]:
        module = autopar.parallelize(copy.deepcopy(model), mesh, inputs, **options)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        return dict(module.assignment.axes), losses(module, data, optimizer)

    def refused(mesh: str, given: Any = inputs, **options: Any) -> str:
        return error_of(lambda: autopar.parallelize(copy.deepcopy(model), mesh, given, **options), AutoparError)

    alone = copy.deepcopy(model)
    return {
        "alone": losses(alone, data, torch.optim.SGD(alone.parameters(), lr=0.1)),
        "one": train("tp=2,dp=?", layout="megatron"),
        "strategy": train("dp=?,tp=?", layout="megatron"),
        "searched": train("?", time_limit=5),
        "of a layout": train("?", layout="mesh dp=1,tp=2; heads -> tp; * -> none"),
        "too few": refused("dp=?,tp=4", layout="megatron"),
        "no inputs": refused("?", given=None, layout="ddp"),
        "local": refused("?", layout="ddp", local_inputs=True),
        "other layout": refused("?", layout="mesh dp=3,tp=2; * -> none"),
    }


@pytest.mark.slow
def test_open_meshes() -> None:
    everyone = launch(on_open_meshes, ranks=2)
    for found in everyone:
        expected = pytest.approx(found["alone"], abs=1e-10, rel=0)
        assert found["one"] == ({"tp": 2, "dp": 1}, expected)
        assert found["of a layout"] == ({"dp": 1, "tp": 2}, expected)
        for searched in ("strategy", "searched"):
            axes, values = found[searched]
            assert axes in ({"dp": 1, "tp": 2}, {"dp": 2, "tp": 1})
            assert values == expected
            assert axes == everyone[0][searched][0]
        assert {name: found[name] for name in MESSAGES} == MESSAGES


MESSAGES = {
    "too few": (
        "the mesh dp=?,tp=4 needs a multiple of 4 ranks, but 2 processes are running\n"
        "fix: torchrun --nproc-per-node 4, so that each node has whole groups of tp=4; or leave one of these sizes "
        "open, too"
    ),
    "no inputs": (
        "a mesh with several open sizes is searched, which needs example inputs; 2 processes can be dp=1,tp=2, "
        "dp=2,tp=1\n"
        "fix: give parallelize inputs, or leave only one size open"
    ),
    "local": (
        "a mesh with several open sizes is searched, which needs whole inputs, not local_inputs=True; 2 processes can "
        "be dp=1,tp=2, dp=2,tp=1\n"
        "fix: plan = autopar.plan(model, mesh, whole_inputs, devices=2, local_inputs=True), then "
        "parallelize(model, plan.mesh, ..., layout=plan); or leave only one size open"
    ),
    "other layout": (
        "the layout is for the mesh dp=3,tp=2, but 2 processes are running\n"
        "fix: leave its mesh statement out, or start as many processes as that mesh has ranks"
    ),
}
