"""Read TOML files into frozen dataclasses, with the line of every error.

The fields of a dataclass are the keys. A field of a quantity ends in its unit, its key does not: `memory_bytes` reads
`memory = "80 GiB"`. A quantity is a number, a unit and optionally a source: `"600 GB/s"`, `"80 GiB [datasheet]"`. A
table of measurements is a CSV file beside the TOML file, with its source: `"mine-products.csv [measured]"`.
"""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from autopar.cost.measured.tables import MeasuredTable
from autopar.errors import ClusterError
from autopar.names import did_you_mean

Record = TypeVar("Record")
# Keys and list positions of a value, from the root: `("device", "peak", "bf16")`, `("level", 1, "units")`.
Place = tuple[str | int, ...]

# -- quantities -------------------------------------------------------------------------------------------------------

_DECIMAL = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


@dataclass(frozen=True)
class Measure:
    """A physical quantity: its units with their sizes in base units, and its range of values."""

    what: str
    suffix: str
    units: Mapping[str, float]
    example: str
    zero: bool = False
    most: float = math.inf

    @property
    def bounds(self) -> str:
        return ("0 or more" if self.zero else "more than 0") + ("" if math.isinf(self.most) else " and at most 100 %")


def _with_prefixes(unit: str, prefixes: Mapping[str, float], size: float = 1.0) -> dict[str, float]:
    return {f"{prefix}{unit}": factor * size for prefix, factor in prefixes.items()}


_BYTES = _with_prefixes("B", _DECIMAL) | _with_prefixes("B", _BINARY)
_RATES = {f"{unit}/s": size for unit, size in (_BYTES | _with_prefixes("b", _DECIMAL, 1 / 8)).items()}

COUNT = Measure("a count", "", MappingProxyType({"": 1.0}), '"8 [datasheet]"')
_MEASURES = (
    # `measure_of` takes the first suffix that matches: `_bytes_per_second` must precede `_seconds` and `_bytes`.
    Measure("a bandwidth", "_bytes_per_second", MappingProxyType(_RATES), '"450 GB/s"'),
    Measure("a size", "_bytes", MappingProxyType(_BYTES), '"80 GiB"'),
    Measure("a time", "_seconds", MappingProxyType(_SECONDS), '"2.5 us"', zero=True),
    Measure("a rate of computing", "_flops", MappingProxyType(_with_prefixes("FLOP/s", _DECIMAL)), '"989 TFLOP/s"'),
    Measure("a share", "_fraction", MappingProxyType({"%": 0.01}), '"92 %"', most=1.0),
)


def measure_of(name: str) -> tuple[Measure, str] | None:
    """Return the measure of a field and its key in files; None for a field without a unit."""
    found = (one for one in _MEASURES if name.endswith(one.suffix))
    return next(((measure, name.removesuffix(measure.suffix)) for measure in found), None)


@dataclass(frozen=True)
class Quantity:
    """Number in base units (bytes, seconds, FLOP/s), with the name of its source."""

    value: float
    source: str | None = None


_FORM = re.compile(
    r"\s*(?P<number>[-+]?[0-9][0-9_]*(\.[0-9]+)?([eE][-+]?[0-9]+)?)\s*(?P<unit>[^\s\[\]]*)\s*(?P<rest>.*)"
)
_SOURCE = re.compile(r"\[\s*(?P<source>[\w.-]+)\s*\]\s*")
_FILE = re.compile(r"\s*(?P<file>[^\[\]]+?\.csv)\s*(\[\s*(?P<source>[\w.-]+)\s*\]\s*)?")


def parse_quantity(text: str, measure: Measure) -> Quantity | str:
    """Return the quantity of a text, or the error message."""
    match = _FORM.fullmatch(text)
    if match is None:
        return f"'{text}' is not {measure.what}"
    unit = match["unit"]
    if unit not in measure.units:
        units = ", ".join(unit for unit in measure.units if unit)
        return f"'{text}' is not {measure.what}: {f'the units are {units}' if units else 'it has no unit'}"
    source = _SOURCE.fullmatch(match["rest"])
    if match["rest"] and source is None:
        return f"'{text}' is not {measure.what}: after the unit stands only the name of a source, in brackets"
    value = float(match["number"]) * measure.units[unit]
    if not math.isfinite(value) or value < 0 or (value == 0 and not measure.zero) or value > measure.most:
        return f"'{text}' is impossible: {measure.what} is {measure.bounds}"
    return Quantity(value, source["source"] if source else None)


