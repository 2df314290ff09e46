"""`Formulation`: the integer program of a model while it is built, and `FormulatedModel` when it is."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.solver import Floats, Ints
from autopar.solver.integer.program import IndexBlock, IntegerProgram, ProgramBuilder
from autopar.solver.model.model import Factor, Model

__all__ = ["Entries", "FormulatedModel", "Formulation"]


@dataclass(frozen=True, eq=False)
class Entries:
    """Columns of one factor in one mode of a layer: a table of pairs of distinct shardings."""

    factor: Factor
    mode: int
    block: IndexBlock
    # A state of the first variable for each row, and of the second one for each column.
    rows: Ints
    columns: Ints

    @property
    def ids(self) -> Ints:
        return self.block.ids.reshape(len(self.rows), len(self.columns))


@dataclass(frozen=True, eq=False)
class FormulatedModel:
    """A model, its program, and the columns of each state: an array of modes and states for each variable."""

    model: Model
    program: IntegerProgram
    states: tuple[Ints, ...]
    # Columns of the sums, in the order of `Sum`.
    totals: Ints
    # Seconds and GiB that one unit of the program's sums stands for.
    unit_seconds: float
    unit_gib: float

    def chosen(self, point: Floats) -> list[int]:
        """Return the assignment that a point of the program is closest to."""
        return [int(point[ids].sum(axis=0).argmax()) for ids in self.states]

    def fractional(self, point: Floats) -> int:
        """Return the number of variables that take several states at once."""
        return sum(bool(point[ids].sum(axis=0).max() < 1 - 1e-5) for ids in self.states)


@dataclass
class Formulation:
    """The columns of each variable and factor so far, and their costs."""

    model: Model
    builder: ProgramBuilder = field(default_factory=ProgramBuilder)
    # For each variable the one whose modes its costs depend on: the recompute mode of its layer.
    layer_mode: list[int | None] = field(default_factory=list)
    states: list[Ints] = field(default_factory=list)
    tables: list[Entries] = field(default_factory=list)
    # Sums of each block of columns, by its first column: rows in the order of `Sum`.
    sums: dict[int, Floats] = field(default_factory=dict)

    def name(self, node: int) -> str:
        variable = self.model.variables[node]
        return f"{variable.kind}.{variable.name}"

    def mode_name(self, layer: int, mode: int) -> str:
        return f"@{self.model.variables[layer].states[mode]}"

    def add_priced(
        self,
        name: str,
        sums: Floats,
        allowed: NDArray[np.bool_] | bool,
        group: int = -1,
        width: int = 1,
        is_integer: bool = False,
    ) -> IndexBlock:
        """Add columns between 0 and 1 with their sums, a column of `sums` for each."""
        upper = np.where(allowed, 1.0, 0.0)
        block = self.builder.add_columns(name, sums.shape[1], 0.0, upper, is_integer, group, width)
        self.sums[block.start] = sums
        return block
