"""Modules of ops on routed rows on one rank: the order of rows, dispatch, products by group, combination."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.lowering.modules.float8_groups import float8_grouped
from autopar.rules.shard_call.sparse_rows import combine_rows, dispatch_rows, grouped_rows, sort_rows

__all__ = ["FLOAT8", "CombineRows", "DispatchRows", "GroupedRows", "SortRows"]

# In place of the name of a kernel.
FLOAT8 = "float8"


class SortRows(nn.Module):
    """Order the rows of a rank by group; called with their keys."""

    def __init__(self, first: int, groups: int, every: bool) -> None:
        super().__init__()
        self.first = first
        self.groups = groups
        self.every = every

    def forward(self, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return sort_rows(key, self.first, self.groups, self.every)


class DispatchRows(nn.Module):
    """Take the stored rows, by their order, from a tensor in which each of `repeats` of them stands once."""

    def __init__(self) -> None:
        super().__init__()
        self.repeats = 1

    def forward(self, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        return dispatch_rows(rows, order, inverse, self.repeats)


class CombineRows(nn.Module):
    """Put stored rows back into their places; rows of other groups are zero."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        return combine_rows(rows, order, inverse, self.rows)


class GroupedRows(nn.Module):
    """Multiply the stored rows of each group by its matrix.

    `product`: name of the kernel of the model, or FLOAT8.
    `op`: name of the op, if it is the first product of its rows: it keeps their ends, to be read on request.
    """

    def __init__(self, product: str, op: str | None) -> None:
        super().__init__()
        self.product = product
        self.op = op
        self._latest: Tensor | None = None

    def forward(self, rows: Tensor, matrices: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
        if self.op is not None and not torch.compiler.is_compiling():
            self._latest = ends
        if self.product == FLOAT8:
            return float8_grouped(rows, matrices, bias, ends)
        return grouped_rows(rows, matrices, bias, ends, self.product)

    def latest_rows(self) -> int | None:
        """Return the rows of the latest uncompiled forward; the host waits for the device."""
        return None if self._latest is None else int(self._latest[-1])
