"""Copies of a model and its inputs for tracing: without the memory of the weights, in the dtype of the compute."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from functools import partial
from operator import is_
from types import CellType, FunctionType
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
        copied = copy.deepcopy(model, known)
        for module in copied.modules():
            vars(module).update(_own(vars(module), known))
        return copied
    except (TypeError, RuntimeError) as error:
        raise AutoparError(
            f"{type(model).__name__} cannot be copied, but autopar traces a copy without its weights: {error}\n"
            "fix: keep no locks, files, process groups, or tensors with a history as attributes of the model"
        ) from error


def _own(value: Any, known: dict[int, Any]) -> Any:
    """Return a value in which functions hold the copies of modules and tensors; `deepcopy` copies no functions."""
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, FunctionType):
        known[id(value)] = value  # it may hold itself
        known[id(value)] = _own_function(value, known)
    elif isinstance(value, partial):
        before = value.func, value.args, value.keywords
        own = [_own(part, known) for part in before]
        return value if all(map(is_, own, before)) else partial(own[0], *own[1], **own[2])
    elif type(value) in (dict, OrderedDict):
        known[id(value)] = value
        made = {key: _own(one, known) for key, one in value.items()}
        known[id(value)] = value if all(made[key] is one for key, one in value.items()) else type(value)(made)
    elif type(value) in (list, tuple):
        known[id(value)] = value
        items = [_own(one, known) for one in value]
        known[id(value)] = value if all(map(is_, items, value)) else type(value)(items)
    return known.get(id(value), value)


def _own_function(function: FunctionType, known: dict[int, Any]) -> FunctionType:
    """Return a function that holds the copies of what it holds; itself if it holds nothing of the model."""
    cells = function.__closure__ or ()
    held = [cell.cell_contents if _is_filled(cell) else None for cell in cells]
    own = [_own(one, known) for one in held]
    defaults, named = (_own(part, known) for part in (function.__defaults__, function.__kwdefaults__))
    if defaults is function.__defaults__ and named is function.__kwdefaults__ and all(map(is_, own, held)):
        return function
    own_cells = tuple(cell if one is None else CellType(one) for cell, one in zip(cells, own, strict=True))
    made = FunctionType(function.__code__, function.__globals__, function.__name__, defaults, own_cells or None)
    made.__kwdefaults__ = named
    made.__dict__.update(function.__dict__)
    return made


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


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
