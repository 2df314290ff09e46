"""Which tensors a piece of a program makes: the largest one of truths, and the largest of all."""

from __future__ import annotations

from typing import Any

from torch import Tensor, bool
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Masks"]


class Masks(TorchDispatchMode):
    """Elements of the largest tensors that are made while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.truths = self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for made in tree_leaves(results):
            if isinstance(made, Tensor):
                self.numel = max(self.numel, made.numel())
                self.truths = max(self.truths, made.numel() if made.dtype is bool else 0)
        return results
