"""Which rule wins."""

from __future__ import annotations

from itertools import combinations

import pytest

from autopar.sharding.layout.language import parse_layout
from autopar.sharding.layout.matching import Exactness, Precedence, Specificity, glob_matches, matches, specificity
from autopar.sharding.layout.syntax import Block, DimRule, Pin, Scope

# From the weakest to the strongest.
PLACES = ["{}", "act {{ {} }}", "act[seq] {{ {} }}", "act@blocks.* {{ {} }}", "@blocks.0/add[{}]"]
PATTERNS = ["*", "se*", "seq"]


def specificity_of(text: str) -> Specificity:
    (statement,) = parse_layout(text).statements
    if isinstance(statement, DimRule):
        return specificity(None, statement.dims[0])
    if isinstance(statement, Pin):
        return specificity(statement, statement.rules[0].dims[0])
    assert isinstance(statement, Block)
    return specificity(statement.scopes[0], statement.rules[0].dims[0])


def test_the_order_of_all_places_and_patterns() -> None:
    texts = [place.format(f"{pattern} -> tp") for place in PLACES for pattern in PATTERNS]
    for weaker, stronger in combinations(texts, 2):
        assert specificity_of(weaker) < specificity_of(stronger), f"{stronger} should win over {weaker}"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("seq -> tp", "batch -> dp"),
        ("s* -> tp", "se* -> dp"),
        ("act { seq -> tp }", "param { seq -> tp }"),
        ("act[seq] { seq -> tp }", "act[seq, d_ff] { seq -> tp }"),
        ("@blocks.* { seq -> tp }", "act[seq]@blocks.0 { seq -> tp }"),
        ("@blocks.*[seq -> tp]", "@blocks.0/add[seq -> tp]"),
    ],
)
def test_equally_specific(one: str, other: str) -> None:
    assert specificity_of(one) == specificity_of(other)


def test_values() -> None:
    assert specificity(None, "*") == (Precedence.BARE, Exactness.ANY)
    assert specificity(Scope("act", ("seq",)), "seq.1") == (Precedence.DIMS, Exactness.NAME)


@pytest.mark.parametrize(
    ("pattern", "dim", "is_about"),
    [
        ("seq", "seq", True),
        ("seq", "seq.1", False),
        ("seq", "seq_kv", False),
        ("seq.1", "seq.1", True),
        ("seq.1", "seq", False),
        ("seq*", "seq", True),
        ("seq*", "seq.1", True),
        ("seq*", "seq_kv", True),
        ("seq*", "kv_seq", False),
        ("*", "seq.1", True),
    ],
)
def test_matches(pattern: str, dim: str, is_about: bool) -> None:
    assert matches(pattern, dim) is is_about


@pytest.mark.parametrize(
    ("glob", "name", "is_about"),
    [
        ("blocks.0.weight", "blocks.0.weight", True),
        ("blocks.0.weight", "blocks.0.weights", False),
        ("blocks.*.weight", "blocks.0.mlp.weight", True),
        ("blocks.?.weight", "blocks.0.weight", True),
        ("blocks.?.weight", "blocks.10.weight", False),
        ("*/linear.1", "blocks.0/linear.1", True),
        ("Blocks.*", "blocks.0", False),
    ],
)
def test_glob_matches(glob: str, name: str, is_about: bool) -> None:
    assert glob_matches(glob, name) is is_about
