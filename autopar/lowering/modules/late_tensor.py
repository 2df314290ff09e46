"""A small tensor whose value is pending: other ranks have not sent their parts yet.

It is waited for when its value is read. The backward of a loss does not read it, so ranks do not wait for each other
between forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

__all__ = ["LateTensor"]


class LateTensor(Tensor):
    """Tensor that becomes an ordinary one when its value arrives."""

    # The tensor without autograd, in the same memory.
    _own: Tensor
    _arrival: Callable[[], Tensor | complex]

    @staticmethod
    def of(like: Tensor, arrival: Callable[[], Tensor | complex]) -> LateTensor:
        """Make a tensor of this shape, dtype and device; `arrival` waits, and returns the values or one for all."""
        own = torch.full_like(like, torch.nan if like.is_floating_point() else -1, requires_grad=False)
        made: LateTensor = torch.Tensor._make_subclass(LateTensor, own)
        made._own, made._arrival = own, arrival
        return made

    def arrive(self) -> None:
        own, arrival = self.__dict__.pop("_own"), self.__dict__.pop("_arrival")
        self.__class__ = Tensor  # type: ignore[assignment]
        values = arrival()
        with torch.no_grad():
            # Through `data`: no reader can have seen the values that are overwritten.
            if isinstance(values, Tensor):
                own.data.copy_(values.reshape(own.shape))
            else:
                own.data.fill_(values)

    @staticmethod
    def arrive_all(values: Any) -> None:
        """Wait for all pending tensors in a tree of values."""
        for value in tree_iter(values):
            if isinstance(value, LateTensor):
                value.arrive()

    # A compiler would trace this wait, and has no values to wait for.
    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function not in _BLIND:
            cls.arrive_all((args, kwargs))
            # None of them is pending any more; other subclasses, such as a sharded output, have their turn.
            return function(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


# Ops on a loss before and in its backward that do not read its value.
_BLIND = frozenset(
    (
        Tensor.backward,
        torch.autograd.grad,
        torch.ones_like,  # the gradient that a backward begins with
        Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
        Tensor.grad_fn.__get__,  # type: ignore[union-attr]
    )
)
