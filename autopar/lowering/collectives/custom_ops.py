"""Operators of the rewriter's own that the compiler does not see into.

Defined when the module is imported: a compiled function cannot define them, and of several threads only one may.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["kept", "sums_begun"]

_LIBRARY: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]


def kept(x: Tensor, shape: Sequence[int], keep: bool) -> Tensor:
    """A copy of a tensor, or zeros of some shape.

    The compiler would see that zeros depend on nothing: a rank that holds only zeros would then drop the collectives
    before them or move those after them from the backward to the forward, while the other ranks do not, and all of them
    would hang.
    """
    found: Tensor = torch.ops.autopar.kept.default(x, list(shape), keep)
    return found


def sums_begun(gradients: Sequence[Tensor], group: str) -> list[Tensor]:
    """Tensors that are being added up over a group: somebody waits for one of them, and with it for all.

    The compiler would be free to copy what has not come.
    """
    found: list[Tensor] = torch.ops.autopar.sums_begun.default(list(gradients), group)
    return found


def _kept(x: Tensor, shape: Sequence[int], keep: bool) -> Tensor:
    return x.clone() if keep else x.new_zeros(shape)


def _kept_like(x: Tensor, shape: Sequence[int], keep: bool) -> Tensor:
    return torch.empty_like(x) if keep else x.new_empty(shape)


def _sums_begun(gradients: list[Tensor], group: str) -> list[Tensor]:
    flat = torch.cat([x.reshape(-1) for x in gradients])
    torch.ops._c10d_functional.all_reduce_(flat, "sum", group)
    return list(torch._C._nn.unflatten_dense_tensors(flat, gradients))


def _sums_like(gradients: list[Tensor], group: str) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in gradients]


_LIBRARY.define("kept(Tensor x, SymInt[] shape, bool keep) -> Tensor")
_LIBRARY.impl("kept", _kept, "CompositeExplicitAutograd")
torch.library.register_fake("autopar::kept", _kept_like, lib=_LIBRARY)
_LIBRARY.define("sums_begun(Tensor[] gradients, str group) -> Tensor[]")
_LIBRARY.impl("sums_begun", _sums_begun, "CompositeExplicitAutograd")
torch.library.register_fake("autopar::sums_begun", _sums_like, lib=_LIBRARY)
