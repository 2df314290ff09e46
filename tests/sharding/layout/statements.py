"""What holds for each statement that stands once in a layout."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.errors import LayoutError
from autopar.sharding.layout.language import parse_layout

__all__ = ["assert_mistake", "assert_statement"]


def assert_statement(text: str, field: str, statement: Any, printed: str) -> None:
    """Raise unless a text is one statement, a field of its layout, and printed so that it is read again."""
    layout = parse_layout(text)
    assert layout.statements == (statement,)
    assert getattr(layout, field) == statement
    assert str(layout) == f"{printed}\n"
    assert parse_layout(str(layout)) == layout


def assert_mistake(text: str, message: str) -> None:
    """Raise unless a text is refused with a message and a fix."""
    with pytest.raises(LayoutError) as error:
        parse_layout(text)
    assert message in str(error.value)
    assert "\nfix: " in str(error.value)
