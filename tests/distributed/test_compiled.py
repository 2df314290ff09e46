"""`torch.compile` of a parallel module: the values and gradients of the model, in few graphs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import autopar
from examples.gpt import gpt
from tests.distributed.launcher import launch
from tests.distributed.training import Inputs, gap, gradient_gap

ENDS = 2
"""Graph breaks: the two ends of a call, which look up the graph and hand out results, are left to Python."""


def small_gpt() -> tuple[nn.Module, Inputs]:
    torch.manual_seed(0)
    model, inputs = gpt(batch=4, seq=8, vocab=24, d_model=16, layers=1)
    return model.double(), inputs


def compile_all(cases: tuple[tuple[str, str], ...], backend: str) -> dict[str, Any]:
    """Value, gradients, and a second shape beside one process; the graphs that were made, and the breaks."""
    model, inputs = small_gpt()
    shorter = {name: value[:2].contiguous() for name, value in inputs.items()}
    found: dict[str, Any] = {}
    for layout, mesh in cases:
        torch._dynamo.reset()
        counters.clear()
        parallel = autopar.parallelize(copy.deepcopy(model), mesh, inputs, layout=layout)
        compiled: Any = torch.compile(parallel, backend=backend)
        case = f"{layout} on {mesh}"
        for name, given, graphs in (("first", inputs, 1), ("again", inputs, 1), ("another shape", shorter, 2)):
            model.zero_grad()
            parallel.zero_grad()
            value, expected = compiled(**given), model(**given)
            value.backward()
            expected.backward()
            found[f"{case}, {name}"] = max(gap(value, expected), gradient_gap(model, parallel))
            found[f"{case}, graphs, {name}"] = counters["stats"]["unique_graphs"] == graphs
        found[f"{case}, breaks"] = len(counters["graph_break"]) == ENDS
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cases", "backend"),
    [
        ((("fsdp", "fsdp=2"),), "aot_eager"),
    ],
)
def test_compiled_is_what_it_is_without(cases: tuple[tuple[str, str], ...], backend: str) -> None:
    ranks = 4 if "," in cases[0][1] else 2
    for found in launch(compile_all, cases, backend, ranks=ranks, seconds=900):
        assert [case for case, value in found.items() if value is False] == []
        gaps = {case: value for case, value in found.items() if not isinstance(value, bool)}
        assert {case: worst for case, worst in gaps.items() if not worst < 1e-11} == {}
