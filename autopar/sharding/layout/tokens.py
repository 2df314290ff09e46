"""Words of a layout with their places, read one after the other, and the sizes that they write."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal, TypeVar

from autopar.errors import LayoutError
from autopar.names import MAX_DIGITS, NAME, RESERVED
from autopar.sharding.layout.source import MAX_CHARACTERS, SourceSpan, layout_error, unknown_name

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

# Characters of a line and of a word; longer ones stand in files that are no layouts, and messages repeat words.
MAX_LINE = 2**16
MAX_WORD = 1000

# Fixes for characters that other notations use, or that stand in the wrong place.
FOREIGN = {
    "\N{RIGHTWARDS ARROW}": "write '->'",
    '"': "close the text with '\"' on the same line; inside it write '\\\"' and '\\\\'",
    "'": "write texts in double quotes",
    "@": "write '@' right before the name of a tensor",
    "-": "write '->'",
    ".": "names hold letters, digits and '_'; for the name of a tensor write '@blocks.0.weight'",
    "/": "for the name of a tensor write '@blocks.0/linear'",
    "\N{NULL}": "this is not a text file; give a layout file",
}


@dataclass(frozen=True)
class Token:
    """Word with its place; the text of a string is unescaped, that of a glob begins after the `@`."""

    kind: TokenKind
    text: str
    span: SourceSpan
    end: int  # the column after it

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
    """Return the words of a layout, with "line end" after each line and "end" last."""
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


T = TypeVar("T")


class TokenReader:
    """Reader of the words of one text; `form` shows in errors how the current statement is written."""

    def __init__(self, text: str, name: str, form: str) -> None:
        self.tokens = tokenize(text, name)
        self.position = 0
        self.form = form

    @property
    def token(self) -> Token:
        return self.tokens[self.position]

    def advance(self) -> Token:
        token = self.token
        if token.kind != "end":
            self.position += 1
        return token

    def at(self, *texts: str) -> bool:
        return self.is_a("word", "symbol") and self.token.text in texts

    def is_a(self, *kinds: TokenKind) -> bool:
        return self.token.kind in kinds

    def at_end(self) -> bool:
        return self.is_a("line end", "end") or self.at(";")

    def accept(self, *texts: str) -> bool:
        found = self.at(*texts)
        if found:
            self.advance()
        return found

    def expected(self, what: str, fix: str | None = None) -> LayoutError:
        return layout_error("E0", f"expected {what}, found {self.token}", fix or self.form, self.token.span)

    def reserved(self, place: SourceSpan, word: str, what: str) -> LayoutError:
        message = f"'{word}' is a word of the language and cannot name {what}"
        pattern = f", or a pattern: '{word[:-1]}*'" if what == "a dim" else ""
        return layout_error("E0", message, f"take another name{pattern}", place)

    def expect(self, text: str, after: str) -> None:
        if not self.accept(text):
            raise self.expected(f"'{text}' {after}")

    def expect_name(self, what: str) -> str:
        if self.is_a("word"):
            raise self.reserved(self.token.span, self.token.text, what)
        if not self.is_a("name"):
            raise self.expected(f"the name of {what}")
        return self.advance().text

    def expect_dim(self, what: str = "a dim") -> str:
        return self.advance().text if self.is_a("dim") else self.expect_name(what)

    def expect_glob(self) -> str:
        if not self.is_a("glob"):
            raise self.expected("'@' and the name of a tensor or op")
        if not self.token.text:
            raise layout_error("E0", "expected a name right after '@'", self.form, self.token.span)
        return self.advance().text

    def expect_integer(self, what: str) -> int:
        if not self.is_a("number") or "." in self.token.text or len(self.token.text) > MAX_DIGITS:
            raise self.expected(what)
        return int(self.advance().text)

    def listed(self, item: Callable[[], T], close: str, what: str) -> tuple[T, ...]:
        """Read items separated by commas, up to the closing bracket."""
        items = [item()]
        while self.accept(","):
            items.append(item())
        self.expect(close, f"or ',' after {what}")
        return tuple(items)


def read_shares(reader: TokenReader) -> tuple[int, ...] | Literal["speed"] | None:
    """Read `by speed` or `by 12:4` after the axes of a rule."""
    # `by` and `speed` are no words of the language: no other name follows axes.
    if not (reader.is_a("name") and reader.token.text == "by"):
        return None
    reader.advance()
    if reader.is_a("name") and reader.token.text == "speed":
        reader.advance()
        return "speed"
    place, numbers = reader.token.span, list[int]()
    while not numbers or reader.accept(":"):
        numbers.append(reader.expect_integer("'speed', or whole numbers as in 'by 12:4'"))
    if not any(numbers):
        raise layout_error("E0", "all shares are 0", "write whole numbers, as in 'by 12:4'", place)
    return tuple(numbers)


UNITS = {
    "B": 1,
    **{f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)},
    **{f"{p}B": 1000**i for i, p in enumerate("kMGT", 1)},
}


def parse_size(number: Token, unit: Token) -> int:
    """Return the bytes of a size, `1.5` `GiB`."""
    if unit.text not in UNITS:
        raise unknown_name("unit", unit.text, UNITS, unit.span)
    # Floats would round: the size must be a whole number of bytes.
    size_bytes = Decimal(number.text) * UNITS[unit.text]
    if size_bytes != int(size_bytes) or size_bytes < 1 or len(str(int(size_bytes))) > MAX_DIGITS:
        message = f"invalid size '{number.text}{unit.text}'"
        raise layout_error("E0", message, "give a whole number of bytes, as in '1.5GiB' or '70GB'", number.span)
    return int(size_bytes)


def parse_percent(number: Token) -> float:
    """Return the number of a percentage, 25 for `25%`."""
    percent = float(number.text[:MAX_DIGITS])
    if len(number.text) > MAX_DIGITS or percent > 100:
        raise layout_error("E0", f"invalid share '{number.text}%'", "give 0% to 100%", number.span)
    return percent


def format_size(size_bytes: int) -> str:
    """Return the shortest text of a size in whole units."""
    texts = [f"{size_bytes // unit}{name}" for name, unit in UNITS.items() if size_bytes % unit == 0]
    return min(texts, key=len)


def format_percent(percent: float) -> str:
    """Return a percentage in decimal digits, without an exponent."""
    return f"{Decimal(repr(percent)).normalize():f}%"
