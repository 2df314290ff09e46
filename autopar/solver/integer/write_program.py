"""Write an integer program to a file: MPS or LP, with a comment for each state of each decision."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from autopar.files import write_text
from autopar.solver.candidates import OpSharding, StorageOption
from autopar.solver.integer.choice import COMMENTS, check_format
from autopar.solver.integer.formulation import FormulatedModel
from autopar.solver.integer.program import IndexBlock, IntegerProgram
from autopar.solver.model.model import Variable

__all__ = ["program_text", "write_program"]

# Terms of an LP file in one line.
TERMS = 8


def write_program(made: FormulatedModel, path: str | Path) -> None:
    """Write a program as MPS or LP, by the suffix of the file."""
    write_text(path, program_text(made, check_format(path)))


def program_text(made: FormulatedModel, suffix: str) -> str:
    """Return the text of a program, of the format with some suffix."""
    lines = _lp_lines if suffix == ".lp" else _mps_lines
    comments = (f"{COMMENTS[suffix]}{line}" for line in _comments(made))
    return "\n".join((*comments, *lines(made.program))) + "\n"


def _comments(made: FormulatedModel) -> Iterator[str]:
    program = made.program
    yield f"the plan of a mesh: {program.counts}"
    yield f"one unit of time is {made.unit_seconds:g} s, one unit of memory {made.unit_gib:g} GiB"
    yield "names: op., held., value., recompute.NAME#STATE; @MODE: of a layer in this recompute mode"
    names = {block.start: block.name for block in program.columns}
    for variable, ids in zip(made.model.variables, made.states, strict=True):
        for state, column in enumerate(ids[0].tolist() if len(ids[0]) > 1 else ()):
            yield f"{names[int(ids[0, 0])]}#{state}: {_state_text(variable, column - int(ids[0, 0]))}"


def _state_text(variable: Variable, state: int) -> str:
    one = variable.states[state]
    if isinstance(one, OpSharding):
        return f"splits {dict(one.choice.splits)}"
    if isinstance(one, StorageOption):
        flags = [("gathered again", one.again), ("kept gathered", one.lasting), ("shared", one.shared is not None)]
        return f"stored {one.layout.splits} {', '.join(word for word, is_so in flags if is_so)}".rstrip()
    return f"kept {one.splits} partial {sorted(one.partial)}" if hasattr(one, "splits") else str(one)


def _names(blocks: tuple[IndexBlock, ...]) -> list[str]:
    return [name for block in blocks for name in block.names()]


# -- MPS ---------------------------------------------------------------------------------------------------------------


def _mps_lines(program: IntegerProgram) -> Iterator[str]:
    names, rows = _names(program.columns), _names(program.rows)
    sides = _sides(program)
    yield from ("NAME plan", "ROWS", " N step_time")
    yield from (f" {_LETTERS[sign]} {name}" for name, (sign, _) in zip(rows, sides, strict=True))
    yield "COLUMNS"
    order = np.argsort(program.column_of, kind="stable")
    starts = np.searchsorted(program.column_of[order], np.arange(len(names) + 1))
    whole = program.is_integer.tolist()
    for column, name in enumerate(names):
        if whole[column] != (column > 0 and whole[column - 1]):
            yield f" MARKER 'MARKER' '{'INTORG' if whole[column] else 'INTEND'}'"
        if program.costs[column]:
            yield f" {name} step_time {float(program.costs[column])!r}"
        own = order[starts[column] : starts[column + 1]]
        for row, value in zip(program.row_of[own].tolist(), program.values[own].tolist(), strict=True):
            yield f" {name} {rows[row]} {value!r}"
    if whole[-1]:
        yield " MARKER 'MARKER' 'INTEND'"
    yield "RHS"
    if program.constant:
        yield f" RHS step_time {-program.constant!r}"
    yield from (f" RHS {name} {side!r}" for name, (_, side) in zip(rows, sides, strict=True) if side)
    yield "BOUNDS"
    for name, low, high in zip(names, program.lower.tolist(), program.upper.tolist(), strict=True):
        if np.isinf(low):
            yield f" FR BOUND {name}"
        elif np.isfinite(high):
            yield f" UP BOUND {name} {high!r}"
    yield "ENDATA"


_LETTERS = {"=": "E", "<=": "L", ">=": "G"}


def _sides(program: IntegerProgram) -> list[tuple[str, float]]:
    """Return the sign of each row and its right side: a row has one side, or is an equality."""
    found = []
    for low, high in zip(program.row_lower.tolist(), program.row_upper.tolist(), strict=True):
        assert low == high or np.isinf(low) or np.isinf(high), "a row has one side, or is an equality"
        found.append(("=", low) if low == high else (">=", low) if np.isinf(high) else ("<=", high))
    return found


# -- LP ----------------------------------------------------------------------------------------------------------------


def _lp_lines(program: IntegerProgram) -> Iterator[str]:
    names, rows, sides = _names(program.columns), _names(program.rows), _sides(program)
    yield "Minimize"
    priced = np.flatnonzero(program.costs)
    yield from _terms("step_time", names, priced.tolist(), program.costs[priced].tolist())
    if program.constant:
        yield f"  {program.constant:+.17g} constant"
    yield "Subject To"
    if program.constant:
        yield "  fixed: constant = 1"
    starts = np.searchsorted(program.row_of, np.arange(len(rows) + 1))
    for number, name in enumerate(rows):
        own = slice(starts[number], starts[number + 1])
        sign, side = sides[number]
        columns, values = program.column_of[own].tolist(), program.values[own].tolist()
        yield from _terms(name, names, columns, values)
        yield f"    {sign} {side:.17g}"
    yield "Bounds"
    for name, low, high in zip(names, program.lower.tolist(), program.upper.tolist(), strict=True):
        if np.isinf(low):
            yield f"  {name} free"
        elif np.isfinite(high):
            yield f"  {low:g} <= {name} <= {high:g}"
    yield "Generals"
    yield from (f"  {names[column]}" for column in np.flatnonzero(program.is_integer).tolist())
    yield "End"


def _terms(label: str, names: list[str], columns: list[int], values: list[float]) -> Iterator[str]:
    words = [f"{value:+.17g} {names[column]}" for column, value in zip(columns, values, strict=True)]
    yield f"  {label}: {' '.join(words[:TERMS])}"
    for start in range(TERMS, len(words), TERMS):
        yield f"    {' '.join(words[start : start + TERMS])}"
