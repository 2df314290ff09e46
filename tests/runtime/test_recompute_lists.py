"""Layers of which the backward recomputes the ops of a list: gradients, products that run again, compiled graphs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import autopar
from autopar.sharding.layout.language import load_strategy
from examples.gpt import gpt
from examples.hf import hf
from tests.runtime.launcher import launch
from tests.runtime.training import Inputs, gap, gradients, worst

HALF = "keep(product every 2, attention)"
LISTS = (HALF, "keep(attention)", "only(@*norm/*, @*lu)")
LAYOUTS = {
    "ddp": ("a=2", load_strategy("ddp").on_axes({"dp": ("a",)})),
    "fsdp": ("a=2", f"{load_strategy('fsdp').on_axes({'fsdp': ('a',)})}\nregather @*"),
    "megatron_sp": ("a=1,b=2", str(load_strategy("megatron_sp").on_axes({"dp": ("a",), "tp": ("b",)}))),
}


def models() -> dict[str, tuple[nn.Module, Inputs, str]]:
    torch.manual_seed(0)
    plain, inputs = gpt(batch=4, seq=8, vocab=24, d_model=16, heads=4, layers=2)
    llama, tokens = hf("llama", batch=4, num_hidden_layers=2)
    tokens["labels"] = tokens["input_ids"]
    return {"gpt": (plain.double(), inputs, "blocks.*"), "llama": (llama.double(), tokens, "model.layers.*")}


def step(parallel: nn.Module, inputs: Inputs) -> tuple[Any, dict[str, Any], float]:
    """The loss, the gradients, and the FLOPs of products."""
    with FlopCounterMode(display=False) as counter:
        result: Any = parallel(**inputs)
        loss = result if isinstance(result, torch.Tensor) else result.loss
        loss.backward()
    found = gradients(parallel)
    parallel.zero_grad()
    return loss.detach(), found, counter.get_total_flops()


def lists(layouts: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (model, inputs, layers) in models().items():
        for layout in layouts:
            mesh, text = LAYOUTS[layout]
            expected: Any = None
            for ops in ("none", *LISTS):
                lines = f"{text}\nrecompute {ops} @{layers}"
                parallel = autopar.parallelize(copy.deepcopy(model), mesh, inputs, layout=lines)
                loss, given, flops = step(parallel, inputs)
                expected = expected or (loss, given)
                gaps = gap(loss, expected[0]), worst(given, expected[1])
                found[f"{name}, {layout}, {ops}"] = max(gaps), flops
    return found


def test_lists_change_no_bit() -> None:
    for found in launch(lists, ("fsdp",), ranks=2):
        check(found, 2)


@pytest.mark.slow
def test_lists_under_more_strategies() -> None:
    for found in launch(lists, ("ddp", "megatron_sp"), ranks=2):
        check(found, 4)


def check(found: dict[str, Any], cases: int) -> None:
    assert {case: value for case, (value, _) in found.items() if value} == {}
    prefixes = {case.split(", ")[0] + ", " + case.split(", ")[1] for case in found}
    assert len(prefixes) == cases
    for prefix in prefixes:
        none, half, attention, only = (found[f"{prefix}, {ops}"][1] for ops in ("none", *LISTS))
        assert only == none, "no product is recomputed"
        assert none < half < attention, "every second product is recomputed, or all of them"


def compiled(mesh: str) -> dict[str, Any]:
    """The compiled module beside the module: gradients, and FLOPs beyond those of no recomputation."""
    found: dict[str, Any] = {}
    model, inputs, layers = models()["gpt"]
    _, text = LAYOUTS["megatron_sp"]
    plain = autopar.parallelize(copy.deepcopy(model), mesh, inputs, layout=text)
    _, _, least = step(plain, inputs)
    for ops in LISTS:
        torch._dynamo.reset()
        parallel = autopar.parallelize(copy.deepcopy(model), mesh, inputs, layout=f"{text}\nrecompute {ops} @{layers}")
        loss, expected, eager = step(parallel, inputs)
        again: Any = torch.compile(parallel, backend="aot_eager")
        again(**inputs).backward()
        parallel.zero_grad()
        value, given, flops = step(again, inputs)
        given = {name.removeprefix("_orig_mod."): one for name, one in given.items()}
        found[ops] = max(gap(value, loss), worst(given, expected)), eager - least, flops - least
    return found


@pytest.mark.slow
def test_compiled_lists_recompute_the_same_products() -> None:
    for found in launch(compiled, "a=1,b=2", ranks=2):
        assert len(found) == len(LISTS)
        for ops, (difference, eager, again) in found.items():
            assert difference < 1e-11, ops
            assert eager == again, ops
