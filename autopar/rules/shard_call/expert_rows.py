"""Op `expert_rows`: multiply each row by the matrix of its expert, with the rows in any order.

What models do is sort their rows by expert, multiply group by group, and put the rows back. Sorted, a row may stand
anywhere, so nothing of that can be split by batch. As one op with rows that stay where they are, it can; inside, each
shard sorts its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["GROUPED", "expert_rows"]

# Products of sorted rows, called with rows, a matrix for each expert, and where the rows of each expert end.
GROUPED = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")


def expert_rows(rows: Tensor, matrices: Tensor, experts: Tensor, product: str) -> Tensor:
    """Multiply rows `[n, k]` by matrices `[e, k, m]`; each row has an expert, and GROUPED names the kernel."""
    namespace, name, overload = product.split(".")
    multiply = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    ordered, order = experts.sort(stable=True)
    each = torch.arange(matrices.shape[0], device=experts.device, dtype=experts.dtype)
    ends = torch.searchsorted(ordered, each, right=True).to(torch.int32)
    found = multiply(rows.index_select(0, order), matrices, ends)
    return torch.zeros_like(found).index_copy(0, order, found)


# Autograd and shapes come from the ops inside.
torch.library.define("autopar::expert_rows", "(Tensor rows, Tensor matrices, Tensor experts, str product) -> Tensor")
torch.library.impl("autopar::expert_rows", "CompositeImplicitAutograd", expert_rows)
