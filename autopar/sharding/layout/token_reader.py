"""Reading words one after the other, and saying what was expected instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from autopar.errors import LayoutError
from autopar.names import MAX_DIGITS
from autopar.sharding.layout.lexer import Token, TokenKind, tokenize
from autopar.sharding.layout.source import SourceSpan, layout_error

__all__ = ["TokenReader"]

T = TypeVar("T")


class TokenReader:
    """The words of one text, and how the statement that is being read is written."""

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
        """Items separated by commas, up to the closing bracket."""
        items = [item()]
        while self.accept(","):
            items.append(item())
        self.expect(close, f"or ',' after {what}")
        return tuple(items)
