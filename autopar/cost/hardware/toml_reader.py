"""TOML files as frozen dataclasses: the fields are the keys, and every mistake is shown with its line.

A field of a quantity ends in its unit (autopar/cost/hardware/quantities.py), its key does not: `memory_bytes` is
`memory = "80 GiB"`.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from autopar.cost.hardware.quantities import COUNT, Measure, measure_of, parse_quantity
from autopar.errors import ClusterError
from autopar.names import did_you_mean

__all__ = ["Document", "Source", "read_document"]

Record = TypeVar("Record")
Place = tuple[str | int, ...]
"""Where a value stands: `("device", "peak", "bf16")`, `("level", 1, "units")`."""


@dataclass(frozen=True)
class Source:
    """Where numbers come from, and when they were read or measured."""

    text: str
    date: str


@dataclass
class Document:
    """A file that was parsed, and where in it everything stands."""

    name: str
    lines: tuple[str, ...]
    table: dict[str, Any]
    places: dict[Place, int]
    uncited: list[str] = field(default_factory=list)
    """The quantities without a source, as they are read."""

    # -- errors

    def fail(self, path: Place, message: str, fix: str) -> NoReturn:
        """An error that shows the line of a value."""
        while path and path not in self.places:
            path = path[:-1]
        self.fail_at(self.places.get(path, 0), message, fix)

    def fail_at(self, line: int, message: str, fix: str) -> NoReturn:
        """Line 0: the file as a whole."""
        if 1 <= line <= len(self.lines):
            text = "".join(c if c.isprintable() else " " for c in self.lines[line - 1]).strip()[:160]
            raise ClusterError(f"{message}\n  {self.name}:{line} | {text}\nfix: {fix}")
        raise ClusterError(f"{message}\n  {self.name}\nfix: {fix}")

    # -- reading

    def sources(self) -> Mapping[str, Source]:
        """The table `[sources]`."""
        found: dict[str, Source] = {}
        for name, entry in self._table(("sources",), self.table.get("sources", {})).items():
            path = ("sources", name)
            texts = {key: str(value) for key, value in self._table(path, entry).items()}
            if set(texts) != {"text", "date"}:
                self.fail(path, f"source '{name}' has not just a text and a date", SOURCE_FORM)
            found[name] = Source(**texts)
        return MappingProxyType(found)

    def read(self, record: type[Record], path: Place, value: object) -> Record:
        """A table as the dataclass `record`."""
        table = self._table(path, value)
        keys = {_key(name): (name, kind) for name, kind in _fields(record).items()}
        for key in table:
            if key not in keys:
                known = ", ".join(keys)
                self.fail((*path, key), f"unknown key '{key}'{did_you_mean(key, keys)}", f"the keys are {known}")
        values: dict[str, Any] = {}
        for key, (name, kind) in keys.items():
            if key in table:
                values[name] = self._value(kind, name, (*path, key), table[key])
            elif not _has_default(record, name):
                self.fail(path, f"{_title(path)} lacks '{key}'", f"add {key} = {_example(name, kind)}")
        return record(**values)

    def _value(self, kind: Any, name: str, path: Place, value: object) -> Any:
        arguments = get_args(kind)
        if get_origin(kind) in (Union, types.UnionType):
            (kind,) = (argument for argument in arguments if argument is not type(None))
            return self._value(kind, name, path, value)
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type), f"{name} is annotated with a value"
            return self.read(kind, path, value)
        if get_origin(kind) is tuple:
            if not isinstance(value, list):
                self.fail(path, f"'{path[-1]}' is not a list", "write it in brackets, or as [[tables]]")
            return tuple(self._value(arguments[0], name, (*path, i), item) for i, item in enumerate(value))
        if get_origin(kind) is not None:  # a mapping
            table = self._table(path, value)
            items = {key: self._value(arguments[1], name, (*path, key), item) for key, item in table.items()}
            return MappingProxyType(items)
        return self._scalar(kind, name, path, value)

    def _scalar(self, kind: type, name: str, path: Place, value: object) -> Any:
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
        if quantity.source is None:
            self.uncited.append(".".join(map(str, path)))
        elif quantity.source not in self.table.get("sources", {}):
            known = self.table.get("sources", {})
            hint = did_you_mean(quantity.source, known)
            self.fail(path, f"there is no source '{quantity.source}'{hint}", SOURCE_FORM)
        if kind is int:
            if quantity.value != int(quantity.value):
                self.fail(path, f"'{value}' is impossible: a count is a whole number", f"as in {measure.example}")
            return int(quantity.value)
        return quantity.value

    def _table(self, path: Place, value: object) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.fail(path, f"'{_title(path)}' is not a table", f"write it under a line [{path[-1] if path else ''}]")
        return value


SOURCE_FORM = 'under [sources], as in datasheet = { text = "...", date = 2026-01-31 }'


def read_document(path: Path) -> Document:
    """The file, parsed."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"{path} cannot be read: {error}\nfix: give a TOML file in UTF-8") from None
    lines = tuple(text.splitlines())
    document = Document(path.name, lines, {}, _places(lines))
    try:
        document.table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        reason = str(error).split(" (at ")[0]
        at = int(line[1]) if line else len(lines)
        document.fail_at(at, f"this is not TOML: {reason}", "see toml.io for how TOML is written")
    return document


def _key(name: str) -> str:
    found = measure_of(name)
    return found[1] if found else name


def _fields(record: type[Any]) -> Mapping[str, Any]:
    hints = get_type_hints(record)
    return {entry.name: hints[entry.name] for entry in dataclasses.fields(record) if entry.metadata.get("key", True)}


def _has_default(record: type[Any], name: str) -> bool:
    entry = next(entry for entry in dataclasses.fields(record) if entry.name == name)
    return entry.default is not dataclasses.MISSING or entry.default_factory is not dataclasses.MISSING


def _title(path: Place) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".") or "the file"


def _example(name: str, kind: Any) -> str:
    measure: Measure | None = (found[0] if (found := measure_of(name)) else None) if kind is not str else None
    if measure is not None:
        return measure.example
    return COUNT.example if kind is int else '"..."'


# -- lines ------------------------------------------------------------------------------------------------------------

_HEADER = re.compile(r"\s*(\[\[?)\s*([\w.\- \"']+?)\s*\]\]?\s*(#.*)?")
_KEY = re.compile(r"\s*([\w.\-\"']+(?:\s*\.\s*[\w\-\"']+)*)\s*=")
_STRING = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'[^']*'")


def _places(lines: tuple[str, ...]) -> dict[Place, int]:
    """The line of every table and key, for messages: tomllib does not say it."""
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
    """The path of a table; a table of a list is counted, and those inside it belong to the last one."""
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
