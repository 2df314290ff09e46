"""docs/language.md shows all of the language, and only what is so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from autopar.errors import LayoutError
from autopar.names import RESERVED
from autopar.sharding.layout.language import parse_layout
from autopar.sharding.layout.syntax import COLLECTIVES, KINDS, Block, DimRule, GatherStatement, Pin, Scope, Statement
from autopar.sharding.layout.tokens import UNITS

PAGE = (Path(__file__).parents[3] / "docs" / "language.md").read_text(encoding="utf-8")
LAYOUTS = re.findall(r"^```layout\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
STATEMENTS = [statement for text in LAYOUTS for statement in parse_layout(text)]


def test_every_statement_is_shown() -> None:
    assert {type(statement) for statement in STATEMENTS} == set(get_args(Statement))


def test_every_form_of_a_rule_is_shown() -> None:
    blocks = [statement for statement in STATEMENTS if isinstance(statement, Block)]
    rules = [statement for statement in STATEMENTS if isinstance(statement, DimRule)]
    terms = {
        re.sub(r"\w+", "x", text)
        for text in re.findall(r"-> (.*?)(?:#|\n)", "".join(LAYOUTS))
        for text in [text.strip()]
    }
    assert {scope.kind for block in blocks for scope in block.scopes} == {*KINDS, None}
    assert any(len(rule.dims) > 1 for rule in rules)
    assert {"x*x", "?", "?{x, x*x}", "x?", "x x", "x | x", "x | x !x"} <= terms
    assert {state.state for s in STATEMENTS if isinstance(s, Pin) for state in s.states} == {"partial", "broadcast"}
    assert {s.action for s in STATEMENTS if isinstance(s, GatherStatement)} == {"keep", "regather", "recompute"}
    assert any(scope == Scope("act", ("d_model",)) for block in blocks for scope in block.scopes)


def test_all_names_are_listed() -> None:
    assert all(f"`{kind}`" in PAGE for kind in KINDS)
    assert all(f"`{collective}`" in PAGE for collective in COLLECTIVES)
    assert set(re.findall(r"# per device; (.*)", PAGE)[0].split(", ")) == set(UNITS)


def test_the_quoted_words_of_the_grammar_are_the_reserved_ones() -> None:
    grammar = PAGE[PAGE.index("## Grammar") : PAGE.index("## Errors")]
    assert set(re.findall(r'"([a-z]+)"', grammar)) == RESERVED


def test_the_error_is_the_one_shown() -> None:
    shown = re.search(r"^```text\n(E1: .*?)\n```", PAGE, re.MULTILINE | re.DOTALL)
    assert shown is not None
    with pytest.raises(LayoutError) as error:
        parse_layout("\n\nparm { * -> fsdp }", "my.lay")
    assert str(error.value) == shown[1]