# -- documents --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """Source of numbers, and the date when they were read or measured."""

    text: str
    date: str


@dataclass
class Document:
    """A parsed TOML file, with the line of every key for error messages."""

    name: str
    lines: tuple[str, ...]
    table: dict[str, Any]
    places: dict[Place, int]
    # Folder of the file, in which it names others.
    folder: Path = Path()
    # Quantities without a source, and the source of each other one; `read` adds to both.
    uncited: list[str] = field(default_factory=list)
    cited: dict[str, str] = field(default_factory=dict)

    # -- errors

    def fail(self, path: Place, message: str, fix: str) -> NoReturn:
        """Raise an error that shows the line of a value."""
        while path and path not in self.places:
            path = path[:-1]
        self.fail_at(self.places.get(path, 0), message, fix)

    def fail_at(self, line: int, message: str, fix: str) -> NoReturn:
        # Line 0 stands for the whole file.
        if 1 <= line <= len(self.lines):
            text = "".join(c if c.isprintable() else " " for c in self.lines[line - 1]).strip()[:160]
            raise ClusterError(f"{message}\n  {self.name}:{line} | {text}\nfix: {fix}")
        raise ClusterError(f"{message}\n  {self.name}\nfix: {fix}")

    # -- reading

    def sources(self) -> Mapping[str, Source]:
        """Read the table `[sources]`."""
        found: dict[str, Source] = {}
        for name, entry in self._table(("sources",), self.table.get("sources", {})).items():
            path = ("sources", name)
            texts = {key: str(value) for key, value in self._table(path, entry).items()}
            if set(texts) != {"text", "date"}:
                self.fail(path, f"source '{name}' has not just a text and a date", SOURCE_FORM)
            found[name] = Source(**texts)
        return MappingProxyType(found)

    def table_files(self) -> tuple[Path, ...]:
        """Return the CSV files that the file names, of which some may be missing."""
        return tuple(self.folder / name for name in _table_files(self.table))

    def read(self, record: type[Record], path: Place, value: object) -> Record:
        """Read a table into the dataclass `record`."""
        table = self._table(path, value)
        hints = get_type_hints(record)
        fields = [entry for entry in dataclasses.fields(cast(Any, record)) if entry.metadata.get("key", True)]
        keys = {(found[1] if (found := measure_of(entry.name)) else entry.name): entry for entry in fields}
        for key in table:
            if key not in keys:
                known = ", ".join(keys)
                self.fail((*path, key), f"unknown key '{key}'{did_you_mean(key, keys)}", f"the keys are {known}")
        values: dict[str, Any] = {}
        for key, entry in keys.items():
            name, kind = entry.name, hints[entry.name]
            if key in table:
                values[name] = self._value(kind, name, (*path, key), table[key])
            elif entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING:
                self.fail(path, f"{_title(path)} lacks '{key}'", f"add {key} = {_example(name, kind)}")
        return record(**values)

    def _value(self, kind: Any, name: str, path: Place, value: object) -> Any:
        arguments = get_args(kind)
        if get_origin(kind) in (Union, types.UnionType):
            (kind,) = (argument for argument in arguments if argument is not type(None))
            return self._value(kind, name, path, value)
        if isinstance(kind, type) and issubclass(kind, MeasuredTable):
            return self._measured(kind, path, value)
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type), f"{name} is annotated with a value"
            return self.read(kind, path, value)
        if get_origin(kind) is tuple:
            if not isinstance(value, list):
                self.fail(path, f"'{path[-1]}' is not a list", "write it in brackets, or as [[tables]]")
            return tuple(self._value(arguments[0], name, (*path, i), item) for i, item in enumerate(value))
        if get_origin(kind) is not None:
            assert issubclass(get_origin(kind), Mapping), f"{name} has an annotation that no TOML value matches"
            table = self._table(path, value)
            items = {key: self._value(arguments[1], name, (*path, key), item) for key, item in table.items()}
            return MappingProxyType(items)
        if kind in (int, float):
            return self._number(kind, name, path, value)
        if not isinstance(value, kind):
            words = {str: "a text in quotes", bool: "true or false"}
            self.fail(path, f"'{path[-1]}' is not {words[kind]}", f"write {path[-1]} = {_example(name, kind)}")
        return value

    def _number(self, kind: type, name: str, path: Place, value: object) -> int | float:
        found = measure_of(name)
        measure = found[0] if found else COUNT
        if isinstance(value, int) and not isinstance(value, bool) and measure is COUNT:
            value = str(value)
        if not isinstance(value, str):
            self.fail(path, f"'{_title(path)}' is not {measure.what} with its unit", f"as in {measure.example}")
        quantity = parse_quantity(value, measure)
        if isinstance(quantity, str):
            self.fail(path, quantity, f"as in {measure.example}")
        self._cite(path, quantity.source)
        if kind is int:
            if quantity.value != int(quantity.value):
                self.fail(path, f"'{value}' is impossible: a count is a whole number", f"as in {measure.example}")
            return int(quantity.value)
        return quantity.value

    def _measured(self, kind: type[Any], path: Place, value: object) -> Any:
        """Read a table of measurements from the file that a value names."""
        match = _FILE.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            self.fail(path, f"'{_title(path)}' does not name a CSV file", f'as in {path[-1]} = "times.csv [measured]"')
        self._cite(path, match["source"])
        return kind.read(self.folder / match["file"])

    def _cite(self, path: Place, source: str | None) -> None:
        title = ".".join(map(str, path))
        if source is None:
            self.uncited.append(title)
            return
        known = self.table.get("sources", {})
        if source not in known:
            self.fail(path, f"there is no source '{source}'{did_you_mean(source, known)}", SOURCE_FORM)
        self.cited[title] = source

    def _table(self, path: Place, value: object) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.fail(path, f"'{_title(path)}' is not a table", f"write it under a line [{path[-1] if path else ''}]")
        return value


