"""Copies of a model and its inputs for tracing: without the memory of the weights, in the dtype of the compute."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.ir.call_arguments import bind, flatten_arguments, inputs_with, signature_of
from autopar.ir.precision import Precision

__all__ = ["hollow", "in_precision", "match_dtypes"]


def in_precision(
    model: nn.Module, inputs: tuple[Any, ...] | Mapping[str, Any], precision: Precision
) -> tuple[nn.Module, tuple[Any, ...] | Mapping[str, Any]]:
    """Return a model and its inputs as a step of this precision computes: floats in one dtype, buffers unchanged."""
    dtype = precision.compute_dtype
    if dtype is None:
        return model, inputs
    if any(parameter.is_floating_point() and parameter.dtype != dtype for parameter in model.parameters()):
        model = hollow(model, None, dtype)
    return model, _cast_inputs(model, inputs, dtype)


def _cast_inputs(
    model: nn.Module, inputs: tuple[Any, ...] | Mapping[str, Any], dtype: torch.dtype
) -> tuple[Any, ...] | Mapping[str, Any]:
    owner, signature = type(model).__name__, signature_of(model)
    flat = flatten_arguments(bind(signature, owner, inputs), owner)
    if all(not x.is_floating_point() or x.dtype == dtype for x in flat.tensors):
        return inputs
    tensors = [x.to(dtype) if x.is_floating_point() else x for x in flat.tensors]
    return inputs_with(signature, flat, tensors)


def hollow(model: nn.Module, device: torch.device | None, dtype: torch.dtype | None = None) -> nn.Module:
    """Return a copy of a model for tracing, by default on its own device: its parameters have no memory."""

    def without_data(parameter: nn.Parameter) -> nn.Parameter:
        kind = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
        return nn.Parameter(_without_memory(parameter, kind, device or parameter.device), parameter.requires_grad)

    def placed(buffer: Tensor) -> Tensor:
        if device is None:
            return buffer.detach()
        return torch.zeros_like(buffer, device=device) if buffer.is_meta else buffer.detach().to(device)

    # `deepcopy` takes these as copied already, so it never copies the weights.
    known: dict[int, Any] = {id(parameter): without_data(parameter) for parameter in model.parameters()}
    known.update((id(buffer), placed(buffer)) for buffer in model.buffers())
    try:
        return copy.deepcopy(model, known)
    except (TypeError, RuntimeError) as error:
        raise AutoparError(
            f"{type(model).__name__} cannot be copied, but autopar traces a copy without its weights: {error}\n"
            "fix: keep no locks, files, process groups, or tensors with a history as attributes of the model"
        ) from error


def match_dtypes(skeleton: nn.Module, dtypes: Iterable[torch.dtype]) -> None:
    """Set the dtypes of a skeleton: those of its parameters, then of its buffers."""
    tensors = (*skeleton.parameters(), *skeleton.buffers())
    for tensor, dtype in zip(tensors, dtypes, strict=True):
        if tensor.dtype == dtype:
            continue
        if isinstance(tensor, nn.Parameter):
            tensor.data = _without_memory(tensor, dtype, tensor.device)
        else:
            tensor.data = tensor.to(dtype)


def _without_memory(parameter: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    # On the real device: the model may make tensors on the device of a parameter, which the graph then records.
    empty = torch.empty_like(parameter.detach(), dtype=dtype, device=device)
    if not empty.is_meta:
        empty.untyped_storage().resize_(0)
    return empty
