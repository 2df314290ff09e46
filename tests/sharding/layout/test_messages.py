"""What the layout language says to mistakes, word by word. messages.txt holds texts and what they are answered.

STATEMENTS stands for the words that begin a statement: a new statement changes no message here.
"""

from __future__ import annotations

from ast import literal_eval
from pathlib import Path

import pytest

from autopar.errors import LayoutError
from autopar.sharding.layout.language import Layout, parse_layout, parse_rules, parse_strategy_call
from autopar.sharding.layout.parser import STATEMENT
from autopar.sharding.layout.source import SourceSpan, layout_error, unknown_name

MESSAGES = [
    (literal_eval(text), message.rstrip("\n").replace("STATEMENTS", ", ".join(STATEMENT)))
    for text, _, message in (
        case.partition("\n") for case in Path(__file__).with_name("messages.txt").read_text("utf-8").split(">>> ")[1:]
    )
]
CALL = "fix: write it as in 'fsdp' or 'fsdp(fsdp=dp*tp)'"


@pytest.mark.parametrize(("text", "message"), MESSAGES)
def test_mistakes_in_layouts(text: str, message: str) -> None:
    with pytest.raises(LayoutError) as error:
        parse_layout(text, "my.lay")
    assert str(error.value) == message
    assert message.startswith(f"{error.value.code}: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "",
            "E0: expected the name of a strategy, found the end of the text\n"
            "  <strategy>:1 |\n"
            "               | ^\n" + CALL,
        ),
        (
            "fsdp(fsdp)",
            "E0: expected '=' and axes of the mesh after 'fsdp', found ')'\n"
            "  <strategy>:1 | fsdp(fsdp)\n"
            "               |          ^\n" + CALL,
        ),
        (
            "fsdp(fsdp=)",
            "E0: expected the name of an axis, found ')'\n"
            "  <strategy>:1 | fsdp(fsdp=)\n"
            "               |           ^\n" + CALL,
        ),
        (
            "fsdp(fsdp=dp",
            "E0: expected ')' or ',' after an argument, found the end of the text\n"
            "  <strategy>:1 | fsdp(fsdp=dp\n"
            "               |             ^\n" + CALL,
        ),
        (
            "fsdp(fsdp=dp) x",
            "E0: expected the end of the strategy's name, found 'x'\n"
            "  <strategy>:1 | fsdp(fsdp=dp) x\n"
            "               |               ^\n" + CALL,
        ),
        (
            "fsdp(fsdp=dp, fsdp=tp)",
            "E0: axis 'fsdp' is given twice\n"
            "  <strategy>:1 | fsdp(fsdp=dp, fsdp=tp)\n"
            "               |               ^\n"
            "fix: give it once",
        ),
    ],
)
def test_mistakes_in_strategy_calls(text: str, message: str) -> None:
    with pytest.raises(LayoutError) as error:
        parse_strategy_call(text)
    assert str(error.value) == message


def test_mistakes_in_rules() -> None:
    with pytest.raises(LayoutError) as error:
        parse_rules("batch -> dp seq -> tp")
    assert str(error.value) == (
        "E0: expected ',', ';', a new line, found 'seq'\n"
        "  <rules>:1 | batch -> dp seq -> tp\n"
        "            |             ^\n"
        "fix: write a rule as in 'batch -> dp' or '(heads, kv_heads) -> tp | none'"
    )
    for text in ("", "batch -> dp }"):
        with pytest.raises(LayoutError, match="E0: expected a rule, found"):
            parse_rules(text)


def test_files_that_are_no_layouts(tmp_path: Path) -> None:
    with pytest.raises(LayoutError) as error:
        Layout.load(tmp_path / "none.lay")
    assert str(error.value) == (
        f"E0: {tmp_path}/none.lay cannot be read: No such file or directory\nfix: give a layout file"
    )
    pickle = tmp_path / "pickle.lay"
    pickle.write_bytes(b"\x80\x04\x95\x0b\x00\x00\x00.")
    with pytest.raises(LayoutError) as error:
        Layout.load(pickle)
    assert str(error.value) == (
        f"E0: {pickle} is no text: 'utf-8' codec can't decode byte 0x80 in position 0: invalid start byte\n"
        "fix: give a layout file, in UTF-8"
    )


def test_errors_show_several_places() -> None:
    text = "heads -> tp\n" * 9 + "act { seq -> tp }"
    statements = parse_layout(text, "my.lay").statements
    first, last = statements[0].span, statements[-1].span
    assert first is not None
    assert last is not None
    error = layout_error(
        "E3", "'heads' and 'seq' want 'tp'", "give one of them '!1'", first.at("tp"), last.at("tp"), "x"
    )
    assert error.code == "E3"
    assert str(error) == (
        "E3: 'heads' and 'seq' want 'tp'\n"
        "   my.lay:1 | heads -> tp\n"
        "            |          ^\n"
        "  my.lay:10 | act { seq -> tp }\n"
        "            |              ^\n"
        "  x\n"
        "fix: give one of them '!1'"
    )


def test_unknown_names_without_a_place() -> None:
    assert str(unknown_name("dim", "hedas", ["heads", "batch"], None)) == (
        "E1: there is no dim 'hedas'; did you mean 'heads'?\nfix: the names are batch, heads"
    )
    assert str(unknown_name("factor", "x", [], SourceSpan("my.lay", 1, 0, "x"))) == (
        "E1: there is no factor 'x'\n  my.lay:1 | x\n           | ^\nfix: there is no factor at all here"
    )
