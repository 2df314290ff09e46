"""Tables of measured seconds, read from CSV files that a device or a library of a cluster file names.

The columns of a table are the fields of its rows. `text` writes what `read` reads.

    products      dtype, batch, rows, columns, reduction: seconds
    attention     dtype, causal, heads, queries, keys, head_dim: forward_seconds, backward_seconds
    collectives   collective, units, groups, bytes: seconds
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar, Generic, NoReturn, Self, TypeVar, get_type_hints

from autopar.errors import ClusterError
from autopar.names import did_you_mean

# Dtypes of products and attention, as device files name them.
DTYPES = ("float64", "float32", "bfloat16", "float16", "float8", "float4")


@dataclass(frozen=True)
class ProductTime:
    """Seconds of `batch` products of [rows, reduction] by [reduction, columns]."""

    dtype: str = field(metadata={"one_of": DTYPES})
    batch: int
    rows: int
    columns: int
    reduction: int
    seconds: float


@dataclass(frozen=True)
class AttentionTime:
    """Seconds of fused attention, forward and backward, of so many heads of all sequences."""

    dtype: str = field(metadata={"one_of": DTYPES})
    causal: bool
    heads: int
    queries: int
    keys: int
    head_dim: int
    forward_seconds: float
    backward_seconds: float

    @property
    def doubt(self) -> tuple[str, str] | None:
        if not self.causal or self.queries == self.keys:
            return None
        message = f"causal attention of {self.queries} queries and {self.keys} keys has two meanings"
        return message, "give as many keys as queries, or leave the row out"


# Collectives of tables: those of `collective_algorithms.KINDS` but one, whose messages are sends.
COLLECTIVES = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all"),
    *("broadcast", "reduce", "gather", "scatter", "send"),
)


@dataclass(frozen=True)
class CollectiveTime:
    """Seconds of a collective over a buffer, while equal groups of ranks run it at once."""

    collective: str = field(metadata={"one_of": COLLECTIVES})
    # Units of each level that a group joins, the outermost first: `2x8` for 2 nodes with 8 ranks each.
    units: str = field(metadata={"form": r"[1-9]\d{0,6}(x[1-9]\d{0,6})*", "example": "2x8"})
    groups: int
    bytes: int
    seconds: float

    @property
    def joined(self) -> tuple[int, ...]:
        """Return the units of each level, the innermost first."""
        return tuple(int(count) for count in reversed(self.units.split("x")))


TableRow = TypeVar("TableRow")


@dataclass(frozen=True)
class MeasuredTable(Generic[TableRow]):
    """Rows of a CSV file; two tables are equal if their files have the same text."""

    file: str
    digest: str
    rows: tuple[TableRow, ...] = field(repr=False, compare=False)
    # Line of each row in the file.
    lines: tuple[int, ...] = field(repr=False, compare=False)
    # Times longer than in the file, on a device at a fraction of its speed.
    slowdown: float = 1.0

    ROW: ClassVar[type[Any]]

    @classmethod
    def of(cls, rows: Iterable[TableRow], file: str = "measured") -> Self:
        """Return a table of rows that no file has yet."""
        every = tuple(rows)
        digest = sha256(table_text(every).encode()).hexdigest()[:16]
        return cls(file, digest, every, tuple(range(2, len(every) + 2)))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a CSV file; raise an error that shows the line of a mistake."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            fix = "give a CSV file in UTF-8; its path is relative to the file that names it"
            raise ClusterError(f"{path} cannot be read: {error}\nfix: {fix}") from None
        rows, lines = _read_rows(path.name, text, cls.ROW)
        return cls(path.name, sha256(text.encode()).hexdigest()[:16], rows, lines)

    def slowed(self, times: float) -> Self:
        """Return the table of a device on which everything takes `times` as long."""
        return replace(self, slowdown=self.slowdown * times)

    def fail(self, i: int, message: str, fix: str) -> NoReturn:
        """Raise an error that shows a row."""
        text = table_text(self.rows[i : i + 1]).splitlines()[1]
        raise ClusterError(f"{message}\n  {self.file}:{self.lines[i]} | {text}\nfix: {fix}")


class ProductTable(MeasuredTable[ProductTime]):
    ROW = ProductTime


class AttentionTable(MeasuredTable[AttentionTime]):
    ROW = AttentionTime


class CollectiveTable(MeasuredTable[CollectiveTime]):
    ROW = CollectiveTime


@dataclass(frozen=True)
class DeviceTables:
    """Measured times of one device: the formulas price what they lack."""

    products: ProductTable | None = None
    attention: AttentionTable | None = None

    def slowed(self, times: float) -> DeviceTables:
        products, attention = self.products, self.attention
        return DeviceTables(
            None if products is None else products.slowed(times),
            None if attention is None else attention.slowed(times),
        )


@dataclass(frozen=True)
class LibraryTables:
    """Measured times of the collectives of a library on the links of one cluster."""

    collectives: CollectiveTable | None = None


# -- CSV --------------------------------------------------------------------------------------------------------------


def table_text(rows: Iterable[Any]) -> str:
    """Return rows of one kind as CSV, with a line of column names first."""
    every = list(rows)
    if not every:
        return ""
    names = [one.name for one in fields(every[0])]
    lines = [",".join(_shown(getattr(row, name)) for name in names) for row in every]
    return "\n".join([",".join(names), *lines]) + "\n"


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _whole(text: str) -> int:
    value = int(text)
    if value < 1 or len(text) > 18:
        raise ValueError(text)
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not isfinite(value) or value <= 0:
        raise ValueError(text)
    return value


def _yes_or_no(text: str) -> bool:
    return {"yes": True, "no": False}[text]


# What a column has, and how a cell is read, by the type of the field.
_CELLS: Mapping[type, tuple[str, Callable[[str], object]]] = {
    str: ("a word", str),
    int: ("a whole number from 1 up", _whole),
    float: ("a number of seconds above 0", _positive),
    bool: ("yes or no", _yes_or_no),
}


def _read_rows(file: str, text: str, record: type[TableRow]) -> tuple[tuple[TableRow, ...], tuple[int, ...]]:
    def fail(line: int, message: str, fix: str) -> NoReturn:
        every = text.splitlines()
        shown = "".join(c if c.isprintable() else " " for c in every[line - 1])[:160] if line <= len(every) else ""
        raise ClusterError(f"{message}\n  {file}:{line} | {shown}\nfix: {fix}")

    columns: tuple[Any, ...] = fields(record)  # type: ignore[arg-type]
    names = [one.name for one in columns]
    hints = get_type_hints(record)
    reader = csv.reader(text.splitlines())
    header = [cell.strip() for cell in next(reader, [])]
    if header != names:
        fail(1, f"the columns are {', '.join(header) or 'missing'}", f"name them {','.join(names)}, in this order")
    found: dict[TableRow, int] = {}
    seen: dict[tuple[str, ...], int] = {}
    for cells in reader:
        if not any(cell.strip() for cell in cells):
            continue
        line = reader.line_num
        if len(cells) != len(names):
            fail(line, f"the row has {len(cells)} cells and not {len(names)}", f"give {','.join(names)}")
        values: dict[str, Any] = {}
        for one, cell in zip(columns, cells, strict=True):
            value, wrong = _cell(one, hints[one.name], cell.strip())
            if wrong is not None:
                fail(line, *wrong)
            values[one.name] = value
        sizes = tuple(str(value) for name, value in values.items() if not name.endswith("seconds"))
        if sizes in seen:
            fail(line, f"line {seen[sizes]} has the same sizes", "keep one of the two rows, or their mean")
        seen[sizes] = line
        row = record(**values)
        if (doubt := getattr(row, "doubt", None)) is not None:
            fail(line, *doubt)
        found[row] = line
    if not found:
        fail(1, "the table has no rows", "give a row for each measurement, or leave the table out")
    return tuple(found), tuple(found.values())


def _cell(column: Any, kind: type, text: str) -> tuple[object, tuple[str, str] | None]:
    """Return the value of a cell, or its message and fix."""
    choices: tuple[str, ...] = column.metadata.get("one_of", ())
    if choices and text not in choices:
        return None, (
            f"there is no {column.name} '{text}'{did_you_mean(text, choices)}",
            f"one of {', '.join(choices)}",
        )
    form: str = column.metadata.get("form", "")
    if form and not re.fullmatch(form, text):
        return None, (f"'{column.name}' is impossible: '{text}'", f"as in {column.metadata['example']}")
    what, read = _CELLS[kind]
    try:
        return read(text), None
    except (ValueError, KeyError):
        return None, (f"'{column.name}' is not {what}: '{text}'", f"give {what}, or leave the row out")
