"""The parameters of a call, DTensors in the module, as the local tensors that the generated graph works on.

`DTensor.to_local` does this for one tensor and makes a DTensor of its gradient; a model has hundreds of them, and in a
small step that is most of what the step costs beyond the model. Here one function does it for all of them at once.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["LocalParameters"]


class LocalParameters:
    """Called with all parameters, gives their shards; gradients come back as DTensors of the same placements."""

    def __init__(self) -> None:
        # The specs of the parameters, and copies for their gradients: ops on a DTensor may note things in its spec.
        self._own: list[Any] = []
        self._copies: list[Any] = []

    def __call__(self, parameters: Sequence[DTensor]) -> tuple[Tensor, ...]:
        if not torch.is_grad_enabled() or not any(parameter.requires_grad for parameter in parameters):
            return tuple(parameter.to_local() for parameter in parameters)
        own = [parameter._spec for parameter in parameters]
        if len(own) != len(self._own) or not all(map(operator.is_, own, self._own)):
            self._own, self._copies = own, [copy(spec) for spec in own]
        shards: tuple[Tensor, ...] = _Locals.apply(self._copies, *parameters)  # type: ignore[no-untyped-call]
        return shards


class _Locals(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, specs: list[Any], *parameters: DTensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.specs = specs
        shards = [parameter._local_tensor.view_as(parameter._local_tensor) for parameter in parameters]
        ctx.mark_non_differentiable(
            *(shard for shard, parameter in zip(shards, parameters, strict=True) if not parameter.requires_grad)
        )
        return tuple(shards)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        pairs = zip(gradients, ctx.specs, strict=True)
        return (None, *(None if gradient is None else _wrapped(gradient, spec) for gradient, spec in pairs))


def _wrapped(gradient: Tensor, spec: Any) -> Tensor:
    if torch.is_grad_enabled():  # a gradient of which gradients may be taken
        meta = spec.tensor_meta
        return DTensor.from_local(
            gradient, spec.mesh, spec.placements, run_check=False, shape=meta.shape, stride=meta.stride
        )
    return DTensor(gradient.contiguous(), spec, requires_grad=False)  # type: ignore[no-untyped-call]
