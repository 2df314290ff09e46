"""One step of a model as it stands, and the same step of what should do the same: all that a caller can tell."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from tests.gaps import number

__all__ = ["Arguments", "Left", "arguments_of", "eager_step", "largest_difference", "relative", "step_of"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional ones, and those by name."""


@dataclass(frozen=True)
class Left:
    """What a forward and a backward leave behind."""

    structure: str
    results: tuple[Any, ...]
    gradients: Mapping[str, Tensor | None]
    """Of parameters by name, and of tensors among the arguments by number."""
    buffers: Mapping[str, Tensor]
    """After the call; tensors among the arguments as well."""


def arguments_of(inputs: Any) -> Arguments:
    """Inputs as `autopar.trace` takes them."""
    return ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})


def fresh(arguments: Arguments) -> Arguments:
    """Arguments of the same values that nobody else has."""
    copies: dict[int, Tensor] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in copies:  # the same tensor twice stays one
            copies[id(value)] = value.detach().clone().requires_grad_(value.requires_grad)
        return copies[id(value)]

    found: Arguments = tree_map(copied, arguments)
    return found


def step_of(
    call: Callable[..., Any],
    parameters: Mapping[str, Tensor],
    buffers: Callable[[], Mapping[str, Tensor]],
    arguments: Arguments,
) -> Left:
    """Call something with fresh arguments; take the gradients of its results, each weighted by numbers of its own."""
    args, kwargs = fresh(arguments)
    given = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
    for parameter in parameters.values():
        parameter.grad = None
    leaves, structure = tree_flatten(call(*args, **kwargs))
    total = torch.zeros((), dtype=torch.float64)
    for result in leaves:
        # Those without a gradient too: whatever has one where it should not is found.
        if isinstance(result, Tensor) and result.is_floating_point():
            weights = torch.linspace(-1, 1.5, result.numel(), dtype=torch.float64).cos().view(result.shape)
            total = total + (result.double() * weights).sum()
    if total.requires_grad:
        total.backward()
    gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.requires_grad}
    gradients |= {f"argument {i}": value.grad for i, value in enumerate(given) if value.requires_grad}
    after = {name: buffer.detach().clone() for name, buffer in buffers().items()}
    after |= {f"argument {i}": value.detach().clone() for i, value in enumerate(given)}
    results = tuple(leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return Left(str(structure), (total.detach(), *results), gradients, after)


def eager_step(model: nn.Module, arguments: Arguments) -> Left:
    """A step of the model itself, which is as it was afterwards."""
    # The tensors too: a forward may put another one in the place of a buffer.
    before = [(module, name, value) for module in model.modules() for name, value in module._buffers.items()]
    values = [None if value is None else value.detach().clone() for _, _, value in before]
    try:
        left = step_of(model, dict(model.named_parameters()), lambda: dict(model.named_buffers()), arguments)
    finally:
        for (module, name, buffer), value in zip(before, values, strict=True):
            module._buffers[name] = buffer
            if buffer is not None and value is not None:
                buffer.detach().copy_(value)
        model.zero_grad(set_to_none=True)
    return left


def largest_difference(expected: Left, found: Left) -> float:
    """The largest, of the size of the largest number in each tensor; what is no number must be the same."""
    assert found.structure == expected.structure, f"gives {found.structure}, should give {expected.structure}"
    worst = 0.0
    for i, (mine, theirs) in enumerate(zip(expected.results, found.results, strict=True)):
        worst = max(worst, _difference(f"result {i}", mine, theirs))
    assert set(found.buffers) == set(expected.buffers)
    for name, buffer in expected.buffers.items():
        worst = max(worst, _difference(f"buffer {name}", buffer, found.buffers[name]))
    assert set(found.gradients) == set(expected.gradients)
    # Some gradients are zero but for rounding: what is small is judged by all of them.
    sizes = [float(x.abs().max()) for x in expected.gradients.values() if x is not None and x.numel()]
    floor = 1e-3 * max((size for size in sizes if size < float("inf")), default=0)
    for name, gradient in expected.gradients.items():
        other = found.gradients[name]
        if gradient is None or other is None:
            # What has no gradient in one process has none, or one of zeros, on many ranks.
            assert other is None or not other.any(), f"gradient of {name}: {other}, should be None"
            assert gradient is None or not gradient.any(), f"gradient of {name}: None, should be {gradient}"
        else:
            worst = max(worst, _difference(f"gradient of {name}", gradient, other, floor))
    return worst


def _difference(what: str, expected: Any, found: Any, floor: float = 0.0) -> float:
    if not isinstance(expected, Tensor):
        assert expected == found and type(expected) is type(found), f"{what} is {found!r}, should be {expected!r}"  # noqa: PT018
        return 0.0
    assert isinstance(found, Tensor), f"{what} is {found!r}, should be a tensor"
    assert found.dtype == expected.dtype, f"{what} has dtype {found.dtype}, should have {expected.dtype}"
    return relative(expected, found, floor)


def relative(expected: Tensor, found: Tensor, floor: float = 0.0) -> float:
    """The largest difference, of the size of the largest number; one that is small counts from 0.001 or `floor` on."""
    assert found.shape == expected.shape, f"has shape {list(found.shape)}, should have {list(expected.shape)}"
    if not expected.numel():
        return 0.0
    wide = torch.complex128 if expected.is_complex() else torch.float64
    mine, theirs = expected.detach().to(wide), found.detach().to(wide)
    # The same infinities, and the absence of a number in the same places, are no difference.
    off = (theirs - mine).abs().masked_fill((mine == theirs) | (mine.isnan() & theirs.isnan()), 0)
    size = mine.abs()[mine.abs().isfinite()]
    return number(float(off.max()) / max(float(size.max()) if size.numel() else 0.0, floor, 1e-3))
