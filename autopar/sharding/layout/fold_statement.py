"""`fold seq`: the sequence is held in an order in which a split of causal attention gives each shard as much work."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.sharding.layout.source import SourceSpan, layout_error
from autopar.sharding.layout.tokens import Token, TokenReader

FORM = "write it as in 'fold seq', 'fold seq 16' or 'fold seq none'"
# Two pieces balance one document, more of them several documents in one row.
PIECES = 2


@dataclass(frozen=True)
class FoldStatement:
    """`fold seq 16`: the dim is cut in so many pieces, and every odd one is reversed; `none` keeps the plain order."""

    dim: str
    # None for the plain order.
    pieces: int | None = PIECES
    span: SourceSpan | None = field(default=None, compare=False, repr=False)


def read_fold(words: TokenReader, keyword: Token) -> FoldStatement:
    """Read a statement after its keyword."""
    words.form = FORM
    dim = words.expect_dim("the dim of the sequence")
    if words.at_end():
        return FoldStatement(dim, span=keyword.span)
    if words.accept("none"):
        return FoldStatement(dim, None, keyword.span)
    place = words.token.span
    pieces = words.expect_integer("a number of pieces or 'none'")
    if pieces < 2 or pieces % 2:
        message = f"wrong number of pieces: expected an even number from 2 up, got {pieces}"
        raise layout_error("E0", message, FORM, place)
    return FoldStatement(dim, pieces, keyword.span)


def print_fold(statement: FoldStatement) -> str:
    """Return the text of a statement."""
    if statement.pieces is None:
        return f"fold {statement.dim} none"
    return f"fold {statement.dim}" + ("" if statement.pieces == PIECES else f" {statement.pieces}")
