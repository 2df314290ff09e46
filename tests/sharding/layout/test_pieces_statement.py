"""`pieces 16` in a layout: its text, and its mistakes."""

from __future__ import annotations

import pytest

from autopar.mesh import SubMesh
from autopar.sharding.layout.language import choose_layout, parse_layout
from autopar.sharding.layout.pieces_statement import PiecesStatement
from tests.sharding.layout.statements import assert_mistake, assert_statement

STATEMENTS = [
    ("pieces 16", PiecesStatement(16), "pieces 16"),
    ("pieces 1  # computed again", PiecesStatement(1), "pieces 1"),
    ("pieces none", PiecesStatement(None), "pieces none"),
]


@pytest.mark.parametrize(("text", "statement", "printed"), STATEMENTS)
def test_statement(text: str, statement: PiecesStatement, printed: str) -> None:
    assert_statement(text, "pieces", statement, printed)


def test_a_dim_may_have_the_name() -> None:
    assert parse_layout("pieces -> none\n(pieces, seq) -> tp").pieces is None


MISTAKES = [
    ("pieces 0", "E0: wrong number of pieces: expected one from 1 up, got 0"),
    ("pieces all", "a number of pieces or 'none'"),
    ("pieces 2.5", "a number of pieces or 'none'"),
    ("pieces 2 4", "the end of the line"),
    ("pieces 2; pieces none", "E0: a layout has one 'pieces' line, this one has 2"),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES)
def test_mistakes(text: str, message: str) -> None:
    assert_mistake(text, message)


def test_before_a_strategy() -> None:
    layout = choose_layout("pieces 4; fold seq; fsdp", SubMesh({"dp": 2}))
    assert layout.pieces == PiecesStatement(4)
    assert layout.strategy is not None
