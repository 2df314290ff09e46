"""Elimination by classes of a model that is too wide for elimination by states.

Weighted tables have a row for each state of a variable, and many states share one sharding of a tensor, so that their
rows are equal. One row of each class is given to the elimination.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autopar.ir.invariants import verifying
from autopar.solver import Floats, Ints
from autopar.solver.model.cost_tables import CostTable
from autopar.solver.model.model import FactorByMode, Model
from autopar.solver.search.class_elimination import ROUNDING, ClassElimination, ClassTable, Single, class_elimination

__all__ = ["ClassTables"]

# Additions of one step at most: a second of a core.
LARGEST_STEP = 2**30


@dataclass(frozen=True, eq=False)
class ClassTables:
    """Elimination of tables of states, by classes of states."""

    elimination: ClassElimination
    # Of each table, by axis: the class of each state.
    classes: tuple[tuple[Ints, ...], ...]
    # The first state of each class, by the identity of the classes.
    firsts: Mapping[int, Ints]
    # Those of the latest call, by their values.
    latest: dict[bytes, Single] = field(default_factory=dict)

    # What rounding may take off the least total, as a share of it.
    rounding = 2 * ROUNDING

    @staticmethod
    def of(model: Model, scopes: Sequence[tuple[int, ...]], cut: Sequence[int]) -> ClassTables:
        """Return an elimination without the cut variables; raise `TooWide` if a step is too large."""
        gone, known, by_table = frozenset(cut), dict[bytes, Ints](), dict[Any, tuple[Ints, ...]]()
        sizes = [1 if node in gone else len(variable.states) for node, variable in enumerate(model.variables)]
        tables = []
        for factor, scope in zip(model.factors, scopes, strict=True):
            left = [axis for axis, node in enumerate(scope) if node not in gone]
            if left:
                table = factor.table
                # Equal layers have the same tables.
                key = tuple(map(id, table.each)) if isinstance(table, FactorByMode) else id(table)
                if key not in by_table:
                    made = _classes(table, len(model.variables[scope[0]].states))
                    by_table[key] = tuple(known.setdefault(each.tobytes(), each) for each in made)
                classes = tuple(by_table[key][axis] for axis in left)
                tables.append(ClassTable(tuple(scope[axis] for axis in left), classes))
        elimination = class_elimination(sizes, tables, LARGEST_STEP)
        firsts = {id(each): np.unique(each, return_index=True)[1] for each in known.values()}
        return ClassTables(elimination, tuple(table.classes for table in tables), firsts)

    def solve(
        self, costs: Sequence[Floats], tables: Sequence[Floats], pattern: object = None
    ) -> tuple[float, list[int]]:
        """Return a lower bound on the least total, close to it, and a state for every variable.

        Equal costs and tables are one object each.
        """
        known: dict[Any, Single] = {}
        equal: dict[bytes, Single] = {}

        def single(key: Any, values: Floats) -> Single:
            if key not in known:
                made = np.ascontiguousarray(values, dtype=np.float32)
                name = repr(made.shape).encode() + made.tobytes()
                # Equal ones are one object, also in the next call: equal steps are computed once.
                known[key] = equal.setdefault(name, self.latest.get(name, made))
            return known[key]

        own = [single(id(each), each) for each in costs]
        narrow = []
        for table, classes in zip(tables, self.classes, strict=True):
            key = id(table), *map(id, classes)
            if key not in known:
                firsts = [self.firsts[id(each)] for each in classes]
                if verifying():
                    whole = table[np.ix_(*firsts)][np.ix_(*classes)]
                    assert np.array_equal(whole, table), "states of one class cost the same"
                single(key, table[np.ix_(*firsts)])
            narrow.append(known[key])
        self.latest.clear()
        self.latest.update(equal)
        return self.elimination.solve(own, narrow)


def _classes(table: CostTable | FactorByMode, modes: int) -> tuple[Ints, ...]:
    """Return by axis the class of each state: states of one class have equal costs in a table."""
    if not isinstance(table, FactorByMode):
        return _numbered(table.rows), _numbered(table.columns)
    rows, columns = (np.stack([getattr(one, side) for one in table.each]) for side in ("rows", "columns"))
    return np.arange(modes), _numbered(rows), _numbered(columns)


def _numbered(keys: Ints) -> Ints:
    """Return the number of each distinct key, or column of keys, in order of appearance."""
    _, first, inverse = np.unique(np.atleast_2d(keys), axis=1, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse.ravel()]
