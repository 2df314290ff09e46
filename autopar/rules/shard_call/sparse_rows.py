"""Run routed rows sparsely: of the dim `(g s)` a tensor stores the rows of their own group, and no zeros.

Stored rows stand by group, and within a group by their place among all rows of the rank. So the order follows from the
keys and the sharding alone, and tensors of one routing agree. The order and the ends of the groups are made once for a
routing; dispatch, products and combination read them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from autopar.rules.ops.routed import COMBINE, DISPATCH, GROUPED_ROWS

__all__ = [
    "combine_rows",
    "counts_of",
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
    """Return the places of the rows by group, the inverse, and the ends of the groups.

    With `every`, all keys are of these groups. Else the others are left out, and there is no inverse.
    """
    if every:
        ordered, order = key.sort(stable=True)
        return order, inverse_of(order), _ends(ordered, first, groups)
    own = ((key >= first) & (key < first + groups)).nonzero().squeeze(1)
    ordered, places = key.index_select(0, own).sort(stable=True)
    return own.index_select(0, places), own.new_empty(0), _ends(ordered, first, groups)


def _ends(ordered: Tensor, first: int, groups: int) -> Tensor:
    """Return the end of the rows of each group, as kernels want them, without a read by the host."""
    each = torch.arange(first, first + groups, device=ordered.device, dtype=ordered.dtype)
    return torch.searchsorted(ordered, each, right=True, out_int32=True)


def ends_of(counts: Tensor) -> Tensor:
    """Return the ends of groups of so many rows."""
    return counts.cumsum(0, dtype=torch.int32)


def counts_of(ends: Tensor) -> Tensor:
    """Return the number of rows of each group."""
    return ends.diff(prepend=ends.new_zeros(1)).long()


def _sorted_like(key: Tensor, first: int, groups: int, every: bool) -> tuple[Tensor, Tensor, Tensor]:
    count = key.shape[0] if every else torch.library.get_ctx().new_dynamic_size()
    order = key.new_empty(count, dtype=torch.int64)
    inverse = key.new_empty(count if every else 0, dtype=torch.int64)
    return order, inverse, key.new_empty(groups, dtype=torch.int32)


_LIBRARY.define("sort_rows(Tensor key, int first, int groups, bool every) -> (Tensor, Tensor, Tensor)")
_LIBRARY.impl("sort_rows", _sort_rows, "CompositeExplicitAutograd")
torch.library.register_fake("autopar::sort_rows", _sorted_like, lib=_LIBRARY)


def sort_rows(key: Tensor, first: int, groups: int, every: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return order, inverse and ends of the rows of some groups, as one op where a compiler traces it."""
    if _is_plain(key):
        return _sort_rows(key, first, groups, every)
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.autopar.sort_rows.default(key, first, groups, every)
    return found


def _applied(node: type[torch.autograd.Function], plain: Callable[..., Tensor], *given: Any) -> Tensor:
    """Run an op as a node of autograd, or plainly without gradients, as in a backward.

    A node takes as long as a small kernel.
    """
    found: Tensor = node.apply(*given) if torch.is_grad_enabled() else plain(*given)  # type: ignore[no-untyped-call]
    return found


