"""Which rule wins: the more specific one, whatever the order of the lines."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import IntEnum
from fnmatch import translate
from functools import lru_cache
from typing import NamedTuple

from autopar.sharding.layout.syntax import Pin, Scope

__all__ = ["POSITION", "Exactness", "Precedence", "Specificity", "glob_matches", "matches", "specificity"]


POSITION = "_."
"""`_.2` is the third of the smallest dims of a tensor, counted from 0, where it has no name that can be written."""


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
