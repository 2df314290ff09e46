"""Replace a lookup with counting indices by a `gather`, so that the counted dims can be split.

In `x[arange(batch), i]` row b of `x` meets index b of `i`. A lookup may read any place of all indexed dims, so neither
could be split. An index that counts 0, 1, 2 ... over a whole dim pairs this dim with a dim of the other indices. Such
indices are found by their values, which depend on sizes alone. At most one other index may remain: the lookup becomes
a `gather` along its dim, a write a `scatter`. Without a remaining index only views are left.

Input::

    rows = arange(4)                       # x: [4, 6, 3], i: [4]
    y = index(x, [rows, i])
Output::

    place = where(i < 0, i + 6, i)
    y = reshape(gather(x, 1, expand(reshape(place, [4, 1, 1]), [4, 1, 3])), [4, 3])
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch.fx import Graph, Node

from autopar.tracing.passes.edit import arguments_of, insert, replace, value_of

aten = torch.ops.aten

_LOOKUPS = (aten.index.Tensor, aten._unsafe_index.Tensor)
_WRITES = (aten.index_put.default, aten._unsafe_index_put.default)
# Ops whose results are never negative, and so need no wrap around the end.
_NOT_NEGATIVE = (aten.argmax.default, aten.argmin.default)


def paired_index(graph: Graph) -> None:
    """Replace lookups and writes with counting indices, in place."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in (*_LOOKUPS, *_WRITES):
            found = _pairing(node)
            if found is not None:
                replace(node, found.lookups() if node.target in _LOOKUPS else found.writes())


def _pairing(node: Node) -> _PairedIndex | None:
    x, indices = node.args[:2]
    assert isinstance(x, Node), node
    assert isinstance(indices, list | tuple), node
    present = [(dim, index) for dim, index in enumerate(indices) if isinstance(index, Node)]
    # A boolean mask is no index: it selects a number of places that depends on data.
    if len(present) < 2 or any(index.meta["val"].dtype in (torch.bool, torch.uint8) for _, index in present):
        return None
    shape = torch.broadcast_shapes(*(index.meta["val"].shape for _, index in present))  # type: ignore[no-untyped-call]
    aligned: dict[int, int] = {}
    lookups: list[tuple[int, Node]] = []
    for dim, index in present:
        beside = _counts(index, x.meta["val"].shape[dim], len(shape))
        # Two counters along one dim read a diagonal; the second one stays a lookup.
        if beside is None or beside in aligned:
            lookups.append((dim, index))
        else:
            aligned[beside] = dim
    if not aligned or len(lookups) > 1:
        return None
    return _PairedIndex(
        node, x, tuple(shape), aligned, lookups[0] if lookups else None, tuple(dim for dim, _ in present)
    )