class _TakeRows(torch.autograd.Function):
    """Rows in another order, or some of them; the gradient puts them back without sums, so it is deterministic."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, repeats: int) -> Tensor:
        ctx.save_for_backward(order, inverse)
        ctx.rows, ctx.repeats = x.shape[0], repeats
        return _taken(x, order, inverse, repeats)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        order, inverse = ctx.saved_tensors
        found = combine_rows(gradient, order, inverse, ctx.rows * ctx.repeats)
        if ctx.repeats > 1:
            found = found.view(ctx.rows, ctx.repeats, *found.shape[1:]).sum(1)
        return found, None, None, None


class _PutRows(torch.autograd.Function):
    """Inverse of `_TakeRows`; rows that were not taken are zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return _put(x, order, inverse, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        order, inverse = ctx.saved_tensors
        return dispatch_rows(gradient, order, inverse), None, None, None


def _taken(x: Tensor, order: Tensor, inverse: Tensor, repeats: int) -> Tensor:
    return x.index_select(0, order if repeats == 1 else order // repeats)


def _put(x: Tensor, order: Tensor, inverse: Tensor, rows: int) -> Tensor:
    if inverse.shape[0] == rows:
        return x.index_select(0, inverse)
    return x.new_zeros(rows, *x.shape[1:]).index_copy_(0, order, x)


def dispatch_rows(rows: Tensor, order: Tensor, inverse: Tensor, repeats: int = 1) -> Tensor:
    """Return the rows of `dispatch` that are stored; each of `rows` stands for so many in a row."""
    return _applied(_TakeRows, _taken, rows, order, inverse, repeats)


def combine_rows(rows: Tensor, order: Tensor, inverse: Tensor, count: int) -> Tensor:
    """Return stored rows in the places that they came from; `count` is the number of all rows."""
    return _applied(_PutRows, _put, rows, order, inverse, count)


# -- products ----------------------------------------------------------------------------------------------------------


# Bytes that divide every stride and address of the kernel's operands.
_ALIGNMENT = 16
# On a CPU the kernel is the loop below in C++, with the same numbers.
_CPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _has_kernel(left: Tensor, right: Tensor, product: str) -> bool:
    if left.is_cuda:
        taken = product == "aten._grouped_mm.default" and left.dtype is torch.bfloat16
    else:
        taken = left.is_cpu and left.dtype in _CPU_DTYPES
    if not taken or left.dtype is not right.dtype:
        return False
    # Results with other lines than these would have gaps between them.
    has_aligned_results = right.shape[-1] * right.element_size() % _ALIGNMENT == 0
    return has_aligned_results and _is_aligned(left) and _is_aligned(right)


def _is_aligned(x: Tensor) -> bool:
    """Return whether the lines of matrices begin at multiples of 16 bytes."""
    if not x.numel() or x.data_ptr() % _ALIGNMENT:
        return False
    *outer, first, second = x.stride()
    line, size = (first, x.shape[-1]) if second == 1 else (second, x.shape[-2])
    dense = 1 in (first, second) and line >= size
    return dense and not any(stride * x.element_size() % _ALIGNMENT for stride in (*outer, line))


def multiply_groups(rows: Tensor, matrices: Tensor, ends: Tensor, product: str) -> Tensor:
    """Multiply the rows of each group by its matrix; `ends` are those of the groups."""
    if _has_kernel(rows, matrices, product):
        return torch._grouped_mm(rows, matrices, ends)
    found = rows.new_empty(rows.shape[0], matrices.shape[2])
    start = 0
    for group, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(rows[start:end], matrices[group], out=found[start:end])
        start = end
    assert start == rows.shape[0], f"groups of {start} rows in all, expected {rows.shape[0]}"
    return found


def sum_groups(rows: Tensor, gradients: Tensor, ends: Tensor, product: str) -> Tensor:
    """Return the gradient of each group's matrix, zero for a group without rows."""
    if _has_kernel(rows, gradients, product):
        return torch._grouped_mm(rows.t(), gradients, ends)
    found = rows.new_empty(ends.shape[0], rows.shape[1], gradients.shape[1])
    start = 0
    for group, end in enumerate(ends.tolist()):
        torch.mm(rows[start:end].t(), gradients[start:end], out=found[group])
        start = end
    return found


# Opaque: loops over counts would break the graph of `torch.compile`.
_LIBRARY.define("multiply_groups(Tensor rows, Tensor matrices, Tensor ends, str product) -> Tensor")
_LIBRARY.define("sum_groups(Tensor rows, Tensor gradients, Tensor ends, str product) -> Tensor")
_LIBRARY.impl("multiply_groups", multiply_groups, "CompositeExplicitAutograd")
_LIBRARY.impl("sum_groups", sum_groups, "CompositeExplicitAutograd")
torch.library.register_fake(
    "autopar::multiply_groups",
    lambda rows, matrices, ends, product: rows.new_empty(rows.shape[0], matrices.shape[2]),
    lib=_LIBRARY,
)
torch.library.register_fake(
    "autopar::sum_groups",
    lambda rows, gradients, ends, product: rows.new_empty(ends.shape[0], rows.shape[1], gradients.shape[1]),
    lib=_LIBRARY,
)


class _MultiplyGroups(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor, ends: Tensor, product: str) -> Tensor:
        ctx.save_for_backward(rows, matrices, ends)
        ctx.product = product
        return _products(rows, matrices, ends, product)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, matrices, ends = ctx.saved_tensors
        of_rows = of_matrices = None
        if ctx.needs_input_grad[0]:
            of_rows = _multiplied(gradient, matrices.transpose(1, 2), ends, ctx.product)
        if ctx.needs_input_grad[1]:
            # In the order of memory of the matrices: a weight that is used transposed would copy its gradient.
            turned = matrices.stride(1) < matrices.stride(2)
            left, right = (gradient, rows) if turned else (rows, gradient)
            found = _summed(left, right, ends, ctx.product)
            of_matrices = found.transpose(1, 2) if turned else found
        return of_rows, of_matrices, None, None


class _SumGroups(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, gradients: Tensor, ends: Tensor, product: str) -> Tensor:
        ctx.save_for_backward(rows, gradients, ends)
        ctx.product = product
        return _sums(rows, gradients, ends, product)

    @staticmethod
    def backward(ctx: Any, second: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, gradients, ends = ctx.saved_tensors
        of_rows = _multiplied(gradients, second.transpose(1, 2), ends, ctx.product)
        return of_rows, _multiplied(rows, second, ends, ctx.product), None, None


def _products(rows: Tensor, matrices: Tensor, ends: Tensor, product: str) -> Tensor:
    found: Tensor = torch.ops.autopar.multiply_groups.default(rows, matrices, ends, product)
    return found


def _sums(rows: Tensor, gradients: Tensor, ends: Tensor, product: str) -> Tensor:
    found: Tensor = torch.ops.autopar.sum_groups.default(rows, gradients, ends, product)
    return found


def _multiplied(rows: Tensor, matrices: Tensor, ends: Tensor, product: str) -> Tensor:
    return _applied(_MultiplyGroups, _products, rows, matrices, ends, product)


def _summed(rows: Tensor, gradients: Tensor, ends: Tensor, product: str) -> Tensor:
    return _applied(_SumGroups, _sums, rows, gradients, ends, product)


def grouped_rows(rows: Tensor, matrices: Tensor, bias: Tensor | None, ends: Tensor, product: str) -> Tensor:
    """Return the stored rows of `grouped`."""
    if _is_plain(rows) and _has_kernel(rows, matrices, product):
        # With autograd's own node: one in Python takes as long as a small kernel.
        found = torch._grouped_mm(rows, matrices, ends)
        if found.requires_grad:
            found.register_hook(_dense)  # type: ignore[no-untyped-call]
    else:
        found = _multiplied(rows, matrices, ends, product)
    return with_bias(found, bias, ends)


def _is_plain(x: Tensor) -> bool:
    return type(x) is Tensor and not torch.compiler.is_compiling()


def _dense(gradient: Tensor) -> Tensor:
    return gradient if _is_aligned(gradient) else gradient.clone(memory_format=torch.contiguous_format)


def with_bias(rows: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    """Add the bias of its group to each row."""
    return rows if bias is None else rows + bias.repeat_interleave(counts_of(ends), dim=0, output_size=rows.shape[0])


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
