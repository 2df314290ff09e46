"""An edge's costs with what the reductions ask of them, worked out once per distinct matrix.

Large instances repeat a few matrices over and over. Selections of the same rows of the same matrix are the same object,
so every question below is answered once for all edges that share it.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.solver import Floats, Ints

__all__ = ["Matrices", "Matrix"]

# Comparing all rows of a matrix with each other is left out above this many entries (rows × rows × columns).
LARGEST_COMPARISON = 4_000_000
# How far sums of floats may be from what they would be in exact arithmetic, in units of the largest number summed.
ROUNDING = 8 * float(np.finfo(np.float64).eps)


class Matrices:
    """The distinct matrices of one problem."""

    def __init__(self) -> None:
        self.known: dict[Hashable, Matrix] = {}
        self.kept: list[object] = []  # keeps alive what the keys name by id

    def of(self, values: Floats) -> Matrix:
        key = ("of", id(values))
        if key not in self.known:
            self.kept.append(values)
            self.known[key] = Matrix(self, values)
        return self.known[key]

    def sum(self, one: Matrix, other: Matrix) -> Matrix:
        key = ("sum", id(one), id(other))
        if key not in self.known:
            self.kept += (one, other)
            self.known[key] = Matrix(self, one.values + other.values)
        return self.known[key]


class Matrix:
    """Costs by strategies of one node (rows) and of its neighbour (columns)."""

    def __init__(self, family: Matrices, values: Floats) -> None:
        self.family = family
        self.values = values
        self.selections: dict[bytes, Matrix] = {}

    @cached_property
    def flipped(self) -> Matrix:
        """The same edge seen from its other end."""
        other = Matrix(self.family, np.ascontiguousarray(self.values.T))
        other.__dict__["flipped"] = self
        return other

    def select(self, rows: Ints) -> Matrix:
        """These rows, in this order, maybe several times."""
        key = rows.tobytes()
        if key not in self.selections:
            self.selections[key] = Matrix(self.family, self.values[rows])
        return self.selections[key]

    @cached_property
    def finite(self) -> NDArray[np.bool_]:
        return np.isfinite(self.values)

    @cached_property
    def all_finite(self) -> bool:
        return bool(self.finite.all())

    @cached_property
    def dead_rows(self) -> NDArray[np.bool_] | None:
        """Rows without any possible column; None when there is no such row."""
        dead = np.asarray(~self.finite.any(axis=1))
        return dead if dead.any() else None

    @cached_property
    def function(self) -> Ints | None:
        """The one row that each column allows; None when some column allows another number of rows."""
        if self.values.shape[0] == 1 and self.all_finite:
            return np.zeros(self.values.shape[1], dtype=np.int64)
        if self.all_finite or np.any(self.finite.sum(axis=0) != 1):
            return None
        return np.asarray(np.argmax(self.finite, axis=0).astype(np.int64))

    @cached_property
    def parts(self) -> tuple[Floats, Floats] | None:
        """A row part and a column part that add up to the matrix; None when there are none."""
        if not self.all_finite:
            return None
        row_part = self.values[:, 0].copy()
        column_part = self.values[0] - self.values[0, 0]
        difference = np.abs(self.values - row_part[:, None] - column_part[None, :]).max()
        if difference > ROUNDING * np.abs(self.values).max():
            return None
        return row_part, column_part

    @cached_property
    def regret(self) -> Floats | None:
        """[s, t]: the most that row s can cost above row t, over the columns; None when that is too much to compare."""
        rows, columns = self.values.shape
        if rows * rows * columns > LARGEST_COMPARISON:
            return None
        if self.all_finite:
            return np.asarray((self.values[:, None, :] - self.values[None, :, :]).max(axis=2))
        with np.errstate(invalid="ignore"):
            differences = self.values[:, None, :] - self.values[None, :, :]
        differences[~np.broadcast_to(self.finite[None, :, :], differences.shape)] = -np.inf
        return np.asarray(differences.max(axis=2))
