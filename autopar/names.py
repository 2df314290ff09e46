"""Names in autopar's text formats: their form, reserved words, suggestions for unknown ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["INTEGER", "MAX_DIGITS", "NAME", "RESERVED", "did_you_mean", "nearest", "printable"]

# A letter or `_`, then letters, digits or `_`.
NAME = r"[^\W\d]\w*"

INTEGER = r"[0-9]+"

# No size has more digits; parsing longer numbers from a file would exhaust time and memory.
MAX_DIGITS = 18

# Words of the layout language, which cannot name an axis or a dim.
RESERVED = frozenset(
    {
        *("strategy", "mesh", "let", "op", "same", "over"),
        *("param", "use", "grad", "opt", "act", "input", "output", "buffer"),
        *("none", "pad", "partial", "broadcast"),
        *("keep", "regather", "recompute", "selective", "full", "offload"),
        *("forbid", "warn", "limit", "memory", "halo"),
    }
)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the hint at the end of a message about an unknown name; empty if no known name is near."""
    names = sorted(known)
    same = [other for other in names if other.casefold() == name.casefold()]
    near = same or difflib.get_close_matches(name, names, n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


def nearest(name: str, known: Iterable[str], count: int) -> list[str]:
    """Return the known names most similar to this one, nearest first."""
    return difflib.get_close_matches(name, sorted(known), n=count, cutoff=0.0)


def printable(text: str) -> str:
    """Return a text of a file without characters that would control a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
