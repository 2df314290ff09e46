"""All assignments of a model that has few: what each takes, worked out at once.

Here a conversion that several ops share is counted once, as `evaluate` does: so this is a bound on every plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from autopar.ir.values import NamedTensor
from autopar.sharding.sharding import Sharding
from autopar.solver.arrays import Floats
from autopar.solver.model.cost_tables import CostTables, ValueUse
from autopar.solver.model.model import Model
from autopar.solver.model.objective import MEMORY, Hinges, Sum, every_peak_gib

__all__ = ["EnumeratedModel", "listed"]

MOST_LISTED = 2**17
"""Assignments: some 10 MB."""


@dataclass(frozen=True)
class EnumeratedModel:
    """Of every assignment of a model, in the order of their states."""

    counts: tuple[int, ...]
    seconds: Floats
    """No plan takes less."""
    gib: Floats

    def in_order(self, keys: Floats) -> Iterator[tuple[float, list[int]]]:
        """By some key: the key, the assignment."""
        for place in np.argsort(keys, kind="stable").tolist():
            yield float(keys[place]), [int(state) for state in np.unravel_index(place, self.counts)]


def listed(model: Model, hinges: Hinges) -> EnumeratedModel | None:
    """None where there are too many."""
    counts = tuple(len(variable.states) for variable in model.variables)
    if prod(counts) > MOST_LISTED:
        return None
    every = _sums(model, counts).reshape(-1, len(Sum))
    return EnumeratedModel(counts, hinges.every_seconds(every), every_peak_gib(every))


def _sums(model: Model, counts: tuple[int, ...]) -> Floats:
    """An axis for each variable, the last one for the sums."""
    total = np.zeros((*counts, len(Sum)))
    for node, variable in enumerate(model.variables):
        own = np.array([variable.at(state) for state in range(counts[node])])
        total += _spread(own, (node,), len(counts))
    for factor in model.factors:
        shape = [counts[node] for node in factor.scope]
        sums = np.array([factor.table.at(*states) for states in np.ndindex(*shape)]).reshape(*shape, len(Sum))
        order = np.argsort(factor.scope).tolist()
        total += _spread(sums.transpose(*order, len(shape)), tuple(sorted(factor.scope)), len(counts))
    _take_off_what_is_shared(model, counts, total)
    return total


def _take_off_what_is_shared(model: Model, counts: tuple[int, ...], total: Floats) -> None:
    """Of every op but one that takes a tensor in one layout, what its conversion takes, at most."""
    tables = CostTables(model.setting)
    for tensor in model.setting.graph.tensors.values():
        users = model.setting.users.get(tensor.name, ())
        place = model.place.get(("value" if tensor.kind == "activation" else "held", tensor.name))
        if place is None or len(users) < 2:
            continue
        taken: dict[Sharding, list[tuple[int, Floats]]] = {}
        for user in users:
            node = model.place["op", user.name]
            positions = [i for i, name in enumerate(user.operands) if name == tensor.name]
            wants = [{option.operands[i] for i in positions} for option in model.variables[node].states]
            for want in set().union(*wants) - {None}:
                taken.setdefault(want, []).append((node, np.array([want in each for each in wants], dtype=float)))
        for want, ops in taken.items():
            if len(ops) > 1:
                times = sum(_spread(takes[:, None], (node,), len(counts)) for node, takes in ops)
                price = np.array([_price(tables, tensor, held, want) for held in model.variables[place].states])
                total -= np.maximum(0.0, times - 1) * _spread(price, (place,), len(counts))


def _price(tables: CostTables, tensor: NamedTensor, held: Any, want: Sharding) -> Floats:
    """The sums of one conversion; no memory, which proves nothing."""
    cut = tables.cut(tensor)
    if tensor.kind == "param":
        shared = [replace(held, shared=None if want == held.shared else want)]
        found = tables.shared(cut, shared, tables.handled(tensor, kept=False))
        price = np.array([found[key][0] if key in found else 0.0 for key in Sum])
    else:
        source = held if tensor.kind == "activation" else held.layout
        use = ValueUse(again=True, share=tables.setting.prices.share(tensor.name))
        price = tables.values(cut, [source], [(want,)], use).at(0, 0)
    price[list(MEMORY)] = 0.0
    return price


def _spread(sums: Floats, scope: tuple[int, ...], count: int) -> Floats:
    """A table of some variables as one of all."""
    shape = [1] * count
    for axis, node in enumerate(scope):
        shape[node] = sums.shape[axis]
    return sums.reshape(*shape, sums.shape[-1])
