"""Which rule wins: the more specific one, whatever the order of the lines."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from enum import IntEnum
from fnmatch import translate
from functools import lru_cache
from typing import NamedTuple

from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.syntax import Block, DimRule, GatherStatement, OpPin, Pin, Scope, Statement

# `_.2` is the third of the smallest dims of a tensor, counted from 0, where it has no name that can be written.
POSITION = "_."


class Precedence(IntEnum):
    """How closely the place of a rule says which tensors it is about."""

    BARE = 0
    KIND = 1
    DIMS = 2
    GLOB = 3
    PIN = 4


class Exactness(IntEnum):
    """How closely a pattern says which dims it is about."""

    ANY = 0
    PREFIX = 1
    NAME = 2


class Specificity(NamedTuple):
    """The greater one wins; rules of equal specificity that disagree are an error (E2)."""

    level: Precedence
    exactness: Exactness


def specificity(where: Pin | Scope | None, pattern: str) -> Specificity:
    """Of the rule for the dims of `pattern` in a pin, in one scope of a block, or by itself (None)."""
    return Specificity(_level(where), _exactness(pattern))


def matches(pattern: str, dim: str) -> bool:
    """Whether a dim of a rule (`seq`, `seq*`, `*`) is about the dim: `seq*` is about `seq.1`, `seq` is not.

    `_.2`, the place of a dim, is only meant by itself.
    """
    if dim.startswith(POSITION):
        return pattern == dim
    return dim.startswith(pattern[:-1]) if pattern.endswith("*") else dim == pattern


def glob_matches(glob: str, name: str) -> bool:
    """Whether `@glob` is about the tensor: `*` is any text, dots included, `?` any one character."""
    return _compiled(glob)(name) is not None


@lru_cache(maxsize=65536)
def _compiled(glob: str) -> Callable[[str], re.Match[str] | None]:
    """`fnmatch` keeps but a few hundred patterns, and a plan may have thousands."""
    return re.compile(translate(glob)).match


def _level(where: Pin | Scope | None) -> Precedence:
    if where is None:
        return Precedence.BARE
    if isinstance(where, Pin):
        return Precedence.PIN
    if where.glob is not None:
        return Precedence.GLOB
    return Precedence.DIMS if where.dims else Precedence.KIND


def _exactness(pattern: str) -> Exactness:
    if pattern == "*":
        return Exactness.ANY
    return Exactness.PREFIX if pattern.endswith("*") else Exactness.NAME


# The number of a statement, and the pattern in it that a name matches.
_Place = tuple[int, str]


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
        """Return the statements that are about all names, or about this one, in their order."""
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
    """Yield the names that a statement is about; None for all. One about the whole of a plan is about none."""
    if isinstance(statement, DimRule):
        yield None
    elif isinstance(statement, Block):
        yield from (scope.glob for scope in statement.scopes)
    elif isinstance(statement, Pin | OpPin | GatherStatement):
        yield statement.glob
