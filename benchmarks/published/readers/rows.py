"""Rows of a CSV, with errors that name the file, the line and the column."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from autopar.errors import AutoparError

__all__ = ["Row", "TableError", "read_rows"]

Value = TypeVar("Value")


class TableError(AutoparError):
    """A table that is not as its name says."""


@dataclass(frozen=True)
class Row:
    path: Path
    line: int
    values: Mapping[str, str]

    @property
    def place(self) -> str:
        return f"{self.path.name}:{self.line}"

    def text(self, column: str) -> str:
        if column not in self.values:
            raise TableError(f"{self.place}: no column '{column}'\nfix: the columns of the table that the name says")
        return self.values[column]

    def whole(self, column: str) -> int:
        return self._parse(column, int, "a whole number")

    def number(self, column: str) -> float:
        return self._parse(column, float, "a number")

    def maybe(self, column: str) -> float | None:
        """None where nothing stands there."""
        return self.number(column) if self.text(column).strip() else None

    def fail(self, column: str, expected: str) -> TableError:
        return TableError(f"{self.place}: {column} is {self.text(column)!r}; expected {expected}")

    def _parse(self, column: str, parse: Callable[[str], Value], expected: str) -> Value:
        try:
            return parse(self.text(column))
        except ValueError:
            raise self.fail(column, expected) from None


def read_rows(path: Path) -> tuple[Row, ...]:
    """Return all rows of a table; the first line names the columns."""
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            return tuple(
                Row(path, reader.line_num, {key: value or "" for key, value in line.items() if key}) for line in reader
            )
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise TableError(f"{path} cannot be read as a table: {problem}") from None
