"""`IntegerProgram`: a linear program with integer columns as arrays, and the builder that collects its blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from autopar.solver import Floats, Ints

__all__ = ["IndexBlock", "IntegerProgram", "ProgramBuilder"]


@dataclass(frozen=True)
class IndexBlock:
    """Consecutive columns or rows: those of `op.mul` are `op.mul#0`, `op.mul#1`, ...; of a table `pair.x#0,0`."""

    name: str
    start: int
    count: int
    # Columns of a table; 1 for a list.
    width: int = 1

    @property
    def ids(self) -> Ints:
        return np.arange(self.start, self.start + self.count)

    def names(self) -> Iterator[str]:
        if self.count == 1:
            yield self.name
        elif self.width == 1:
            yield from (f"{self.name}#{i}" for i in range(self.count))
        else:
            yield from (f"{self.name}#{i // self.width},{i % self.width}" for i in range(self.count))


@dataclass(frozen=True, eq=False)
class IntegerProgram:
    """Minimise costs · z + constant over lower ≤ z ≤ upper and row_lower ≤ A z ≤ row_upper; some z are integer.

    `groups` are disjoint sets of columns. Those of one set are at least zero and sum to one in every feasible z.
    """

    columns: tuple[IndexBlock, ...]
    lower: Floats
    upper: Floats
    is_integer: NDArray[np.bool_]
    costs: Floats
    constant: float
    # Group of each column, -1 for none.
    groups: Ints
    rows: tuple[IndexBlock, ...]
    row_lower: Floats
    row_upper: Floats
    # Nonzeros of A by row, then by column.
    row_of: Ints
    column_of: Ints
    values: Floats
    # Free columns, and for each the equality that defines it: a row in which its coefficient is -1.
    free: Ints
    defining: Ints

    @property
    def counts(self) -> str:
        """Return the size in words."""
        integers = int(self.is_integer.sum())
        return f"{len(self.lower):,} variables ({integers:,} binary), {len(self.row_lower):,} constraints, " + (
            f"{len(self.values):,} nonzeros"
        )

    def column(self, name: str) -> IndexBlock:
        return next(block for block in self.columns if block.name == name)

    def with_row(self, name: str, columns: Ints, upper: float) -> IntegerProgram:
        """Return the program with one more constraint: the sum of some columns is at most `upper`."""
        height = len(self.row_lower)
        return replace(
            self,
            rows=(*self.rows, IndexBlock(name, height, 1)),
            row_lower=np.append(self.row_lower, -np.inf),
            row_upper=np.append(self.row_upper, upper),
            row_of=np.append(self.row_of, np.full(len(columns), height)),
            column_of=np.append(self.column_of, np.sort(columns)),
            values=np.append(self.values, np.ones(len(columns))),
        )

    def inlined(self) -> IntegerProgram:
        """Return the program with each free column replaced by what defines it; the column itself stays, at zero."""
        is_defining = np.isin(self.row_of, self.defining)
        is_free = np.isin(self.column_of, self.free)
        kept = ~is_defining & ~is_free
        rows, columns, values = [self.row_of[kept]], [self.column_of[kept]], [self.values[kept]]
        costs, lower, upper = self.costs.copy(), self.lower.copy(), self.upper.copy()
        for free, defining in zip(self.free.tolist(), self.defining.tolist(), strict=True):
            terms = (self.row_of == defining) & ~is_free
            costs[self.column_of[terms]] += self.costs[free] * self.values[terms]
            for entry in np.flatnonzero((self.column_of == free) & ~is_defining).tolist():
                rows.append(np.full(int(terms.sum()), self.row_of[entry]))
                columns.append(self.column_of[terms])
                values.append(self.values[entry] * self.values[terms])
        costs[self.free], lower[self.free], upper[self.free] = 0.0, 0.0, 0.0
        row_of, column_of, numbers = _summed(
            np.concatenate(rows), np.concatenate(columns), np.concatenate(values), len(self.lower)
        )
        return replace(self, costs=costs, lower=lower, upper=upper, row_of=row_of, column_of=column_of, values=numbers)

    def with_totals(self, point: Floats) -> Floats:
        """Return a point whose free columns are as the others define them."""
        point = point.copy()
        point[self.free] = 0.0
        point[self.free] = self.activity(point)[self.defining]
        return point

    def activity(self, point: Floats) -> Floats:
        """Return A z."""
        return np.asarray(
            np.bincount(self.row_of, self.values * point[self.column_of], len(self.row_lower)), dtype=float
        )

    def violation(self, point: Floats) -> float:
        """Return the largest amount by which a point passes a bound or a constraint."""
        rows = self.activity(point)
        passed = (self.lower - point, point - self.upper, self.row_lower - rows, rows - self.row_upper)
        return float(max(0.0, *(each.max(initial=0.0) for each in passed)))


@dataclass
class ProgramBuilder:
    """Blocks of columns and rows so far, and the nonzeros."""

    columns: list[IndexBlock] = field(default_factory=list)
    rows: list[IndexBlock] = field(default_factory=list)
    bounds: list[tuple[Floats, Floats, bool, int]] = field(default_factory=list)
    row_bounds: list[tuple[float, float]] = field(default_factory=list)
    entries: list[tuple[Ints, Ints, Floats]] = field(default_factory=list)
    width: int = 0
    height: int = 0
    groups: int = 0
    free: list[int] = field(default_factory=list)
    defining: list[int] = field(default_factory=list)
    _names: dict[str, int] = field(default_factory=dict)

    def new_group(self) -> int:
        self.groups += 1
        return self.groups - 1

    def add_columns(
        self,
        name: str,
        count: int = 1,
        lower: float = 0.0,
        upper: Floats | float = np.inf,
        is_integer: bool = False,
        group: int = -1,
        table_width: int = 1,
    ) -> IndexBlock:
        block = IndexBlock(self._unique(name), self.width, count, table_width)
        self.columns.append(block)
        self.bounds.append((np.full(count, lower), np.broadcast_to(upper, (count,)), is_integer, group))
        self.width += count
        return block

    def add_rows(self, name: str, count: int = 1, lower: float = -np.inf, upper: float = np.inf) -> IndexBlock:
        block = IndexBlock(self._unique(name), self.height, count)
        self.rows.append(block)
        self.row_bounds.append((lower, upper))
        self.height += count
        return block

    def add(self, rows: Ints, columns: Ints, values: Floats | float) -> None:
        """Add nonzeros; those of one place are summed."""
        rows, columns, numbers = np.broadcast_arrays(rows, columns, np.asarray(values, dtype=np.float64))
        kept = numbers != 0.0
        self.entries.append((rows[kept], columns[kept], numbers[kept]))

    def add_total(self, name: str, columns: Ints, values: Floats) -> int:
        """Add a free column that is a weighted sum of others, and return it."""
        total = self.add_columns(f"total.{name}", 1, -np.inf, np.inf)
        row = self.add_rows(f"sum.{name}", 1, 0.0, 0.0)
        self.add(row.ids, columns, values)
        self.add(row.ids, total.ids, -1.0)
        self.free.append(total.start)
        self.defining.append(row.start)
        return total.start

    def built(self, costs: Floats, constant: float) -> IntegerProgram:
        counts = [block.count for block in self.columns]
        lows, highs, integers, group_ids = zip(*self.bounds, strict=True)
        row_counts = [block.count for block in self.rows]
        row_lower, row_upper = (np.repeat(np.array(each), row_counts) for each in zip(*self.row_bounds, strict=True))
        row_of, column_of, values = (np.concatenate(each) for each in zip(*self.entries, strict=True))
        row_of, column_of, values = _summed(row_of, column_of, values, self.width)
        return IntegerProgram(
            tuple(self.columns),
            np.concatenate(lows),
            np.concatenate(highs),
            np.repeat(np.array(integers), counts),
            costs,
            constant,
            np.repeat(np.array(group_ids), counts),
            tuple(self.rows),
            row_lower,
            row_upper,
            row_of,
            column_of,
            values,
            np.array(self.free, dtype=np.int64),
            np.array(self.defining, dtype=np.int64),
        )

    def _unique(self, name: str) -> str:
        """Return a name that no other block has, in characters that MPS and LP files allow."""
        plain = "".join(letter if letter.isalnum() or letter in "._/@&" else "_" for letter in name)
        number = self._names[plain] = self._names.get(plain, -1) + 1
        return plain if number == 0 else f"{plain}~{number}"


def _summed(rows: Ints, columns: Ints, values: Floats, width: int) -> tuple[Ints, Ints, Floats]:
    """Return nonzeros by row, then by column; those of one place are summed."""
    places, inverse = np.unique(rows * width + columns, return_inverse=True)
    total = np.asarray(np.bincount(inverse, values, len(places)), dtype=float)
    kept = total != 0.0
    return places[kept] // width, places[kept] % width, total[kept]
