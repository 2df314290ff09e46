"""Run routed rows sparsely: of the dim `(g s)` a tensor stores the rows of their own group, and no zeros.

Stored rows stand by group, and within a group by their place among all rows of the rank. So the order follows from the
keys and the sharding alone, and tensors of one routing agree. The order and the number of rows of each group are made
once for a routing; dispatch, products and combination read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from autopar.rules.ops.routed import COMBINE, DISPATCH, GROUPED_ROWS

__all__ = [
    "combine_rows",
    "dispatch_rows",
    "ends_of",
    "grouped_rows",
    "inverse_of",
    "multiply_groups",
    "sort_rows",
    "store_sparsely",
    "sum_groups",
    "with_bias",
]

_LIBRARY: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]


# -- order of rows -----------------------------------------------------------------------------------------------------


def inverse_of(order: Tensor) -> Tensor:
    """Return the inverse of a permutation."""
    return torch.empty_like(order).index_copy_(0, order, torch.arange(order.shape[0], device=order.device))


def _sort_rows(key: Tensor, first: int, groups: int, every: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the places of the rows by group, the inverse, and the number of rows of each group.

    With `every`, all keys are of these groups. Else the others are left out, and there is no inverse.
    """
    if every:
        ordered, order = key.sort(stable=True)
        return order, inverse_of(order), _counts(ordered, first, groups)
    own = ((key >= first) & (key < first + groups)).nonzero().squeeze(1)
    ordered, places = key.index_select(0, own).sort(stable=True)
    return own.index_select(0, places), own.new_empty(0), _counts(ordered, first, groups)


def _counts(ordered: Tensor, first: int, groups: int) -> Tensor:
    """Return the number of rows of each group, without a read by the host."""
    each = torch.arange(first - 1, first + groups, device=ordered.device, dtype=ordered.dtype)
    return torch.searchsorted(ordered, each, right=True).diff()


def _sorted_like(key: Tensor, first: int, groups: int, every: bool) -> tuple[Tensor, Tensor, Tensor]:
    count = key.shape[0] if every else torch.library.get_ctx().new_dynamic_size()
    order = key.new_empty(count, dtype=torch.int64)
    inverse = key.new_empty(count if every else 0, dtype=torch.int64)
    return order, inverse, key.new_empty(groups, dtype=torch.int64)


_LIBRARY.define("sort_rows(Tensor key, int first, int groups, bool every) -> (Tensor, Tensor, Tensor)")
_LIBRARY.impl("sort_rows", _sort_rows, "CompositeExplicitAutograd")
torch.library.register_fake("autopar::sort_rows", _sorted_like, lib=_LIBRARY)


