"""Local shards of the parameters of a call, and DTensors of their gradients, by one autograd function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.lowering.modules.bucket import waited
from autopar.runtime.local_step import local_tensor, same_objects, step_locally

__all__ = ["LocalParameters"]


class LocalParameters:
    """Convert all parameters to their shards; their gradients become DTensors of the same placements.

    `DTensor.to_local` does this for one tensor. A model has hundreds of them, which is most of the overhead of a small
    step, so one autograd function converts all of them at once. A gradient that autograd would only store in `.grad` is
    stored there directly: autograd detaches it first, which takes longer for a DTensor than everything else. Gradients
    that a hook or `torch.autograd.grad` reads, or that are added to an existing `.grad`, go through autograd.

    `finish` waits for gradients that are still being reduced; `written` runs after parameters were written to.
    """

    def __init__(self, finish: Callable[[], None], written: Callable[[], None], offload_states: bool = False) -> None:
        self._finish = finish
        self._offload_states = offload_states
        self._written = written
        self._versions: list[int] | None = []
        # Specs of the parameters, and copies for their gradients: ops on a DTensor may change its spec.
        self._own: list[Any] = []
        self._copies: list[Any] = []
        # Those of the previous call. The function saves no tensor, so all calls share one autograd node.
        self._given: list[Tensor] = []
        self._shards: tuple[Tensor, ...] = ()
        self._compiled = False

    def __call__(self, parameters: Sequence[DTensor], compiled: bool) -> tuple[Tensor, ...]:
        # An optimizer step or a load changes versions; then gathered copies are stale.
        versions = _versions(parameters)
        if versions is None or versions != self._versions:
            self._versions = versions
            self._written()
        if not torch.is_grad_enabled() or not any(map(_requires_grad, parameters)):
            return tuple(parameter.to_local() for parameter in parameters)
        given = [*parameters, *map(local_tensor, parameters)]
        if compiled != self._compiled or not same_objects(given, self._given):
            own = [parameter._spec for parameter in parameters]
            if not same_objects(own, self._own):
                self._own, self._copies = own, [copy(spec) for spec in own]
            step_locally(parameters, self._offload_states)
            self._given, self._compiled = given, compiled
            self._shards = _Locals.apply(self._finish, compiled, self._copies, *parameters)  # type: ignore[no-untyped-call]
        return self._shards


# C functions: they run on all parameters at every call.
_requires_grad, _version = map(attrgetter, ("requires_grad", "_version"))


def _versions(parameters: Sequence[DTensor]) -> list[int] | None:
    """Return autograd's version counters; None for inference tensors, which have none."""
    try:
        return list(map(_version, parameters))
    except RuntimeError:
        return None


class _Locals(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, finish: Callable[[], None], compiled: bool, specs: list[Any], *parameters: DTensor
    ) -> tuple[Tensor, ...]:
        # A parameter without a gradient must stay so: optimizers treat zeros otherwise than None.
        ctx.set_materialize_grads(False)
        ctx.finish, ctx.compiled = finish, compiled
        ctx.specs, ctx.parameters, ctx.nodes = specs, parameters, None
        shards = tuple([parameter._local_tensor.detach() for parameter in parameters])
        frozen = [shard for shard, each in zip(shards, parameters, strict=True) if not each.requires_grad]
        if frozen:
            ctx.mark_non_differentiable(*frozen)
        return shards

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.finish()
        if ctx.compiled:
            _waited(gradients)
        if torch.is_grad_enabled():  # create_graph=True: gradients need a history
            pairs = zip(gradients, ctx.specs, strict=True)
            return (None, None, None, *(None if each is None else _differentiable(each, spec) for each, spec in pairs))
        if ctx.nodes is None:
            ctx.nodes = [node for node, _ in ctx.next_functions]
        left: list[Tensor | None] = []
        seen: set[int] = set()
        is_eager = not torch.compiler.is_compiling()
        for node, parameter, spec, gradient in zip(ctx.nodes, ctx.parameters, ctx.specs, gradients, strict=True):
            wrapped = None
            if gradient is not None:
                # A sum of two parameters gives both one gradient, and later gradients are added to each in place.
                if id(gradient) in seen:
                    gradient = gradient.clone()
                seen.add(id(gradient))
                # `__new__` alone, as `DTensor.__init__` does nothing and takes time.
                wrapped = DTensor.__new__(DTensor, gradient.contiguous(), spec, requires_grad=False)
                if is_eager and _only_put(parameter, node):
                    parameter.grad, wrapped = wrapped, None
            left.append(wrapped)
        return (None, None, None, *left)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _waited(gradients: Sequence[Tensor | None]) -> None:
    """Wait for the gradients that a compiled graph has begun to reduce."""
    waited(gradients)


def _only_put(parameter: DTensor, node: Any) -> bool:
    """Return whether autograd would only store the gradient of a parameter in `.grad`."""
    return (
        parameter.grad is None
        and parameter.requires_grad
        and not parameter._backward_hooks
        and not parameter._post_accumulate_grad_hooks
        and parameter._local_tensor.is_cpu  # on other devices autograd synchronises streams
        and _will_be_put(node)
    )


def _will_be_put(node: Any) -> bool:
    """Return whether this backward stores the gradient of a parameter in `.grad`."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # raised within `torch.autograd.grad`, which returns the gradient to its caller
        return False


def _differentiable(gradient: Tensor, spec: Any) -> Tensor:
    meta = spec.tensor_meta
    return DTensor.from_local(
        gradient, spec.mesh, spec.placements, run_check=False, shape=meta.shape, stride=meta.stride
    )
