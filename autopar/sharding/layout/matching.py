"""Match the statements of a layout with names, and rank those that match: the more specific one wins.

The order of the lines does not count.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from enum import IntEnum
from fnmatch import translate
from functools import lru_cache
from typing import NamedTuple

from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.syntax import (
    Block,
    DimRule,
    GatherStatement,
    MicroBatches,
    OpenMicroBatches,
    OpPin,
    Pin,
    Scope,
    Statement,
)

# `_.2` is the third atom of a tensor, for atoms without a name that the language can write.
POSITION = "_."


class Precedence(IntEnum):
    """Rank of the place of a rule, by how closely it selects tensors."""

    BARE = 0
    KIND = 1
    DIMS = 2
    GLOB = 3
    PIN = 4


class Exactness(IntEnum):
    """Rank of a pattern, by how closely it selects dims."""

    ANY = 0
    PREFIX = 1
    NAME = 2


class Specificity(NamedTuple):
    """Rank of a rule; the greater one wins, and equal ones that disagree are an error (E2)."""

    level: Precedence
    exactness: Exactness


def specificity(where: Pin | Scope | None, pattern: str) -> Specificity:
    """Return the rank of a rule for `pattern` in a pin, in a scope, or bare (None)."""
    exactness = Exactness.PREFIX if pattern.endswith("*") else Exactness.NAME
    if pattern == "*":
        exactness = Exactness.ANY
    if where is None:
        return Specificity(Precedence.BARE, exactness)
    if isinstance(where, Pin):
        return Specificity(Precedence.PIN, exactness)
    if where.glob is not None:
        return Specificity(Precedence.GLOB, exactness)
    return Specificity(Precedence.DIMS if where.dims else Precedence.KIND, exactness)


def matches(pattern: str, dim: str) -> bool:
    """Return whether a pattern matches a dim: `seq*` matches `seq.1`, `seq` does not."""
    # A dim without a name is meant only where it is written: `*` does not match it.
    if dim.startswith(POSITION):
        return pattern == dim
    return dim.startswith(pattern[:-1]) if pattern.endswith("*") else dim == pattern


def glob_matches(glob: str, name: str) -> bool:
    """Return whether `@glob` matches a name: `*` is any text, dots included."""
    return _compiled(glob)(name) is not None


@lru_cache(maxsize=65536)
def _compiled(glob: str) -> Callable[[str], re.Match[str] | None]:
    # `fnmatch` caches a few hundred patterns, and a plan may have thousands.
    return re.compile(translate(glob)).match


# The position of a statement, and the pattern in it that a name matches.
_Place = tuple[int, str]


class StatementIndex:
    """Parts of a layout by name: a tensor or an op resolves equally under the layout and under its part.

    Names that match the same patterns of the same statements have the same object as their part.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._general: set[int] = set()
        self._exact: dict[str, list[_Place]] = {}
        self._patterns: dict[str, list[_Place]] = {}
        self._found: dict[tuple[_Place, ...], Layout] = {}
        self._by_name: dict[str, Layout] = {}
        for number, statement in enumerate(layout.statements):
            for glob in dict.fromkeys(_globs(statement)):
                if glob is None:
                    self._general.add(number)
                else:
                    # A plan names thousands of tensors exactly: only true patterns are matched one by one.
                    kind = self._patterns if any(sign in glob for sign in "*?[") else self._exact
                    kind.setdefault(glob, []).append((number, glob))

    def about(self, name: str) -> Layout:
        """Return the statements about all names or about this one, in their order."""
        if name not in self._by_name:
            self._by_name[name] = self._matching(name)
        return self._by_name[name]

    def _matching(self, name: str) -> Layout:
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
    """Yield the name patterns of a statement, None for all; none for a contract."""
    if isinstance(statement, DimRule | MicroBatches | OpenMicroBatches):
        yield None
    elif isinstance(statement, Block):
        yield from (scope.glob for scope in statement.scopes)
    elif isinstance(statement, Pin | OpPin | GatherStatement):
        yield statement.glob
