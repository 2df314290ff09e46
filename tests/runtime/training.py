"""What the tests of training share: a curve of one process, and what of two runs is compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from tests.gaps import number

__all__ = ["Inputs", "adamw", "batches", "error_of", "gap", "gradient_gap", "losses", "whole"]

Inputs = dict[str, Tensor]


def whole(value: Any) -> Tensor:
    """The whole tensor, with all messages of it received."""
    found: Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return found


def gap(found: Any, expected: Any) -> float:
    """The largest difference, relative to the largest expected value."""
    found, expected = whole(found).detach(), whole(expected).detach()
    assert found.shape == expected.shape
    return number((found - expected).abs().max() / expected.abs().max().clamp_min(1e-9))


def gradient_gap(model: nn.Module, parallel: nn.Module) -> float:
    worst = 0.0
    for name, parameter in model.named_parameters():
        other = parallel.get_parameter(name).grad
        assert (other is None) == (parameter.grad is None), name
        if parameter.grad is not None:
            worst = max(worst, gap(other, parameter.grad))
    return worst


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The whole gradients of those parameters that have one."""
    return {name: whole(one.grad) for name, one in model.named_parameters() if one.grad is not None}


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of the same gradients, relative to the largest expected value of each."""
    assert found.keys() == expected.keys()
    return max(
        number((found[name].double() - one.double()).abs().max() / one.double().abs().max().clamp_min(1e-3))
        for name, one in expected.items()
    )


def error_of(call: Callable[[], Any], kind: type[Exception] = AutoparError) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    return "no error"


def batches(inputs: Inputs, count: int) -> list[Inputs]:
    """As many different batches as there are steps: of whole numbers other ones of the same range, of others noise."""
    draw = torch.Generator().manual_seed(0)

    def other(x: Tensor) -> Tensor:
        if x.is_floating_point():
            return torch.randn(x.shape, generator=draw, dtype=x.dtype)
        return torch.randint(int(x.max()) + 1, x.shape, generator=draw)

    return [{name: other(value) for name, value in inputs.items()} for _ in range(count)]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)


def losses(model: nn.Module, data: list[Inputs], optimizer: torch.optim.Optimizer) -> list[float]:
    """The loss of every step of a plain training loop."""
    found = []
    for inputs in data:
        optimizer.zero_grad()
        loss = model(**inputs)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found
