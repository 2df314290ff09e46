"""`recompute keep(product every 2, attention) @blocks.*`: the ops of a layer to recompute, or to keep, by a list.

An item is an op as its author names it, `linear`, a kind of ops, or the name of an op in the graph, `@*.out/linear`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, cast

from autopar.sharding.layout.source import SourceSpan, layout_error
from autopar.sharding.layout.tokens import TokenReader

__all__ = ["LISTS", "OpItem", "RecomputeList", "begins_list", "read_list"]

LISTS = ("keep", "only")
FORM = "write it as in 'recompute keep(product every 2, attention) @blocks.*' or 'recompute only(gelu) @blocks.*'"


@dataclass(frozen=True)
class OpItem:
    """Some ops of a layer: of a word, or of a name pattern; with `every 2` the first of each two in order."""

    pattern: str
    is_glob: bool = False
    every: int = 1
    span: SourceSpan | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        name = f"@{self.pattern}" if self.is_glob else self.pattern
        return name if self.every == 1 else f"{name} every {self.every}"


@dataclass(frozen=True)
class RecomputeList:
    """Ops of a layer whose results are kept, `keep(...)`, or which alone are recomputed, `only(...)`."""

    action: Literal["keep", "only"]
    items: tuple[OpItem, ...]

    def __str__(self) -> str:
        return f"{self.action}({', '.join(map(str, self.items))})"


def begins_list(words: TokenReader) -> bool:
    """Return whether the word after `recompute` begins a list."""
    # `only` is no word of the language, so that dims and axes may have the name.
    return words.at("keep") or (words.is_a("name") and words.token.text == "only")


def read_list(words: TokenReader) -> RecomputeList:
    """Read a list after `recompute`."""
    words.form = FORM
    action = cast(Literal["keep", "only"], words.advance().text)
    words.expect("(", f"and ops after '{action}'")
    return RecomputeList(action, words.listed(lambda: _item(words), ")", "ops"))


def _item(words: TokenReader) -> OpItem:
    span, is_glob = words.token.span, words.is_a("glob")
    pattern = words.expect_glob() if is_glob else words.expect_name("an op")
    every = 1
    if words.is_a("name") and words.token.text == "every":
        words.advance()
        place = words.token.span
        every = words.expect_integer("a number of ops, the first of which is meant")
        if every < 1:
            raise layout_error("E0", f"wrong number of ops: expected one from 1 up, got {every}", FORM, place)
    return OpItem(pattern, is_glob, every, span)
