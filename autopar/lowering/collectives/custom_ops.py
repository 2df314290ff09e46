"""Operators of the rewriter's own that the compiler does not see into.

Defined when the module is imported: a compiled function cannot define them, and of several threads only one may.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["sums_begun"]

_LIBRARY: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]


def sums_begun(gradients: Sequence[Tensor], group: str) -> list[Tensor]:
    """Tensors that are being added up over a group: somebody waits for one of them, and with it for all.

    The compiler would be free to copy what has not come.
    """
    found: list[Tensor] = torch.ops.autopar.sums_begun.default(list(gradients), group)
    return found


def _sums_begun(gradients: list[Tensor], group: str) -> list[Tensor]:
    flat = torch.cat([x.reshape(-1) for x in gradients])
    torch.ops._c10d_functional.all_reduce_(flat, "sum", group)
    return list(torch._C._nn.unflatten_dense_tensors(flat, gradients))


def _sums_like(gradients: list[Tensor], group: str) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in gradients]


_LIBRARY.define("sums_begun(Tensor[] gradients, str group) -> Tensor[]")
_LIBRARY.impl("sums_begun", _sums_begun, "CompositeExplicitAutograd")
torch.library.register_fake("autopar::sums_begun", _sums_like, lib=_LIBRARY)
