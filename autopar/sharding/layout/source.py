"""Places in the text of a layout, and errors that show them."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from autopar.errors import LayoutError
from autopar.names import did_you_mean, nearest, printable

# Characters of a line that messages show; longer lines are cut around the caret.
WIDTH = 160

# Known names that a message lists; a model has thousands of tensors and ops.
MAX_NAMES = 20

# Room for a plan that pins every tensor of a model of ten thousand ops; a longer file is no layout.
MAX_CHARACTERS = 4 * 2**20


@dataclass(frozen=True)
class SourceSpan:
    """A place in a layout: file, line (from 1), column (from 0), and the whole text of the line."""

    name: str
    line: int
    column: int
    text: str

    def at(self, word: str) -> SourceSpan:
        """Return the first place of `word` on this line, from here on, or this place."""
        found = re.search(rf"(?<![\w.]){re.escape(word)}(?![\w.])", self.text[self.column :])
        return SourceSpan(self.name, self.line, self.column + found.start(), self.text) if found else self

    def __str__(self) -> str:
        return f"{self.name}:{self.line}"


def read_text(path: str | Path) -> str:
    """Return the text of a layout file; read at most MAX_CHARACTERS of a larger one."""
    # Null bytes are not printable.
    shown = repr(str(path)) if "\0" in str(path) else str(path)
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # opening a pipe would wait for a writer
            raise LayoutError("E0", f"E0: {shown} is not a regular file\nfix: give a layout file")
        with open(path, "rb") as file:
            data = file.read(MAX_CHARACTERS + 1)
    except OSError as error:
        raise LayoutError("E0", f"E0: {shown} cannot be read: {error.strerror}\nfix: give a layout file") from error
    except ValueError as error:
        raise LayoutError("E0", f"E0: {shown} cannot be read: {error}\nfix: give a layout file") from error
    if len(data) > MAX_CHARACTERS:
        message = f"E0: {shown} is longer than {MAX_CHARACTERS:,} bytes, which no layout is"
        raise LayoutError("E0", f"{message}\nfix: give a layout file")
    try:
        return data.decode("utf-8-sig")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise LayoutError("E0", f"E0: {shown} is no text: {error}\nfix: give a layout file, in UTF-8") from error


def layout_error(code: str, message: str, fix: str, *places: SourceSpan | str | None) -> LayoutError:
    """Return an error that shows each place with a caret, or as given if no span."""
    return LayoutError(code, "\n".join([f"{code}: {message}", *excerpts(*places), f"fix: {fix}"]))


def excerpts(*places: SourceSpan | str | None) -> list[str]:
    """Return the lines of a message that show places, each place once."""
    shown = [place for place in dict.fromkeys(places) if place is not None]
    width = max((len(str(place)) for place in shown if isinstance(place, SourceSpan)), default=0)
    lines: list[str] = []
    for place in shown:
        lines += _excerpt(place, width) if isinstance(place, SourceSpan) else [f"  {place}"]
    return lines


def unknown_name(what: str, name: str, known: Iterable[str], *places: SourceSpan | str | None) -> LayoutError:
    """Return the error E1 for an unknown name of a `what`, such as "dim"."""
    names = sorted(known)
    if not names:
        fix = f"there is no {what} at all here"
    elif len(names) <= MAX_NAMES:
        fix = f"the names are {', '.join(names)}"
    else:
        fix = f"the nearest of {len(names):,} names are {', '.join(nearest(name, names, MAX_NAMES))}"
    return layout_error("E1", f"there is no {what} '{name}'{did_you_mean(name, names)}", fix, *places)


def _excerpt(span: SourceSpan, width: int) -> list[str]:
    # One column per character, whatever a bad file holds: the caret must point, and nothing may reach the terminal.
    text = printable(span.text).replace("\t", " ").replace("\n", " ")
    column = span.column
    if len(text) > WIDTH:
        start = max(0, column - WIDTH // 2)
        text, column = text[start : start + WIDTH], column - start
    return [f"  {span!s:>{width}} | {text}".rstrip(), f"  {'':>{width}} | {' ' * column}^"]
