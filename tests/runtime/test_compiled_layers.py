"""Repeated layers that are compiled once for all: the results of one process, and as many graphs as kinds of layers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import autopar
from examples.gpt import gpt
from tests.runtime.launcher import launch
from tests.runtime.training import adamw, batches, error_of, gradient_gap, losses

SIZES: dict[str, Any] = {"d_model": 16, "heads": 2, "vocab": 24, "seq": 6, "batch": 4}


def compiled(cases: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """Differences from one process and numbers of graphs, by layout; and what cannot be compiled so."""
    torch.manual_seed(0)
    model, inputs = gpt(layers=4, **SIZES)
    model.double()
    data = batches(inputs, 3)
    found: dict[str, Any] = {}
    for layout, mesh in cases:
        alone = copy.deepcopy(model)
        parallel = autopar.parallelize(copy.deepcopy(model), mesh, inputs, layout=layout)
        parallel.compile_layers(backend="aot_eager", fullgraph=True)
        counters.clear()
        curves = [losses(each, data, adamw(each)) for each in (alone, parallel)]
        curve = max(abs(a / b - 1) for a, b in zip(*curves, strict=True))
        calls = parallel.code.count("self.layer_")
        found[layout] = max(curve, gradient_gap(alone, parallel)), counters["stats"]["unique_graphs"], calls
        whole = torch.compile(parallel, backend="aot_eager")  # changes nothing
        alone.zero_grad()
        parallel.zero_grad()
        alone(**inputs).backward()
        whole(**inputs).backward()
        found[f"{layout}, within a compiled call"] = gradient_gap(alone, parallel), 1, calls
        shorter = {name: value[:, :4].contiguous() for name, value in inputs.items()}
        counters.clear()
        with torch.no_grad():
            gap = abs(float(parallel(**shorter)) - float(alone(**shorter)))
        found[f"{layout}, no gradients"] = gap, counters["stats"]["unique_graphs"], calls
    found["twice"] = error_of(parallel.compile_layers)
    dropped = autopar.parallelize(gpt(layers=2, dropout=0.5, **SIZES)[0], "dp=2", inputs, layout="ddp")
    found["error"] = error_of(lambda: dropped.compile_layers(backend="aot_eager"))
    return found


@pytest.mark.parametrize(
    "cases", [(("megatron", "tp=2"),), pytest.param((("ddp", "dp=2"), ("fsdp", "fsdp=2")), marks=pytest.mark.slow)]
)
def test_equal_layers_are_one_graph(cases: tuple[tuple[str, str], ...]) -> None:
    for found in launch(compiled, cases, ranks=2):
        assert found.pop("error").startswith("no repeated layer can be compiled alone: expected equal layers")
        assert found.pop("twice").startswith("the layers are compiled already")
        for case, (difference, graphs, calls) in found.items():
            assert difference < 1e-12, case
            assert graphs == 1, (case, graphs)
            assert calls == 4, (case, calls)
