"""`capacity 1.25` in a layout: its text, and its mistakes."""

from __future__ import annotations

import pytest

from autopar.mesh import SubMesh
from autopar.sharding.layout.capacity_statement import CapacityStatement
from autopar.sharding.layout.language import choose_layout, parse_layout
from tests.sharding.layout.statements import assert_mistake, assert_statement

GOOD = [
    ("capacity 1.25", CapacityStatement(1.25), "capacity 1.25"),
    ("capacity 2.0  # of the mean", CapacityStatement(2.0), "capacity 2"),
    ("capacity none", CapacityStatement(None), "capacity none"),
]


@pytest.mark.parametrize(("text", "statement", "printed"), GOOD)
def test_statements(text: str, statement: CapacityStatement, printed: str) -> None:
    assert_statement(text, "capacity", statement, printed)


def test_a_dim_may_have_the_name() -> None:
    assert parse_layout("capacity -> none\n(capacity, seq) -> tp").capacity is None


BAD = [
    ("capacity 0", "E0: wrong capacity: expected a number above 0, got 0"),
    ("capacity all", "a multiple of the mean, or 'none'"),
    ("capacity 2 4", "the end of the line"),
    ("capacity 2; capacity none", "E0: a layout has one 'capacity' line, this one has 2"),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_mistakes(text: str, message: str) -> None:
    assert_mistake(text, message)


def test_before_a_strategy() -> None:
    layout = choose_layout("capacity 1.5; fold seq; fsdp", SubMesh({"dp": 2}))
    assert layout.capacity == CapacityStatement(1.5)
    assert layout.strategy is not None
