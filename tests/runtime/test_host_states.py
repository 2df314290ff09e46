"""States of the optimizer on the host: the numbers of a usual training, and the bytes that plans predict."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import AutoparError
from autopar.ir.analysis.host_memory import ON_HOST
from autopar.sharding.layout.language import load_strategy
from examples.gpt import gpt
from tests.runtime.launcher import launch
from tests.runtime.training import Inputs

STEPS = 20
FSDP = str(load_strategy("fsdp").on_axes({"fsdp": ("a",)}))
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
}


def small() -> tuple[nn.Module, Inputs]:
    torch.manual_seed(0)
    return gpt(batch=4, seq=8, vocab=24, d_model=16, heads=4, layers=2)


def groups_of(parallel: nn.Module) -> list[dict[str, Any]]:
    """Two groups with rates of their own."""
    parameters = list(parallel.parameters())
    return [{"params": parameters[:5], "lr": 3e-3}, {"params": parameters[5:], "weight_decay": 0.1}]


def train(parallel: nn.Module, optimizer: torch.optim.Optimizer, inputs: Inputs, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss: Any = parallel(**inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.full_tensor() if isinstance(loss, DTensor) else loss))
    return losses


def local(value: Any) -> torch.Tensor:
    found: torch.Tensor = value._local_tensor if isinstance(value, DTensor) else value
    return found


def host_bytes(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Bytes of states on the host, and elsewhere, but for the numbers of steps."""
    found = [0, 0]
    for state in optimizer.state.values():
        for value in map(local, state.values()):
            if value.dim():
                found[hasattr(value.untyped_storage(), ON_HOST)] += value.nbytes
    return found[1], found[0]


def trained(names: list[str]) -> dict[str, Any]:
    model, inputs = small()
    found: dict[str, Any] = {}
    for name in names:
        each: list[tuple[nn.Module, list[float]]] = []
        for offload in (False, True):
            parallel = autopar.parallelize(
                copy.deepcopy(model), "a=2", inputs, layout=FSDP, optimizer=name, offload_states=offload
            )
            optimizer = OPTIMIZERS[name](groups_of(parallel))
            each.append((parallel, train(parallel, optimizer, inputs, STEPS)))
            found[f"{name}, {offload}"] = host_bytes(optimizer)
        (usual, expected), (hosted, losses) = each
        pairs = zip(usual.parameters(), hosted.parameters(), strict=True)
        equal = all(torch.equal(local(one), local(other)) for one, other in pairs)
        found[name] = equal, losses == expected, losses[-1] < losses[0]
    return found


def test_twenty_steps_equal_the_usual_ones() -> None:
    model, inputs = small()
    plans = {
        name: autopar.plan(
            model, "a=2", inputs, layout=FSDP, cluster="h100", optimizer=name, offload_states=True, cache=False
        )
        for name in ("adamw", "momentum")
    }
    for found in launch(trained, ["adamw", "momentum"], ranks=2):
        for name, plan in plans.items():
            assert found[name] == (True, True, True)
            on_host, on_device = found[f"{name}, True"]
            assert on_device == 0
            assert found[f"{name}, False"] == (0, on_host)
            assert plan.costs.memory.host_bytes == on_host
            assert plan.costs.memory.optimizer_bytes == 0


def loaded(plan: str) -> dict[str, Any]:
    """States made at once, loaded states, an optimizer whose states cannot live there."""
    found = trained(["adagrad"])
    model, inputs = small()
    # The option is a part of the plan.
    parallel = autopar.parallelize(model, "a=2", inputs, layout=Path(plan))
    optimizer = OPTIMIZERS["adamw"](groups_of(parallel))
    train(parallel, optimizer, inputs, 3)
    kept = copy.deepcopy(get_optimizer_state_dict(parallel, optimizer))
    weights = {name: local(one).clone() for name, one in parallel.named_parameters()}
    losses = train(parallel, optimizer, inputs, 3)
    for name, one in parallel.named_parameters():
        local(one).data.copy_(weights[name])
    other = OPTIMIZERS["adamw"](groups_of(parallel))
    set_optimizer_state_dict(parallel, other, kept)
    found["loaded"] = train(parallel, other, inputs, 3) == losses, host_bytes(other)[1]
    refused = torch.optim.Adafactor(parallel.parameters())
    parallel(**inputs).backward()
    try:
        refused.step()
    except AutoparError as error:
        found["refused"] = str(error)
    return found


@pytest.mark.slow
def test_states_of_other_origins(tmp_path: Path) -> None:
    model, inputs = small()
    plan = autopar.plan(model, "a=2", inputs, layout=FSDP, cluster="h100", offload_states=True, cache=False)
    plan.save(tmp_path / "host.plan")
    for found in launch(loaded, str(tmp_path / "host.plan"), ranks=2):
        assert found["adagrad"] == (True, True, True)
        assert found["loaded"] == (True, 0)
        assert found["refused"].startswith("offload_states with Adafactor: expected one of torch's optimizers")
