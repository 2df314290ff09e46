"""What of a layout is about one name: found fast where a layout has lines for thousands of tensors."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.precedence import glob_matches
from autopar.sharding.layout.syntax import Block, DimRule, GatherStatement, OpPin, Pin, Statement

__all__ = ["StatementIndex"]

_Place = tuple[int, str]
"""The number of a statement, and the pattern in it that a name matches."""


class StatementIndex:
    """The parts of a layout: what it says of a tensor or an op is what the part about its name says of it.

    Names that match the same patterns of the same statements have one part, the same object.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._general: set[int] = set()
        self._exact: dict[str, list[_Place]] = {}
        self._patterns: dict[str, list[_Place]] = {}
        self._found: dict[tuple[_Place, ...], Layout] = {}
        for number, statement in enumerate(layout.statements):
            for glob in dict.fromkeys(_globs(statement)):
                if glob is None:
                    self._general.add(number)
                else:
                    kind = self._patterns if any(sign in glob for sign in "*?[") else self._exact
                    kind.setdefault(glob, []).append((number, glob))

    def about(self, name: str) -> Layout:
        """The statements that are about all names, or about this one, in their order."""
        own = list(self._exact.get(name, ()))
        for glob, places in self._patterns.items():
            if glob_matches(glob, name):
                own += places
        key = tuple(own)
        if key not in self._found:
            numbers = sorted(self._general.union(number for number, _ in own))
            self._found[key] = Layout(tuple(self._layout.statements[i] for i in numbers), self._layout.name)
        return self._found[key]


def _globs(statement: Statement) -> Iterator[str | None]:
    """The names that a statement is about; None for all. One about the whole of a plan is about none."""
    if isinstance(statement, DimRule):
        yield None
    elif isinstance(statement, Block):
        yield from (scope.glob for scope in statement.scopes)
    elif isinstance(statement, Pin | OpPin | GatherStatement):
        yield statement.glob
