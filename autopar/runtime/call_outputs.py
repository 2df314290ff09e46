"""Outputs of a parallel module: DTensors that go together with plain tensors, and shards with averaged gradients.

Under `outputs="sharded"` a loss or a metric outside of the model mixes an output with plain targets, which DTensor
refuses. Every rank has the whole targets, as it has the whole inputs. So the output is gathered there, once, and the
rest of the loss is computed on plain tensors, alike on every rank: its gradients are those of one process. Ops on
outputs alone stay sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_iter, tree_map

from autopar.errors import AutoparError
from autopar.ir.pytree import Flattened

__all__ = ["ShardedOutput", "averaged", "whole", "with_plain"]

# Reads by Python and numpy, for which a shard would be another value.
_READS = frozenset(
    {
        Tensor.item,
        Tensor.tolist,
        Tensor.numpy,
        Tensor.__array__,
        Tensor.__bool__,
        Tensor.__complex__,
        Tensor.__contains__,
        Tensor.__float__,
        Tensor.__format__,
        Tensor.__index__,
        Tensor.__int__,
        Tensor.__iter__,
        torch.equal,
    }
)
# A backward that fails must not run again.
_BACKWARDS = frozenset({Tensor.backward, torch.autograd.backward, torch.autograd.grad})
# Functions that write into their first argument, beside those whose names end with `_`.
_IN_PLACE = frozenset({"__setitem__", "__iand__", "__ilshift__", "__ior__", "__irshift__", "__ixor__"})
WRITTEN = (
    "{name} writes into an output of a parallel module, which is split over the ranks, and cannot be done in shards\n"
    "fix: write into a copy, as in `output = output.full_tensor().clone()`; or outputs='full'"
)
MY_ROWS = (
    "{name} of an output of shape {whole} and a tensor of shape {given}: expected the tensor of the whole batch on "
    "every rank, as for the inputs, got the rows of this rank's shard of shape {shard}\n"
    "fix: pass whole targets; or outputs='local' for losses of each rank's rows"
)


class ShardedOutput(DTensor):
    """DTensor that is gathered where it meets a plain tensor, or is read by Python or numpy."""

    # The whole tensor, once it was needed, with the version of the shard that it was gathered from.
    _gathered: tuple[int, Tensor] | None = None

    @staticmethod
    def of(output: DTensor) -> ShardedOutput:
        """Make an output, or a result of ops on one, such a tensor."""
        made: Any = output
        made.__class__ = ShardedOutput
        return made  # type: ignore[no-any-return]

    def _whole(self) -> Tensor:
        """Return the whole tensor; all ranks communicate the first time."""
        known, version = self._gathered, _version(self._local_tensor)
        has_history = torch.is_grad_enabled() and self.requires_grad
        if known is not None and known[0] == version and (known[1].requires_grad or not has_history):
            return known[1]
        whole = self.full_tensor()
        self._gathered = None if version is None else (version, whole)
        return whole

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a DTensor of the same shards: a file needs no autopar to be read."""
        plain: Any = DTensor.__new__(DTensor, self._local_tensor, self._spec, requires_grad=self.requires_grad)
        return plain.__reduce_ex__(protocol)

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)]
        if function in _READS or not all(isinstance(each, DTensor) for each in given):
            return _on_whole(function, args, kwargs, given)
        try:
            with torch._C.DisableTorchFunctionSubclass():
                found = function(*args, **kwargs)
        except RuntimeError as error:  # torch cannot split every op
            if function in _BACKWARDS or isinstance(error, torch.distributed.DistError):
                raise
            return _on_whole(function, args, kwargs, given)
        known = set(map(id, given))
        made = [one for one in tree_iter(found) if type(one) is DTensor and id(one) not in known]
        for one in made:  # in place: a tree that is rebuilt may lose its type, as torch.Size does
            ShardedOutput.of(one)
        return found


def with_plain(flat: Flattened) -> Flattened:
    """Return inputs of a call with outputs and replicated DTensors as whole tensors, if plain ones are beside them."""
    sharded = sum(isinstance(one, DTensor) for one in flat.tensors)
    if sharded in (0, len(flat.tensors)):
        return flat
    return replace(flat, tensors=tuple(map(_as_plain, flat.tensors)))


def whole(given: DTensor) -> Tensor:
    """Return the whole tensor of a DTensor; all ranks communicate, once for an output."""
    return given._whole() if isinstance(given, ShardedOutput) else given.full_tensor()


def _as_plain(given: Tensor) -> Tensor:
    if isinstance(given, ShardedOutput):
        return given._whole()
    # Such as the zeros that a model makes like its parameters, for the state of a recurrent layer.
    if isinstance(given, DTensor) and all(one.is_replicate() for one in given.placements):
        return given.to_local()
    return given


def _on_whole(function: Callable[..., Any], args: Any, kwargs: Any, given: list[Tensor]) -> Any:
    """Run a function on the whole tensors."""
    name = getattr(function, "__name__", str(function))
    if args and isinstance(args[0], ShardedOutput) and _writes(name):
        raise AutoparError(WRITTEN.format(name=name))
    outputs = [each for each in given if isinstance(each, ShardedOutput)]
    with torch._C.DisableTorchFunctionSubclass():
        args, kwargs = tree_map(lambda one: one._whole() if isinstance(one, ShardedOutput) else one, (args, kwargs))
    # Other subclasses, such as a loss of the model that is pending, have their turn.
    try:
        return function(*args, **kwargs)
    except (RuntimeError, ValueError) as error:
        for output in outputs:
            shard = output._local_tensor.shape
            for plain in (one for one in given if not isinstance(one, DTensor)):
                if shard[:1] == plain.shape[:1] != output.shape[:1]:
                    shapes = {"whole": list(output.shape), "given": list(plain.shape), "shard": list(shard)}
                    raise AutoparError(MY_ROWS.format(name=name, **shapes)) from error
        raise


def _writes(name: str) -> bool:
    """Return whether a function of this name writes into its first argument."""
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _version(local: Tensor) -> int | None:
    """Return the number of writes to a shard; None for inference tensors, which do not count them."""
    return None if local.is_inference() else local._version


def averaged(value: Any, shards: float) -> Any:
    """Return a shard whose gradient is divided by the number of shards, as in DDP."""
    if shards == 1 or not isinstance(value, Tensor) or not value.requires_grad:
        return value
    return _Averaged.apply(value, shards)  # type: ignore[no-untyped-call]


class _Averaged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, shards: float) -> Tensor:
        ctx.shards = shards
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.shards, None