SOURCE_FORM = 'under [sources], as in datasheet = { text = "...", date = 2026-01-31 }'


def read_document(path: Path) -> Document:
    """Parse a TOML file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"{path} cannot be read: {error}\nfix: give a TOML file in UTF-8") from None
    lines = tuple(text.splitlines())
    document = Document(path.name, lines, {}, _places(lines), path.parent)
    try:
        document.table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        reason = str(error).split(" (at ")[0]
        at = int(line[1]) if line else len(lines)
        document.fail_at(at, f"this is not TOML: {reason}", "see toml.io for how TOML is written")
    return document


def _table_files(value: object) -> Iterator[str]:
    if isinstance(value, str) and (match := _FILE.fullmatch(value)) is not None:
        yield match["file"]
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _table_files(item)


def _title(path: Place) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".") or "the file"


def _example(name: str, kind: Any) -> str:
    found = measure_of(name)
    if found is not None and kind is not str:
        return found[0].example
    return COUNT.example if kind is int else '"..."'


# -- lines ------------------------------------------------------------------------------------------------------------

_HEADER = re.compile(r"\s*(\[\[?)\s*([\w.\- \"']+?)\s*\]\]?\s*(#.*)?")
_KEY = re.compile(r"\s*([\w.\-\"']+(?:\s*\.\s*[\w\-\"']+)*)\s*=")
_STRING = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'[^']*'")


def _places(lines: tuple[str, ...]) -> dict[Place, int]:
    """Return the line of every table and key, which tomllib does not report."""
    places: dict[Place, int] = {(): 0}
    counts: dict[Place, int] = {}
    table: Place = ()
    depth = 0
    for number, line in enumerate(lines, 1):
        bare = _STRING.sub('""', line).split("#")[0]
        header = _HEADER.fullmatch(line) if depth == 0 else None
        if header is not None:
            table = _header_path(header, counts)
            places.setdefault(table, number)
        elif depth == 0 and (key := _KEY.match(line)) is not None:
            path = (*table, *_parts(key[1]))
            for end in range(len(table) + 1, len(path) + 1):
                places.setdefault(path[:end], number)
            for inner in re.findall(r"[{,]\s*([\w\-]+)\s*=", bare):
                places.setdefault((*path, inner), number)
        if header is None:
            depth = max(0, depth + bare.count("[") - bare.count("]") + bare.count("{") - bare.count("}"))
    return places


def _header_path(header: re.Match[str], counts: dict[Place, int]) -> Place:
    """Return the path of a table header; `[[level]]` counts up, and `[level.x]` is in the last one."""
    path: Place = ()
    parts = _parts(header[2])
    for part in parts[:-1]:
        path = (*path, part)
        if path in counts:
            path = (*path, counts[path] - 1)
    path = (*path, parts[-1])
    if header[1] == "[[":
        counts[path] = counts.get(path, 0) + 1
        path = (*path, counts[path] - 1)
    return path


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))