def sort_rows(key: Tensor, first: int, groups: int, every: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return order, inverse and counts of the rows of some groups, as one op."""
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.autopar.sort_rows.default(key, first, groups, every)
    return found


class _TakeRows(torch.autograd.Function):
    """Rows in another order, or some of them; the gradient puts them back without sums, so it is deterministic."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        ctx.rows = x.shape[0]
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        order, inverse = ctx.saved_tensors
        return combine_rows(gradient, order, inverse, ctx.rows), None, None


class _PutRows(torch.autograd.Function):
    """Inverse of `_TakeRows`; rows that were not taken are zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(order, inverse)
        if inverse.shape[0] == rows:
            return x.index_select(0, inverse)
        return x.new_zeros(rows, *x.shape[1:]).index_copy(0, order, x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        order, inverse = ctx.saved_tensors
        return dispatch_rows(gradient, order, inverse), None, None, None


def dispatch_rows(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Return the rows of `dispatch` that are stored."""
    found: Tensor = _TakeRows.apply(rows, order, inverse)  # type: ignore[no-untyped-call]
    return found


def combine_rows(rows: Tensor, order: Tensor, inverse: Tensor, count: int) -> Tensor:
    """Return stored rows in the places that they came from; `count` is the number of all rows."""
    found: Tensor = _PutRows.apply(rows, order, inverse, count)  # type: ignore[no-untyped-call]
    return found


# -- products ----------------------------------------------------------------------------------------------------------


def _is_fused(rows: Tensor, product: str) -> bool:
    # The kernel wants lines of 16 bytes; on a CPU it is a loop as well, and refuses float64 and tensors without rows.
    return rows.is_cuda and product == "aten._grouped_mm.default" and rows.dtype is torch.bfloat16


def ends_of(counts: Tensor) -> Tensor:
    """Return the ends of the groups, as kernels want them."""
    return counts.cumsum(0).to(torch.int32)


def multiply_groups(rows: Tensor, matrices: Tensor, counts: Tensor, product: str) -> Tensor:
    """Multiply the rows of each group by its matrix; `counts` are the rows of each group."""
    if _is_fused(rows, product) and rows.shape[0]:
        return torch._grouped_mm(rows, matrices, ends_of(counts))
    found = rows.new_empty(rows.shape[0], matrices.shape[2])
    start = 0
    for group, count in enumerate(counts.tolist()):
        if count:
            torch.mm(rows[start : start + count], matrices[group], out=found[start : start + count])
        start += count
    assert start == rows.shape[0], f"groups of {start} rows in all, expected {rows.shape[0]}"
    return found


def sum_groups(rows: Tensor, gradients: Tensor, counts: Tensor, product: str) -> Tensor:
    """Return the gradient of each group's matrix, zero for a group without rows."""
    if _is_fused(rows, product) and rows.shape[0]:
        return torch._grouped_mm(rows.t(), gradients, ends_of(counts))
    found = rows.new_empty(counts.shape[0], rows.shape[1], gradients.shape[1])
    start = 0
    for group, count in enumerate(counts.tolist()):
        torch.mm(rows[start : start + count].t(), gradients[start : start + count], out=found[group])
        start += count
    return found


# Opaque: loops over counts would break the graph of `torch.compile`.
_LIBRARY.define("multiply_groups(Tensor rows, Tensor matrices, Tensor counts, str product) -> Tensor")
_LIBRARY.define("sum_groups(Tensor rows, Tensor gradients, Tensor counts, str product) -> Tensor")
_LIBRARY.impl("multiply_groups", multiply_groups, "CompositeExplicitAutograd")
_LIBRARY.impl("sum_groups", sum_groups, "CompositeExplicitAutograd")
torch.library.register_fake(
    "autopar::multiply_groups",
    lambda rows, matrices, counts, product: rows.new_empty(rows.shape[0], matrices.shape[2]),
    lib=_LIBRARY,
)
torch.library.register_fake(
    "autopar::sum_groups",
    lambda rows, gradients, counts, product: rows.new_empty(counts.shape[0], rows.shape[1], gradients.shape[1]),
    lib=_LIBRARY,
)


class _MultiplyGroups(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor, counts: Tensor, product: str) -> Tensor:
        ctx.save_for_backward(rows, matrices, counts)
        ctx.product = product
        found: Tensor = torch.ops.autopar.multiply_groups.default(rows, matrices, counts, product)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, matrices, counts = ctx.saved_tensors
        of_rows = of_matrices = None
        if ctx.needs_input_grad[0]:
            of_rows = _multiplied(gradient, matrices.transpose(1, 2), counts, ctx.product)
        if ctx.needs_input_grad[1]:
            # In the order of memory of the matrices: a weight that is used transposed would copy its gradient.
            turned = matrices.stride(1) < matrices.stride(2)
            pair = (gradient, rows) if turned else (rows, gradient)
            found: Tensor = _SumGroups.apply(*pair, counts, ctx.product)  # type: ignore[no-untyped-call]
            of_matrices = found.transpose(1, 2) if turned else found
        return of_rows, of_matrices, None, None


class _SumGroups(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, gradients: Tensor, counts: Tensor, product: str) -> Tensor:
        ctx.save_for_backward(rows, gradients, counts)
        ctx.product = product
        found: Tensor = torch.ops.autopar.sum_groups.default(rows, gradients, counts, product)
        return found

    @staticmethod
    def backward(ctx: Any, second: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, gradients, counts = ctx.saved_tensors
        of_rows = _multiplied(gradients, second.transpose(1, 2), counts, ctx.product)
        return of_rows, _multiplied(rows, second, counts, ctx.product), None, None


def _multiplied(rows: Tensor, matrices: Tensor, counts: Tensor, product: str) -> Tensor:
    found: Tensor = _MultiplyGroups.apply(rows, matrices, counts, product)  # type: ignore[no-untyped-call]
    return found


def grouped_rows(rows: Tensor, matrices: Tensor, bias: Tensor | None, counts: Tensor, product: str) -> Tensor:
    """Return the stored rows of `grouped`."""
    return with_bias(_multiplied(rows, matrices, counts, product), bias, counts)


def with_bias(rows: Tensor, bias: Tensor | None, counts: Tensor) -> Tensor:
    """Add the bias of its group to each row."""
    return rows if bias is None else rows + bias.repeat_interleave(counts, dim=0, output_size=rows.shape[0])


# -- on one process ----------------------------------------------------------------------------------------------------


def store_sparsely(graph: Graph) -> None:
    """Let a traced graph store its routed rows sparsely, in place; one process runs it."""
    orders: dict[Node, Sequence[Node]] = {}
    routings: dict[Node, Node] = {}
    for node in list(graph.nodes):
        key: Any = node.args[1] if node.target in (DISPATCH, COMBINE) else None
        if node.target is DISPATCH:
            routings[node] = key
            if key not in orders:
                with graph.inserting_before(node):
                    made = graph.call_function(sort_rows, (key, 0, node.args[2], True))
                    orders[key] = [graph.call_function(_item, (made, place)) for place in range(3)]
            order, inverse, _ = orders[key]
            node.target, node.args = dispatch_rows, (node.args[0], order, inverse)
        elif node.target is COMBINE:
            order, inverse, _ = orders[key]
            with graph.inserting_before(node):
                count = graph.call_function(torch.ops.aten.sym_size.int, (key, 0))
            node.target, node.args = combine_rows, (node.args[0], order, inverse, count)
        elif node.target is GROUPED_ROWS:
            rows: Any
            rows, matrices, bias, product = node.args
            node.target, node.args = grouped_rows, (rows, matrices, bias, orders[routings[rows]][2], product)
        for source in node.all_input_nodes if node not in routings else ():
            if source in routings and node.target is not combine_rows:
                routings[node] = routings[source]


def _item(values: Sequence[Tensor], place: int) -> Tensor:
    return values[place]
