"""`fold seq` in a layout: its text, and its mistakes."""

from __future__ import annotations

import pytest

from autopar.mesh import SubMesh
from autopar.sharding.layout.fold_statement import FoldStatement
from autopar.sharding.layout.language import choose_layout, parse_layout
from tests.sharding.layout.statements import assert_mistake, assert_statement

STATEMENTS = [
    ("fold seq", FoldStatement("seq", 2), "fold seq"),
    ("fold seq 2", FoldStatement("seq", 2), "fold seq"),
    ("fold tokens 16  # documents", FoldStatement("tokens", 16), "fold tokens 16"),
    ("fold seq.1 none", FoldStatement("seq.1", None), "fold seq.1 none"),
    ("fold fold 4", FoldStatement("fold", 4), "fold fold 4"),
]


@pytest.mark.parametrize(("text", "statement", "printed"), STATEMENTS)
def test_statement(text: str, statement: FoldStatement, printed: str) -> None:
    assert_statement(text, "fold", statement, printed)


def test_a_dim_may_have_the_name() -> None:
    assert parse_layout("fold -> none\n(fold, seq) -> tp").fold is None


MISTAKES = [
    ("fold seq 3", "E0: wrong number of pieces: expected an even number from 2 up, got 3"),
    ("fold seq 0", "E0: wrong number of pieces"),
    ("fold seq all", "a number of pieces or 'none'"),
    ("fold seq 2 4", "the end of the line"),
    ("fold seq; fold seq 4", "E0: a layout has one 'fold' line, this one has 2"),
    ("fold seq -> cp", "a number of pieces or 'none'"),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES)
def test_mistakes(text: str, message: str) -> None:
    assert_mistake(text, message)


def test_before_a_strategy() -> None:
    layout = choose_layout("fold seq 4; fsdp", SubMesh({"dp": 2}))
    assert layout.fold == FoldStatement("seq", 4)
    assert layout.strategy is not None
