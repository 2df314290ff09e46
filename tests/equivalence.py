"""Does a traced graph, run as it is, do what the model does? Outputs, all gradients, and the buffers it writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from autopar.ir.interpreter import TracedModule
from autopar.tracing.export.export import export

# Of the largest element. The traced graph runs the same kernels; only the order of sums may differ.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


@dataclass(frozen=True)
class Step:
    """What one forward and backward leaves behind."""

    structure: str
    outputs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]


def assert_equivalent(
    model: nn.Module,
    inputs: tuple[Any, ...] | dict[str, Any],
    input_gradients: bool = True,
    dtype: torch.dtype = torch.float64,
) -> None:
    """Both run from the same seed: the graph's dropout must draw the numbers that the model's draws."""
    model.to(dtype)
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    args = tuple(prepared(value, dtype, input_gradients) for value in args)
    kwargs = {name: prepared(value, dtype, input_gradients) for name, value in kwargs.items()}
    traced = TracedModule(model, export(model, kwargs or args))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    expected = step(model, model, args, kwargs)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    compare(step(traced, model, args, kwargs), expected, TOLERANCE[dtype])


def prepared(value: torch.Tensor, dtype: torch.dtype, differentiable: bool) -> torch.Tensor:
    return value.to(dtype).requires_grad_(differentiable) if value.is_floating_point() else value


def step(call: nn.Module, model: nn.Module, args: tuple[torch.Tensor, ...], kwargs: Mapping[str, torch.Tensor]) -> Step:
    """One step of `call`, whose parameters are those of `model`."""
    inputs = {**{str(position): value for position, value in enumerate(args)}, **kwargs}
    model.zero_grad()
    for value in inputs.values():
        value.grad = None
    torch.manual_seed(1)
    leaves, structure = tree_flatten(call(*args, **kwargs))
    outputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    torch.manual_seed(2)
    differentiable = [output for output in outputs if output.requires_grad]
    torch.autograd.backward(differentiable, [torch.randn_like(output) for output in differentiable])
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    gradients |= {f"input {name}": value.grad for name, value in inputs.items()}
    return Step(
        str(structure),
        [output.detach() for output in outputs],
        gradients,
        {name: buffer.clone() for name, buffer in model.named_buffers()},
    )


def compare(actual: Step, expected: Step, tolerance: float) -> None:
    assert actual.structure == expected.structure
    for position, (mine, theirs) in enumerate(zip(actual.outputs, expected.outputs, strict=True)):
        close(f"output {position}", mine, theirs, tolerance * largest(theirs))
    given = {name: value for name, value in expected.gradients.items() if value is not None}
    assert {name for name, value in actual.gradients.items() if value is not None} == set(given)
    # Some gradients are zero but for rounding (that of a bias before a norm, for instance): what is small is judged
    # by the gradients of the whole model.
    floor = 1e-3 * max(map(largest, given.values()))
    assert floor > 0
    for name, theirs in given.items():
        mine = actual.gradients[name]
        assert mine is not None
        close(f"gradient of {name}", mine, theirs, tolerance * max(largest(theirs), floor))
    for name, theirs in expected.buffers.items():
        close(f"buffer {name}", actual.buffers[name], theirs, tolerance * largest(theirs))


def close(what: str, mine: torch.Tensor, theirs: torch.Tensor, allowed: float) -> None:
    assert mine.shape == theirs.shape, what
    assert mine.dtype == theirs.dtype, what
    error = largest(mine.double() - theirs.double())
    assert error <= allowed, f"{what}: off by {error:.3g}, allowed {allowed:.3g}"


def largest(value: torch.Tensor) -> float:
    return float(value.double().abs().max()) if value.numel() else 0.0
