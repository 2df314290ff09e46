"""`pieces 16`: the last linear layer and the loss run over pieces of the rows of a shard."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.sharding.layout.source import SourceSpan, layout_error
from autopar.sharding.layout.tokens import Token, TokenReader

FORM = "write it as in 'pieces 16' or 'pieces none'"


@dataclass(frozen=True)
class PiecesStatement:
    """`pieces 16`: logits of a sixteenth of the rows of a shard live at a time; `none` computes all at once."""

    # None for whole logits.
    count: int | None
    span: SourceSpan | None = field(default=None, compare=False, repr=False)


def begins_pieces(token: Token, following: Token) -> bool:
    """Return whether a statement begins, and not a rule for a dim of this name."""
    # Two words in a row begin no rule.
    is_count = following.kind in ("number", "name") or following.text == "none"
    return token.kind == "name" and token.text == "pieces" and is_count


def read_pieces(words: TokenReader, keyword: Token) -> PiecesStatement:
    """Read a statement after its keyword."""
    words.form = FORM
    if words.accept("none"):
        return PiecesStatement(None, keyword.span)
    place = words.token.span
    count = words.expect_integer("a number of pieces or 'none'")
    if count < 1:
        raise layout_error("E0", f"wrong number of pieces: expected one from 1 up, got {count}", FORM, place)
    return PiecesStatement(count, keyword.span)


def print_pieces(statement: PiecesStatement) -> str:
    """Return the text of a statement."""
    return f"pieces {'none' if statement.count is None else statement.count}"
