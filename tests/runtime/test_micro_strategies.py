"""`micro 2` before each published strategy, and under autocast: results and gradients of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from autopar.sharding.layout.language import load_strategy, strategy_names
from examples.gpt import gpt
from examples.moe import moe
from examples.resnet import resnet
from tests.runtime.launcher import launch
from tests.runtime.training import gradients, worst


def small_gpt() -> Any:
    return gpt(layers=4, batch=8, seq=12, vocab=104)


# Mesh and model of each strategy whose replicas do not train by themselves.
STRATEGIES: dict[str, tuple[str, Callable[[], Any]]] = {
    "ddp": ("dp=4", small_gpt),
    "zero1": ("dp=4", small_gpt),
    "fsdp": ("fsdp=4", small_gpt),
    "fsdp_tp": ("fsdp=2,tp=2", small_gpt),
    "megatron": ("dp=2,tp=2", small_gpt),
    "megatron_sp": ("dp=2,tp=2", small_gpt),
    "pipeline": ("pp=2,dp=2", small_gpt),
    "megatron_3d": ("pp=2,dp=1,tp=2", small_gpt),
    "gshard_moe": ("dp=2,ep=2", lambda: moe(batch=8)),
    "spatial": ("dp=1,sy=2,sx=2", lambda: resnet(width=4, image=256, batch=4, loss=True)),
}


def loss_of(result: Any) -> Tensor:
    found: Tensor = result if isinstance(result, Tensor) else result[0]
    return found if not found.ndim else found.square().mean()


def each_strategy() -> dict[str, tuple[float, float]]:
    """Errors of loss and gradients by strategy."""
    found = {}
    for name, (mesh, make) in STRATEGIES.items():
        torch.manual_seed(0)
        model, inputs = make()
        model = model.double().eval()
        inputs = {key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}
        parallel = autopar.parallelize(model, mesh, inputs, layout=f"micro 2; {name}", outputs="full")
        expected, own = loss_of(model(**inputs)), loss_of(parallel(**inputs))
        expected.backward()  # type: ignore[no-untyped-call]
        own.backward()  # type: ignore[no-untyped-call]
        found[name] = float((expected - own).detach().abs()), worst(gradients(parallel), gradients(model))
    return found


def test_all_strategies_are_here() -> None:
    trained_by_itself = {name for name in strategy_names() if load_strategy(name).drift is not None}
    assert {*STRATEGIES} == {*strategy_names()} - trained_by_itself


@pytest.mark.slow
def test_each_strategy_in_micro_batches_is_one_process() -> None:
    for found in launch(each_strategy, ranks=4, seconds=300):
        assert found.keys() == STRATEGIES.keys()
        for name, errors in found.items():
            assert max(errors) < 1e-12, name


def under_autocast() -> dict[str, float]:
    """Errors of gradients, relative to float32, of one process and of micro-batches."""
    found = {}
    torch.manual_seed(0)
    model, inputs = small_gpt()
    model(**inputs).backward()
    exact = gradients(model)
    parallel = autopar.parallelize(model, "dp=2", inputs, layout="micro 4; ddp")
    for name, each in (("alone", model), ("micro-batches", parallel)):
        each.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = each(**inputs)
        loss.backward()
        found[name] = worst(gradients(each), exact)
    return found


@pytest.mark.slow
def test_autocast_is_as_exact_as_on_one_process() -> None:
    for found in launch(under_autocast, ranks=2, seconds=100):
        assert 1e-5 < found["micro-batches"] < 1.5 * found["alone"], "it has computed in half precision"