@dataclass(frozen=True)
class _PairedIndex:
    """Lookup or write with counting indices, and the nodes that replace it."""

    node: Node
    x: Node
    # Broadcast shape of all indices.
    shape: tuple[int, ...]
    # Dim of the indices -> the dim of x that is paired with it.
    aligned: dict[int, int]
    # The remaining indexed dim of x and its index.
    lookup: tuple[int, Node] | None
    # All indexed dims of x.
    indexed: tuple[int, ...]

    def lookups(self) -> Node:
        found = self._permute(self.x, self._order)
        if self.lookup is not None:
            found = insert(self.node, aten.gather.default, found, len(self._paired), self._places())
        found = insert(self.node, aten.reshape.default, found, [*self._extents(self._paired, self._free), *self._ends])
        return self._permute(found, _inverse(self._result_order()))

    def writes(self) -> Node:
        """Return the write, with values permuted to the dims of x and the places as one dim."""
        values = self.node.args[2]
        assert isinstance(values, Node), self.node
        added = bool(arguments_of(self.node)["accumulate"])
        order = self._result_order()
        sizes = [0] * len(order)
        for place, size in zip(order, [*self._extents(self._paired, self._free), *self._ends], strict=True):
            sizes[place] = size
        given = self._permute(insert(self.node, aten.expand.default, values, sizes), order)
        target = self._permute(self.x, self._order)
        if self.lookup is None:
            given = insert(self.node, aten.reshape.default, given, list(target.meta["val"].shape))
            # All places of x are written, so without a sum the values are the result.
            op, operands = (aten.add.Tensor, (target, given)) if added else (aten.clone.default, (given,))
            made = insert(self.node, op, *operands)
        else:
            places = self._places()
            given = insert(self.node, aten.reshape.default, given, list(places.meta["val"].shape))
            op = aten.scatter_add.default if added else aten.scatter.src
            made = insert(self.node, op, target, len(self._paired), places, given)
        return self._permute(made, _inverse(self._order))

    @property
    def _paired(self) -> list[int]:
        return sorted(self.aligned)

    @property
    def _free(self) -> list[int]:
        return [dim for dim in range(len(self.shape)) if dim not in self.aligned]

    @property
    def _rest(self) -> list[int]:
        return [dim for dim in range(len(self.x.meta["val"].shape)) if dim not in self.indexed]

    @property
    def _ends(self) -> list[int]:
        return [self.x.meta["val"].shape[dim] for dim in self._rest]

    @property
    def _order(self) -> list[int]:
        """Return the dims of x: paired ones, the one that is looked up, the rest."""
        looked_up = [] if self.lookup is None else [self.lookup[0]]
        return [*(self.aligned[dim] for dim in self._paired), *looked_up, *self._rest]

    def _result_order(self) -> list[int]:
        """Return the places in the result of paired dims, other dims of the indices, the rest of x."""
        # Indexed dims that are neighbours are replaced in place, others move to the front (numpy's rule).
        neighbours = self.indexed == tuple(range(self.indexed[0], self.indexed[-1] + 1))
        before = self.indexed[0] if neighbours else 0
        rest = [dim if dim < before else dim + len(self.shape) for dim in range(len(self._rest))]
        return [*(before + dim for dim in (*self._paired, *self._free)), *rest]

    def _extents(self, *dims: list[int]) -> list[int]:
        return [self.shape[dim] for each in dims for dim in each]

    def _places(self) -> Node:
        """Return the index of a gather, expanded to the rest of x as `gather` and `scatter` need it."""
        assert self.lookup is not None, "one index remains"
        index = self._index(self.lookup[1], self.x.meta["val"].shape[self.lookup[0]], self._paired, self._free)
        sizes = [*self._extents(self._paired), prod(self._extents(self._free))]
        index = insert(self.node, aten.reshape.default, index, [*sizes, *(1 for _ in self._rest)])
        return insert(self.node, aten.expand.default, index, [*sizes, *self._ends])

    def _index(self, index: Node, size: int, paired: list[int], free: list[int]) -> Node:
        """Return the remaining index with the paired dims first, without negative places."""
        shape = index.meta["val"].shape
        if index.target not in _NOT_NEGATIVE:
            below = insert(self.node, aten.lt.Scalar, index, 0)
            index = insert(self.node, aten.where.self, below, insert(self.node, aten.add.Scalar, index, size), index)
        if len(shape) < len(self.shape):
            index = insert(self.node, aten.reshape.default, index, [1] * (len(self.shape) - len(shape)) + list(shape))
        index = insert(self.node, aten.expand.default, index, list(self.shape))
        index = self._permute(index, [*paired, *free])
        if index.meta["val"].dtype != torch.int64:
            # `gather` takes no int32, which lookups do.
            index = insert(self.node, aten._to_copy.default, index, dtype=torch.int64)
        return index

    def _permute(self, value: Node, order: list[int]) -> Node:
        return value if order == sorted(order) else insert(self.node, aten.permute.default, value, order)


def _inverse(order: list[int]) -> list[int]:
    return [order.index(place) for place in range(len(order))]


# -- indices that only count ------------------------------------------------------------------------------------------


def _counts(index: Node, size: int, rank: int) -> int | None:
    """Return the dim of the broadcast indices along which an index counts 0, 1 ... `size` - 1; else None."""
    shape = index.meta["val"].shape
    longer = [dim for dim, extent in enumerate(shape) if extent != 1]
    if len(longer) != 1 or shape[longer[0]] != size:
        return None
    value = value_of(index)
    if value is None or not torch.equal(value.reshape(-1), torch.arange(size, dtype=value.dtype)):
        return None
    return longer[0] + rank - len(shape)
