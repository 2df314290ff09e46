"""Names in autopar's text formats: what a name looks like, which are taken, and which one was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["INTEGER", "MAX_DIGITS", "NAME", "RESERVED", "did_you_mean", "nearest", "printable"]

NAME = r"[^\W\d]\w*"
"""A letter or `_`, then letters, digits, `_`: the regular expression."""

INTEGER = r"[0-9]+"

MAX_DIGITS = 18
"""No size has more; reading longer numbers would take the time and memory of whoever opens a bad file."""

RESERVED = frozenset(
    {
        *("strategy", "mesh", "let", "op", "same", "over"),
        *("param", "use", "grad", "opt", "act", "input", "output", "buffer"),
        *("none", "pad", "partial", "broadcast"),
        *("keep", "regather", "recompute", "selective", "full"),
        *("forbid", "warn", "limit", "memory", "halo"),
    }
)
"""The words of the layout language: no axis and no dim can be written with them."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The hint that ends a message about an unknown name; empty when no known name is near."""
    names = sorted(known)
    same = [other for other in names if other.casefold() == name.casefold()]
    near = same or difflib.get_close_matches(name, names, n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


def nearest(name: str, known: Iterable[str], count: int) -> list[str]:
    """The known names that are most like this one, the nearest first."""
    return difflib.get_close_matches(name, sorted(known), n=count, cutoff=0.0)


def printable(text: str) -> str:
    """A text of a file for a terminal: without characters that would steer it."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
