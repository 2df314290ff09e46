"""The printed graphs of the examples stay as they are, or change with a reason."""

from __future__ import annotations

import pytest

import autopar
from tests.golden.cases import CASES, FOLDER


@pytest.mark.parametrize("name", CASES)
def test_the_named_graph_reads_as_before(name: str) -> None:
    expected = (FOLDER / f"{name}.txt").read_text()
    found = f"{autopar.trace(*CASES[name]())}\n"
    assert found == expected, "if this is meant: python -m tests.golden.update, and read the difference"
