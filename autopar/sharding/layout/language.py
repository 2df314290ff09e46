"""Read and print layouts. docs/language.md describes the language to users."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autopar.errors import AutoparError, LayoutError
from autopar.mesh import Mesh
from autopar.sharding.layout.parser import LayoutParser
from autopar.sharding.layout.source import layout_error, read_text
from autopar.sharding.layout.substitute_axes import expand_lets, replace_axes
from autopar.sharding.layout.syntax import (
    Axes,
    DimRule,
    Limit,
    MeshStatement,
    Statement,
    StrategyStatement,
    print_statement,
)


@dataclass(frozen=True)
class Layout:
    """Statements of a layout in the order of its text; `name` is the file in messages."""

    statements: tuple[Statement, ...]
    name: str = field(default="<layout>", compare=False)

    @staticmethod
    def load(path: str | Path) -> Layout:
        """Read a `.lay` file."""
        return parse_layout(read_text(path), str(path))

    @property
    def strategy(self) -> StrategyStatement | None:
        return next((s for s in self.statements if isinstance(s, StrategyStatement)), None)

    @property
    def mesh(self) -> Mesh | None:
        return next((s.mesh for s in self.statements if isinstance(s, MeshStatement)), None)

    def on_axes(self, meaning: Mapping[str, Axes]) -> Layout:
        """Return the layout with its axes replaced; `()` stands for an axis of size 1."""
        replaced = (replace_axes(statement, meaning) for statement in self.statements)
        return Layout(tuple(statement for statement in replaced if statement is not None), self.name)

    def __iter__(self) -> Iterator[Statement]:
        return iter(self.statements)

    def __str__(self) -> str:
        return print_layout(self)


def parse_layout(text: str, name: str = "<layout>") -> Layout:
    """Read a layout; messages call it `name`."""
    statements = LayoutParser(text, name).file()
    for one in (StrategyStatement, MeshStatement):
        found = [statement for statement in statements if isinstance(statement, one)]
        if len(found) > 1:
            word = "strategy" if one is StrategyStatement else "mesh"
            message = f"a layout has one '{word}' line, this one has {len(found)}"
            raise layout_error("E0", message, "keep one of them", *(statement.span for statement in found[:2]))
    return Layout(expand_lets(statements), name)


def print_layout(layout: Layout) -> str:
    """Return the layout in its normal form; reading it gives an equal layout."""
    return "".join(f"{print_statement(statement)}\n" for statement in layout.statements)


def parse_rules(text: str, name: str = "<rules>") -> tuple[DimRule, ...]:
    """Read rules alone, `batch -> dp, seq -> tp`."""
    return LayoutParser(text, name).rules()


def parse_memory(text: str) -> Limit:
    """Read a limit of device memory, `70GiB` or `90%`."""
    why = ""
    try:
        found = parse_layout(f"limit memory {text}", "memory").statements
    except LayoutError as error:
        found, why = (), f": {str(error).splitlines()[0].removeprefix(f'{error.code}: ')}"
    if len(found) != 1 or not isinstance(found[0], Limit):
        raise AutoparError(f"memory={text!r} is no amount{why}\nfix: write it as in '70GiB' or '90%'")
    return found[0]


def parse_strategy_call(text: str) -> tuple[str, dict[str, Axes]]:
    """Read `fsdp(fsdp=dp*tp)`: the strategy, and the mesh axes for each of its axes, `()` for `none`."""
    return LayoutParser(text, "<strategy>").call()
