"""Statements about micro-batches and stages: dims and axes may have their names, and mistakes get a fix."""

from __future__ import annotations

import pytest

from autopar.errors import LayoutError
from autopar.sharding.layout.language import parse_layout


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ("micro x", "expected a number of micro-batches, found 'x'", "write it as in 'micro 8'"),
        ("micro=8", "expected a number of micro-batches, found '='", "write it as in 'micro 8'"),
        ("micro ?{}", "expected a number of micro-batches, found '}'", "write it as in 'micro 8'"),
        ("ddp; micro 2", "expected '->' or ':' after dims", "write a strategy behind the statements: 'micro 8; fsdp'"),
        ("pipelin pp 1f1b", "did you mean 'pipeline'?", "write a rule"),
        ("pipeline pp; ddp", "expected a schedule", "the schedules are gpipe, 1f1b, interleaved, zero_bubble"),
        ("pipeline pp dualpipe", "there is no schedule 'dualpipe'", "the names are 1f1b, gpipe"),
        ("pipeline pp 1f1b(2)", "expected '+' and a number of micro-batches", "as in 'pipeline pp 1f1b'"),
        ("cut pp @blocks.1", "expected 'before'", "write it as in 'cut pp before"),
    ],
)
def test_mistakes(text: str, what: str, fix: str) -> None:
    with pytest.raises(LayoutError) as error:
        parse_layout(text)
    first, *_, last = str(error.value).splitlines()
    assert what in first
    assert last.startswith("fix: ")
    assert fix in last


@pytest.mark.parametrize("word", ["micro", "pipeline", "cut"])
def test_dims_and_axes_may_have_these_names(word: str) -> None:
    text = f"{word} -> {word}\n* -> none\n"
    assert str(parse_layout(text)) == text
