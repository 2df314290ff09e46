"""Emit ops and reshards of routed rows: orders of rows and exchanges are made once for a routing and a sharding.

What the rows of a rank are follows from the keys and from the axes that split the dim of rows. So an order is known by
the tensor of the keys and these splits; all tensors of a routing share it, as do forward and backward.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.fx import Graph, Node

from autopar.ir.analysis.float8_products import in_float8
from autopar.ir.graph import NamedGraph
from autopar.ir.precision import Precision
from autopar.ir.values import NamedNode
from autopar.lowering.collectives.process_groups import Groups
from autopar.lowering.modules.routed_ops import FLOAT8, CombineRows, DispatchRows, GroupedRows, SortRows
from autopar.lowering.modules.routed_rows import (
    Exchanged,
    ExchangePlaces,
    PlacedExchange,
    PlaceMaps,
    RoutedReshardModule,
    RowExchange,
    rows_of,
)
from autopar.mesh import SubMesh
from autopar.rules.ops.routed import COMBINE, DISPATCH, GROUPED_ROWS
from autopar.sharding.assignment import OpAssignment
from autopar.sharding.reshard.reshard import Step, StepKind
from autopar.sharding.reshard_insertion import InsertedReshard
from autopar.sharding.sharding import GROUP, OTHER, ROW, Atoms, Piece, Sharding, atoms_of

__all__ = ["RoutedRows"]

_Splits = tuple[tuple[str, ...], ...]
_Ints = NDArray[np.int64]


@dataclass
class _Order:
    """Rows of a rank in one sharding."""

    # Ends of the groups; places of rows, or their order after an exchange; the inverse, of rows in their places.
    ends: Node
    index: Node
    inverse: Node | None = None
    # Place of each row among those of the rank; None where an exchange did without.
    places: Node | None = None
    # The exchange that brought the rows here, and the splits before it.
    came: tuple[_Splits, Step] | None = None


@dataclass
class RoutedRows:
    """Orders and exchanges of one generated graph."""

    graph: NamedGraph
    axes: SubMesh
    groups: Groups
    precision: Precision
    out: Graph
    module: Callable[[str, nn.Module, tuple[Any, ...]], Node]
    # Name of the tensor of keys, by routed tensor.
    keys: dict[str, str] = field(default_factory=dict)
    orders: dict[tuple[str, _Splits], _Order] = field(default_factory=dict)
    exchanges: dict[tuple[str, _Splits, _Splits], list[Node]] = field(default_factory=dict)
    # Name of the first product of rows, by the ends of their groups.
    first_products: dict[Node, str] = field(default_factory=dict)

    # -- ops

    def _follow(self, node: NamedNode) -> None:
        """Record the routing of an op's results."""
        known = [self.keys[name] for name in node.operands if name in self.keys]
        source = node.operands[1] if node.op == str(DISPATCH) else next(iter(known), None)
        for name in node.outputs:
            if name is not None and source is not None and self.graph.tensors[name].routed:
                self.keys[name] = source

    def op(self, node: NamedNode, assignment: OpAssignment, arguments: Mapping[str, Any]) -> Node | None:
        """Emit an op that reads the order of rows; None for all others."""
        self._follow(node)
        if node.op == str(GROUPED_ROWS) and self.graph.tensors[node.operands[0] or ""].routed:
            order = self._order_of(node.operands[0], assignment.operands[0])
            given = arguments["rows"], arguments["matrices"], arguments["bias"], order.ends
            first = self.first_products.setdefault(order.ends, node.name) == node.name
            product = FLOAT8 if in_float8(node, self.graph.tensors, self.precision) else arguments["product"]
            module = GroupedRows(product, node.name if first else None)
            return self.module(f"{node.name}_rows", module, given)
        if node.op not in (str(DISPATCH), str(COMBINE)):
            return None
        is_dispatch = node.op == str(DISPATCH)
        name = node.outputs[0] if is_dispatch else node.operands[0]
        sharding = assignment.produced[0] if is_dispatch else assignment.operands[0]
        key = node.operands[1]
        assert name is not None, node.name
        assert key is not None, node.name
        assert sharding is not None, node.name
        order = self._sorted(name, key, sharding, arguments["key"])
        made = DispatchRows() if is_dispatch else CombineRows(self._rows(atoms_of(self.graph.tensors[name]), sharding))
        return self.module(f"{node.name}_rows", made, (arguments["rows"], order.index, order.inverse))

    def _sorted(self, name: str, key: str, sharding: Sharding, keys: Node) -> _Order:
        """Return the order of rows of a rank that has their keys."""
        atoms = atoms_of(self.graph.tensors[name])
        place = key, self._splits(atoms, sharding)
        known = self.orders.get(place)
        if known is None or known.inverse is None:
            groups = _positions(atoms, self._pieces(atoms, sharding), GROUP)
            assert len(groups) == groups[-1] - groups[0] + 1, f"{name}: the groups of a rank follow each other"
            every = len(groups) == prod(size for i, size in enumerate(atoms.sizes) if atoms.role(i) == GROUP)
            made = self.module(f"{key}_order", SortRows(int(groups[0]), len(groups), every), (keys,))
            order, inverse, ends = self._items(made, 3)
            known = self.orders[place] = _Order(ends, order, inverse, order)
        return known

    def _order_of(self, name: str | None, sharding: Sharding | None) -> _Order:
        assert name is not None, "an op of routed rows has rows"
        assert sharding is not None, name
        return self.orders[self.keys[name], self._splits(atoms_of(self.graph.tensors[name]), sharding)]

    def _splits(self, atoms: Atoms, sharding: Sharding) -> _Splits:
        """Return the splits of the dim of rows, as steps have them: without axes of one rank."""
        return rows_of(atoms, sharding.without([axis for axis, size in self.axes.items() if size == 1]))

    # -- reshards

    def reshard(self, one: InsertedReshard, value: Node, note: str) -> Node:
        """Emit a reshard of routed rows."""
        found = one.reshard
        pairs: list[tuple[_Splits, _Splits]] = []
        for step in found.forward:
            if _exchanges(found.atoms, step):
                ends = rows_of(found.atoms, step.before), rows_of(found.atoms, step.after)
                known = (self.keys[one.tensor], *ends[::-1]) in self.exchanges
                if not known:
                    self._exchange(one.tensor, found.atoms, step)
                pairs.append(ends[::-1] if known else ends)
        for step in found.backward if one.differentiable else ():
            if _exchanges(found.atoms, step):
                ends = rows_of(found.atoms, step.before), rows_of(found.atoms, step.after)
                if ends not in pairs and ends[::-1] not in pairs:
                    pairs.append(self._exchange_back(one.tensor, found.atoms, step))
        given = [node for pair in pairs for node in self._tensors(one.tensor, pair)]
        kinds = "_".join(dict.fromkeys(f"{step.kind.value}_{'_'.join(step.axes)}" for step in one.ways))
        module = RoutedReshardModule(found, self.groups, note, pairs)
        return self.module(f"{one.tensor}_{kinds}", module, (value, *given))

    def _tensors(self, name: str, pair: tuple[_Splits, _Splits]) -> list[Node]:
        key = self.keys[name]
        return [*self.exchanges[key, pair[0], pair[1]], self.orders[key, pair[0]].index]

    def _exchange_back(self, name: str, atoms: Atoms, step: Step) -> tuple[_Splits, _Splits]:
        """Return the ends of the exchange for a step of the backward alone, which goes another way."""
        turned = Step(step.kind, step.to_axes, step.to_atom, step.after, step.before, step.atom, step.axes)
        self._exchange(name, atoms, turned)
        return rows_of(atoms, turned.before), rows_of(atoms, turned.after)

    def _exchange(self, name: str, atoms: Atoms, step: Step) -> None:
        """Make the exchange of a step, unless an earlier tensor of the routing went over it."""
        key = self.keys[name]
        before, after = rows_of(atoms, step.before), rows_of(atoms, step.after)
        if (key, before, after) in self.exchanges:
            return
        order, group = self.orders[key, before], self.groups.of(step.axes)
        maps = _maps(atoms, step, self.axes, self.groups.coordinate, group.members)
        sources = _sources(atoms, step, self.axes, self.groups.coordinate, group.members)
        if sources is not None:
            module = RowExchange(_table(maps, len(group.members)), sources, group.name)
            made = self._items(
                self.module(f"{key}_exchange", module, (order.ends, order.index)), len(Exchanged._fields)
            )
            found = _Order(made[5], made[3], came=(before, step))
        else:
            placed = PlacedExchange(maps, len(group.members), group.name)
            given = order.ends, self._places(key, atoms, before)
            made = self._items(self.module(f"{key}_exchange", placed, given), len(Exchanged._fields) + 1)
            found = _Order(made[5], made[3], places=made.pop())
        self.exchanges[key, before, after] = made
        self.orders.setdefault((key, after), found)

    def _places(self, key: str, atoms: Atoms, splits: _Splits) -> Node:
        """Return the places of rows; where an exchange did without them, they are sent over it."""
        order = self.orders[key, splits]
        if order.places is None:
            assert order.came is not None, "rows whose places are not known came over an exchange"
            before, step = order.came
            group = self.groups.of(step.axes)
            maps = _maps(atoms, step, self.axes, self.groups.coordinate, group.members)
            given = self._places(key, atoms, before), self.orders[key, before].index
            made = ExchangePlaces(maps, group.name)
            order.places = self.module(f"{key}_places", made, (*given, *self.exchanges[key, before, splits]))
        return order.places

    # -- sizes

    def _items(self, made: Node, count: int) -> list[Node]:
        return [self.out.call_function(operator.getitem, (made, place)) for place in range(count)]

    def _pieces(self, atoms: Atoms, sharding: Sharding) -> tuple[Piece, ...]:
        return sharding.pieces(atoms, self.axes, self.groups.coordinate)

    def _rows(self, atoms: Atoms, sharding: Sharding) -> int:
        pieces = enumerate(self._pieces(atoms, sharding))
        return prod(length for i, (_, length) in pieces if atoms.role(i) == ROW)


