"""Detect an optimizer that still updates the parameters from before `parallelize`, which no forward reads any more."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from autopar.errors import AutoparError

__all__ = ["watch_replaced"]

# Keys alone matter: a weak set would compare tensors by value.
_REPLACED: Any = WeakIdKeyDictionary()
_HOOKS: list[Any] = []


def watch_replaced(parameters: Iterable[Tensor]) -> None:
    """Raise at the step of an optimizer that holds some of these parameters and finds no gradient in any of its own.

    An optimizer of a model that is also trained by itself has gradients, and is left alone.
    """
    for parameter in parameters:
        _REPLACED[parameter] = True
    if not _HOOKS:
        _HOOKS.append(register_optimizer_step_post_hook(_check))


def _check(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if all(parameter.grad is None for parameter in parameters) and any(each in _REPLACED for each in parameters):
        raise AutoparError(
            f"{type(optimizer).__name__} updates the parameters of the model that was given to parallelize; "
            "the parallel module has parameters of its own\n"
            "fix: make the optimizer after it, of the parallel module's parameters()"
        )
