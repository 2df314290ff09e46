"""The words of a layout, with their places."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from autopar.names import NAME, RESERVED
from autopar.sharding.layout.source import MAX_CHARACTERS, SourceSpan, layout_error

__all__ = ["Token", "TokenKind", "tokenize"]

TokenKind = Literal["word", "name", "dim", "number", "string", "glob", "symbol", "line end", "end"]

_TOKEN = re.compile(
    rf"""
      (?P<blank>[^\S\n]+|\#.*)
    | (?P<dim>{NAME}\.[0-9]+)
    | (?P<name>{NAME})
    | (?P<number>[0-9]+(?:\.[0-9]+)?)
    | (?P<string>"(?:[^"\\]|\\["\\])*")
    | @(?P<glob>[^\s\[,;{{}})\#]*)
    | (?P<symbol>->|[:|!?*,;(){{}}\[\]=+%])
    """,
    re.VERBOSE,
)

MAX_LINE = 2**16
MAX_WORD = 1000
"""Longer lines and words, in characters, are of files that are no layouts; messages repeat words."""

FOREIGN = {
    "\N{RIGHTWARDS ARROW}": "write '->'",
    '"': "close the text with '\"' on the same line; inside it write '\\\"' and '\\\\'",
    "'": "write texts in double quotes",
    "@": "write '@' right before the name of a tensor",
    "-": "write '->'",
    ".": "names hold letters, digits and '_'; for the name of a tensor write '@blocks.0.weight'",
    "/": "for the name of a tensor write '@blocks.0/linear'",
    "\N{NULL}": "this is no text; give a layout file",
}


@dataclass(frozen=True)
class Token:
    """A word: its kind, its text (of a string what it says, of a glob what follows the `@`), its place."""

    kind: TokenKind
    text: str
    span: SourceSpan
    end: int
    """The column after it."""

    def __str__(self) -> str:
        match self.kind:
            case "end":
                return "the end of the text"
            case "line end":
                return "the end of the line"
            case "string":
                return "a text"
            case "glob":
                return f"'@{self.text}'"
        return f"'{self.text}'"


def tokenize(text: str, name: str) -> list[Token]:
    """All words of a layout; lines end with a "line end" token, the layout with "end"."""
    if len(text) > MAX_CHARACTERS:
        message = f"a layout has at most {MAX_CHARACTERS:,} characters, and this text has {len(text):,}"
        raise layout_error("E0", message, "give a layout", name)
    tokens: list[Token] = []
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    for number, line in enumerate(lines, start=1):
        tokens += _line_tokens(SourceSpan(name, number, 0, line))
        kind: TokenKind = "line end" if number < len(lines) else "end"
        tokens.append(Token(kind, "", SourceSpan(name, number, len(line.rstrip()), line), len(line)))
    return tokens


def _line_tokens(line: SourceSpan) -> list[Token]:
    if len(line.text) > MAX_LINE:
        message = f"a line has at most {MAX_LINE:,} characters, and this one has {len(line.text):,}"
        raise layout_error("E0", message, "write statements and the rules of a block on lines of their own", line)
    tokens: list[Token] = []
    column = 0
    while column < len(line.text):
        span = SourceSpan(line.name, line.line, column, line.text)
        match = _TOKEN.match(line.text, column)
        if match is None:
            character = line.text[column]
            shown = f"'{character}'" if character.isprintable() else f"the character U+{ord(character):04X}"
            fix = FOREIGN.get(character, "a comment starts with '#'" if character.isprintable() else "remove it")
            raise layout_error("E0", f"{shown} has no meaning here", fix, span)
        column = match.end()
        if match.lastgroup not in ("blank", "string") and column - span.column > MAX_WORD:
            message = f"a word has at most {MAX_WORD:,} characters, and this one has {column - span.column:,}"
            raise layout_error("E0", message, "take a shorter name", span)
        if match.lastgroup != "blank":
            tokens.append(_token(match, span))
    return tokens


def _token(match: re.Match[str], span: SourceSpan) -> Token:
    text = match.group()
    kind: TokenKind
    match match.lastgroup:
        case "string":
            return Token("string", re.sub(r"\\(.)", r"\1", text[1:-1]), span, match.end())
        case "glob":
            return Token("glob", text[1:], span, match.end())
        case "name":
            kind = "word" if text in RESERVED else "name"
        case "dim":
            kind = "dim"
        case "number":
            kind = "number"
        case _:
            kind = "symbol"
    return Token(kind, text, span, match.end())
