"""`capacity 1.25`: an expert takes a fixed number of the rows of a sample, and drops the others."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.names import MAX_DIGITS
from autopar.sharding.layout.source import SourceSpan, layout_error
from autopar.sharding.layout.tokens import Token, TokenReader

FORM = "write it as in 'capacity 1.25' or 'capacity none'"


@dataclass(frozen=True)
class CapacityStatement:
    """`capacity 1.25`: in each sample an expert takes 1.25 times the mean of rows; `none` takes all of them."""

    # None for routed rows, of which none is dropped.
    factor: float | None
    span: SourceSpan | None = field(default=None, compare=False, repr=False)


def begins_capacity(token: Token, following: Token) -> bool:
    """Return whether a statement begins, and not a rule for a dim of this name."""
    # Two words in a row begin no rule.
    is_factor = following.kind in ("number", "name") or following.text == "none"
    return token.kind == "name" and token.text == "capacity" and is_factor


def read_capacity(words: TokenReader, keyword: Token) -> CapacityStatement:
    """Read a statement after its keyword."""
    words.form = FORM
    if words.accept("none"):
        return CapacityStatement(None, keyword.span)
    place = words.token
    if not words.is_a("number") or len(place.text) > MAX_DIGITS:
        raise words.expected("a multiple of the mean, or 'none'")
    factor = float(words.advance().text)
    if not factor:
        raise layout_error("E0", "wrong capacity: expected a number above 0, got 0", FORM, place.span)
    return CapacityStatement(factor, keyword.span)


def print_capacity(statement: CapacityStatement) -> str:
    """Return the text of a statement."""
    return f"capacity {'none' if statement.factor is None else f'{statement.factor:g}'}"
