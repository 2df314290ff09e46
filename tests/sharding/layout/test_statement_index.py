"""The part of a layout about one name says what the whole layout says of it."""

from __future__ import annotations

import pytest

from autopar.sharding.layout.language import parse_layout
from autopar.sharding.layout.matching import StatementIndex

LAYOUT = """
batch -> dp
* -> none
act@left.*, param@right { seq -> tp }
param { * -> dp }
@left.1[batch -> none]
@*.2[batch -> none]
keep @right
forbid all_gather(act) over dp
"""


@pytest.mark.parametrize(
    ("name", "lines"),
    [("other", (0, 1, 3)), ("left.1", (0, 1, 2, 3, 4)), ("left.2", (0, 1, 2, 3, 5)), ("right", (0, 1, 2, 3, 6))],
)
def test_a_part_has_the_statements_that_are_about_a_name(name: str, lines: tuple[int, ...]) -> None:
    layout = parse_layout(LAYOUT)
    part = StatementIndex(layout).about(name)
    assert part.statements == tuple(layout.statements[i] for i in lines)


def test_names_share_a_part_where_the_same_patterns_match() -> None:
    parts = StatementIndex(parse_layout("act@a.*, param@b.* { seq -> tp }"))
    assert parts.about("a.1") is parts.about("a.2")
    assert parts.about("x") is parts.about("y")
    assert parts.about("a.1") is not parts.about("b.1")  # of the same block, but another of its scopes