def _exchanges(atoms: Atoms, step: Step) -> bool:
    return step.kind is StepKind.ALL_TO_ALL and step.atom is not None and atoms.role(step.atom) != OTHER


def _positions(atoms: Atoms, pieces: tuple[Piece, ...], role: str) -> _Ints:
    """Return the global numbers of the groups, or of the rows, of a rank, in its order."""
    own = [i for i in range(len(atoms.sizes)) if atoms.role(i) == role]
    found = np.zeros(1, np.int64)
    for i in own:
        start, length = pieces[i]
        found = (found[:, None] * atoms.sizes[i] + np.arange(start, start + length)).reshape(-1)
    return found


def _maps(
    atoms: Atoms, step: Step, axes: SubMesh, at: Mapping[str, int], members: tuple[Mapping[str, int], ...]
) -> PlaceMaps:
    """Return where the groups and rows of this rank go in an exchange."""
    found: list[_Ints] = []
    after: list[int] = []
    for role in (GROUP, ROW):
        own = _positions(atoms, step.before.pieces(atoms, axes, at), role)
        total = prod(size for i, size in enumerate(atoms.sizes) if atoms.role(i) == role)
        to, number = np.zeros(len(own), np.int64), np.full(len(own), -1)
        for place, member in enumerate(members):
            theirs = _positions(atoms, step.after.pieces(atoms, axes, {**at, **member}), role)
            numbers = np.full(total, -1)
            numbers[theirs] = np.arange(len(theirs))
            here = (numbers[own] >= 0) & (number < 0)
            to[here], number[here] = place, numbers[own][here]
        # Numbers that all members have go to the first, at 0: the other part says where.
        found += [to, number]
        after.append(len(_positions(atoms, step.after.pieces(atoms, axes, at), role)))
    to_of_group, group, to_of_row, row = map(torch.from_numpy, found)
    return PlaceMaps(to_of_group, group, to_of_row, row, *after)


def _table(maps: PlaceMaps, ranks: int) -> torch.Tensor:
    """Return the groups of a rank by the rank that gets them, then by their order there."""
    table = (maps.to_of_group * maps.groups_after + maps.group).argsort()
    assert len(table) == ranks * maps.groups_after, "each rank gets as many groups"
    return table


def _sources(
    atoms: Atoms, step: Step, axes: SubMesh, at: Mapping[str, int], members: tuple[Mapping[str, int], ...]
) -> tuple[int, ...] | None:
    """Return the place of each rank's rows among those of all, where they follow each other; else None."""
    if step.to_atom is None or atoms.role(step.to_atom) != GROUP:
        return None
    parts = [_positions(atoms, step.before.pieces(atoms, axes, {**at, **member}), ROW) for member in members]
    # Ranks without rows may stand anywhere.
    order = sorted(range(len(parts)), key=lambda i: (len(parts[i]) > 0, parts[i][0] if len(parts[i]) else 0))
    filled = [parts[i] for i in order if len(parts[i])]
    if any(one[-1] > other[0] for one, other in pairwise(filled)):
        return None
    places = [0] * len(order)
    for place, i in enumerate(order):
        places[i] = place
    return tuple(places)
