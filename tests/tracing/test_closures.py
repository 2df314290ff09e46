"""Functions of a model that hold its modules: a copy for tracing calls the modules of the copy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import TraceError
from autopar.tracing.skeleton import hollow


def of_lambda(up: nn.Module, down: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: down(torch.tanh(up(x)))


def of_default(up: nn.Module, down: nn.Module) -> Callable[[Tensor], Tensor]:
    def inner(x: Tensor, both: tuple[nn.Module, ...] = (up, down)) -> Tensor:
        return both[1](torch.tanh(both[0](x)))

    return inner


def of_partial(up: nn.Module, down: nn.Module) -> Callable[[Tensor], Tensor]:
    return partial(of_list, {"modules": [up, down]})


def of_list(held: Any, x: Tensor) -> Tensor:
    up, down = held["modules"]
    found: Tensor = down(torch.tanh(up(x)))
    return found


def of_function(up: nn.Module, down: nn.Module) -> Callable[[Tensor], Tensor]:
    inner = of_lambda(up, down)
    return lambda x: inner(x)


def of_weight(up: nn.Linear, down: nn.Linear) -> Callable[[Tensor], Tensor]:
    weight, bias = up.weight, up.bias
    return lambda x: down(torch.tanh(nn.functional.linear(x, weight, bias)))


class Held(nn.Module):
    """Perceptron whose forward calls a function that holds its layers."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.run = make(self.up, self.down)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.run(x)
        return found


@pytest.mark.parametrize("make", [of_lambda, of_default, of_partial, of_function])
def test_a_copy_calls_its_own_modules(make: Any) -> None:
    model = Held(make)
    names = {"up.weight", "up.bias", "down.weight", "down.bias"}
    for traced in (model, hollow(model, None, torch.float64)):
        x = torch.ones(2, 4, dtype=traced.up.weight.dtype)
        graph = autopar.trace(traced, (x,))
        assert {tensor.name for tensor in graph.parameters} == names
    assert torch.equal(model(torch.ones(2, 4)), model.down(torch.tanh(model.up(torch.ones(2, 4)))))


def test_functions_without_modules_stay() -> None:
    scale = torch.ones(3)
    model = nn.Linear(2, 2)
    model.activation, model.other = torch.tanh, lambda x: x * scale  # type: ignore[assignment]
    copy = hollow(model, None)
    assert copy.activation is torch.tanh
    assert copy.other is model.other


def test_a_parameter_that_is_not_of_the_model_is_refused() -> None:
    outside = nn.Linear(4, 4)

    class Uses(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = outside(x)
            return found

    for model in (Uses(), Held(of_weight), hollow(Held(of_weight), None)):
        with pytest.raises(TraceError, match="that is not one of the model, or is one that a function holds") as found:
            autopar.trace(model, (torch.ones(2, 4),))
        assert "fix: register the module that has it" in str(found.value)
    outside.requires_grad_(False)
    assert not autopar.trace(Uses(), (torch.ones(2, 4),)).parameters
