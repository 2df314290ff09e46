"""`x[arange(batch), i]` is no lookup in the batch: each row is paired with an index of its own.

An index that counts a dim from its first place to its last takes that dim as it stands, beside a dim of the other
indices. Written so, the dim could not be split: any index may point anywhere. Such indices are found by their values,
which depend on nothing but sizes; what is left is a `gather` along one dim, or no lookup at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

__all__ = ["pair_aligned"]

aten = torch.ops.aten

_LOOKUPS = (aten.index.Tensor, aten._unsafe_index.Tensor)
_FROM_THE_START = (aten.argmax.default, aten.argmin.default)
"""Ops whose results are places counted from the start, never from the end."""
MOST_STEPS = 32
"""Ops that may lead to an index; one that only counts takes a few."""
MOST_ELEMENTS = 2**20


def pair_aligned(graph: Graph) -> None:
    """Replace lookups of which some indices only count, in place."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _LOOKUPS:
            found = _pairing(node)
            if found is not None:
                with graph.inserting_before(node):
                    made = found.build()
                made.meta.update({key: value for key, value in node.meta.items() if key != "val"})
                node.replace_all_uses_with(made)
                graph.erase_node(node)


def _pairing(node: Node) -> _Pairing | None:
    x, indices = node.args[:2]
    assert isinstance(x, Node), node
    assert isinstance(indices, list | tuple), node
    present = [(dim, index) for dim, index in enumerate(indices) if isinstance(index, Node)]
    if len(present) < 2 or any(index.meta["val"].dtype in (torch.bool, torch.uint8) for _, index in present):
        return None
    shape = torch.broadcast_shapes(*(index.meta["val"].shape for _, index in present))  # type: ignore[no-untyped-call]
    aligned: dict[int, int] = {}
    lookups: list[tuple[int, Node]] = []
    for dim, index in present:
        beside = _counts(index, x.meta["val"].shape[dim], len(shape))
        if beside is None or beside in aligned:
            lookups.append((dim, index))
        else:
            aligned[beside] = dim
    if not aligned or len(lookups) > 1:
        return None
    return _Pairing(node, x, tuple(shape), aligned, lookups[0] if lookups else None, tuple(dim for dim, _ in present))


@dataclass(frozen=True)
class _Pairing:
    node: Node
    x: Node
    shape: tuple[int, ...]
    """Of all indices together."""
    aligned: dict[int, int]
    """A dim of the indices -> the dim of x that stands beside it."""
    lookup: tuple[int, Node] | None
    """The dim that is looked up, and with what."""
    indexed: tuple[int, ...]

    def build(self) -> Node:
        sizes = self.x.meta["val"].shape
        paired = sorted(self.aligned)
        free = [dim for dim in range(len(self.shape)) if dim not in self.aligned]
        rest = [dim for dim in range(len(sizes)) if dim not in self.indexed]
        looked_up = [] if self.lookup is None else [self.lookup[0]]
        found = self._permuted(self.x, [*(self.aligned[dim] for dim in paired), *looked_up, *rest])
        extents, ends = [self.shape[dim] for dim in paired], [sizes[dim] for dim in rest]
        if self.lookup is not None:
            index = self._index(self.lookup[1], sizes[self.lookup[0]], paired, free)
            count = prod(self.shape[dim] for dim in free)
            index = self._call(aten.reshape.default, index, [*extents, count, *(1 for _ in rest)])
            index = self._call(aten.expand.default, index, [*extents, count, *ends])
            found = self._call(aten.gather.default, found, len(paired), index)
        found = self._call(aten.reshape.default, found, [*extents, *(self.shape[dim] for dim in free), *ends])
        order = [*paired, *free]
        back = [order.index(dim) for dim in range(len(order))]
        tail = list(range(len(order), len(order) + len(rest)))
        neighbours = self.indexed == tuple(range(self.indexed[0], self.indexed[-1] + 1))
        before = self.indexed[0] if neighbours else 0
        return self._permuted(found, [*tail[:before], *back, *tail[before:]])

    def _index(self, index: Node, size: int, paired: list[int], free: list[int]) -> Node:
        """The lookup's index with the paired dims first, counted from the start."""
        shape = index.meta["val"].shape
        if index.target not in _FROM_THE_START:
            below = self._call(aten.lt.Scalar, index, 0)
            index = self._call(aten.where.self, below, self._call(aten.add.Scalar, index, size), index)
        if len(shape) < len(self.shape):
            index = self._call(aten.reshape.default, index, [1] * (len(self.shape) - len(shape)) + list(shape))
        index = self._call(aten.expand.default, index, list(self.shape))
        index = self._permuted(index, [*paired, *free])
        if index.meta["val"].dtype != torch.int64:
            index = self._call(aten._to_copy.default, index, dtype=torch.int64)
        return index

    def _permuted(self, value: Node, order: list[int]) -> Node:
        return value if order == sorted(order) else self._call(aten.permute.default, value, order)

    def _call(self, op: Any, *args: Any, **kwargs: Any) -> Node:
        made = self.node.graph.call_function(op, args, kwargs)
        made.meta.update({key: value for key, value in self.node.meta.items() if key not in ("named", "constrain")})
        values = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in args]
        with torch.no_grad():
            made.meta["val"] = op(*values, **kwargs)
        return made


# -- indices that only count ------------------------------------------------------------------------------------------


def _counts(index: Node, size: int, rank: int) -> int | None:
    """The dim, of `rank` dims in all, along which an index counts 0, 1, 2 ... up to this size, if it does."""
    shape = index.meta["val"].shape
    longer = [dim for dim, extent in enumerate(shape) if extent != 1]
    if len(longer) != 1 or shape[longer[0]] != size:
        return None
    value = _value(index, {})
    if value is None or not torch.equal(value.reshape(-1), torch.arange(size, dtype=value.dtype)):
        return None
    return longer[0] + rank - len(shape)


def _value(node: Node, known: dict[Node, Tensor | None]) -> Tensor | None:
    """The value of a tensor that depends on nothing but numbers in the graph; None for any other."""
    if node in known:
        return known[node]
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or len(known) >= MOST_STEPS:
        return None
    if not isinstance(node.meta["val"], Tensor) or node.meta["val"].numel() > MOST_ELEMENTS:
        return None
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        return None
    known[node] = None
    values = {source: _value(source, known) for source in node.all_input_nodes}
    if any(value is None for value in values.values()):
        return None
    args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
    places = any(argument.name == "device" for argument in node.target._schema.arguments)
    found = node.target(*args, **{**kwargs, **({"device": torch.device("cpu")} if places else {})})
    known[node] = found if isinstance(found, Tensor) else None
    return known[node]
