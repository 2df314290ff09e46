"""`x[arange(batch), i]` is no lookup in the batch: each row is paired with an index of its own.

An index that counts a dim from its first place to its last takes that dim as it stands, beside a dim of the other
indices. Written so, the dim could not be split: any index may point anywhere. Such indices are found by their values,
which depend on nothing but sizes; what is left is a `gather` along one dim, or no lookup at all. What is written so,
`x[arange(batch), i] = v`, is a `scatter`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils._pytree import tree_map_only

__all__ = ["pair_aligned", "value_of"]

aten = torch.ops.aten

_LOOKUPS = (aten.index.Tensor, aten._unsafe_index.Tensor)
_WRITES = (aten.index_put.default, aten._unsafe_index_put.default)
# Ops whose results are places counted from the start, never from the end.
_FROM_THE_START = (aten.argmax.default, aten.argmin.default)
# Ops that may lead to an index; one that only counts takes a few.
MOST_STEPS = 32
MOST_ELEMENTS = 2**20
NOTHING: Mapping[Node, Tensor] = MappingProxyType({})


def pair_aligned(graph: Graph) -> None:
    """Replace lookups and writes of which some indices only count, in place."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in (*_LOOKUPS, *_WRITES):
            found = _pairing(node)
            if found is not None:
                with graph.inserting_before(node):
                    made = found.lookups() if node.target in _LOOKUPS else found.writes()
                made.meta.update({key: value for key, value in node.meta.items() if key != "val"})
                node.replace_all_uses_with(made)
                graph.erase_node(node)


def _pairing(node: Node) -> _PairedIndexPass | None:
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
    return _PairedIndexPass(
        node, x, tuple(shape), aligned, lookups[0] if lookups else None, tuple(dim for dim, _ in present)
    )


@dataclass(frozen=True)
class _PairedIndexPass:
    node: Node
    x: Node
    # Shape of all indices together.
    shape: tuple[int, ...]
    # A dim of the indices -> the dim of x that stands beside it.
    aligned: dict[int, int]
    # The dim that is looked up, and with what.
    lookup: tuple[int, Node] | None
    indexed: tuple[int, ...]

    def lookups(self) -> Node:
        found = self._permuted(self.x, self._order)
        if self.lookup is not None:
            found = self._call(aten.gather.default, found, len(self._paired), self._places())
        found = self._call(aten.reshape.default, found, [*self._extents(self._paired, self._free), *self._ends])
        return self._permuted(found, _inverse(self._result_order()))

    def writes(self) -> Node:
        """The values are brought into the order of x, with what is looked up as one dim."""
        values = self.node.args[2]
        assert isinstance(values, Node), self.node
        added = bool(self.node.args[3]) if len(self.node.args) > 3 else bool(self.node.kwargs.get("accumulate", False))
        order = self._result_order()
        sizes = [0] * len(order)
        for place, size in zip(order, [*self._extents(self._paired, self._free), *self._ends], strict=True):
            sizes[place] = size
        given = self._permuted(self._call(aten.expand.default, values, sizes), order)
        target = self._permuted(self.x, self._order)
        if self.lookup is None:
            given = self._call(aten.reshape.default, given, list(target.meta["val"].shape))
            made = self._call(aten.add.Tensor, target, given) if added else self._call(aten.clone.default, given)
        else:
            places = self._places()
            given = self._call(aten.reshape.default, given, list(places.meta["val"].shape))
            op = aten.scatter_add.default if added else aten.scatter.src
            made = self._call(op, target, len(self._paired), places, given)
        return self._permuted(made, _inverse(self._order))

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
        """The dims of x: those that stand beside an index, the one that is looked up, and the rest."""
        looked_up = [] if self.lookup is None else [self.lookup[0]]
        return [*(self.aligned[dim] for dim in self._paired), *looked_up, *self._rest]

    def _result_order(self) -> list[int]:
        """Where in what is looked up the paired dims stand, the others of the indices, and the rest of x."""
        neighbours = self.indexed == tuple(range(self.indexed[0], self.indexed[-1] + 1))
        before = self.indexed[0] if neighbours else 0
        rest = [dim if dim < before else dim + len(self.shape) for dim in range(len(self._rest))]
        return [*(before + dim for dim in (*self._paired, *self._free)), *rest]

    def _extents(self, *dims: list[int]) -> list[int]:
        return [self.shape[dim] for each in dims for dim in each]

    def _places(self) -> Node:
        """Where along the dim that is looked up, for every element of the rest."""
        assert self.lookup is not None, "something is looked up"
        index = self._index(self.lookup[1], self.x.meta["val"].shape[self.lookup[0]], self._paired, self._free)
        sizes = [*self._extents(self._paired), prod(self._extents(self._free))]
        index = self._call(aten.reshape.default, index, [*sizes, *(1 for _ in self._rest)])
        return self._call(aten.expand.default, index, [*sizes, *self._ends])

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


def _inverse(order: list[int]) -> list[int]:
    return [order.index(place) for place in range(len(order))]


# -- indices that only count ------------------------------------------------------------------------------------------


def _counts(index: Node, size: int, rank: int) -> int | None:
    """The dim, of `rank` dims in all, along which an index counts 0, 1, 2 ... up to this size, if it does."""
    shape = index.meta["val"].shape
    longer = [dim for dim, extent in enumerate(shape) if extent != 1]
    if len(longer) != 1 or shape[longer[0]] != size:
        return None
    value = value_of(index)
    if value is None or not torch.equal(value.reshape(-1), torch.arange(size, dtype=value.dtype)):
        return None
    return longer[0] + rank - len(shape)


def value_of(node: Node, given: Mapping[Node, Tensor] = NOTHING, most: int = MOST_ELEMENTS) -> Tensor | None:
    """The value of a tensor that depends on nothing but numbers in the graph and given values; None for any other."""
    known: dict[Node, Tensor | None] = dict(given)
    return _value(node, known, len(known) + MOST_STEPS, most)


def _value(node: Node, known: dict[Node, Tensor | None], steps: int, most: int) -> Tensor | None:
    if node in known:
        return known[node]
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or len(known) >= steps:
        return None
    if not isinstance(node.meta["val"], Tensor) or node.meta["val"].numel() > most:
        return None
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        return None
    known[node] = None
    values = {source: _value(source, known, steps, most) for source in node.all_input_nodes}
    if any(value is None for value in values.values()):
        return None
    args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
    places = any(argument.name == "device" for argument in node.target._schema.arguments)
    known[node] = _computed(node, args, {**kwargs, **({"device": torch.device("cpu")} if places else {})})
    return known[node]


def _computed(node: Node, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """Return the result of an op on the CPU.

    Some ops lack a kernel there that the traced device has: `histc` the kernel of integers.
    """
    op: Any = node.target
    try:
        found = op(*args, **kwargs)
    except NotImplementedError:
        try:
            found = op(*tree_map_only(Tensor, Tensor.double, args), **tree_map_only(Tensor, Tensor.double, kwargs))
        except (NotImplementedError, RuntimeError):
            return None
        found = found.to(node.meta["val"].dtype) if isinstance(found, Tensor) else None
    return found if isinstance(found, Tensor) else None
