"""Training scripts of public projects: few changed lines, and the losses of one process."""

from __future__ import annotations

import pytest

from tests.scripts.scripts import Script, all_scripts, changed_lines, compared, edited

SCRIPTS = all_scripts()


def checked_out(script: Script) -> str:
    """Return the text of a script; skip the test where its project is not there."""
    path = script.checkout / script.path
    if not path.exists():
        pytest.skip(f"{script.repository} is not there; python -m tests.scripts.scripts --fetch")
    return path.read_text(encoding="utf-8")


def test_an_edit_has_one_place() -> None:
    assert edited("a = 1\nb = 2\n", [("a = 1", "a = 3")]) == "a = 3\nb = 2\n"
    for text in ("a = 1\na = 1\n", "b = 2\n"):
        with pytest.raises(ValueError, match="times, not once"):
            edited(text, [("a = 1", "a = 3")])


def test_changed_lines_are_counted() -> None:
    assert changed_lines("a\nb\nc\n", "a\nb\nc\n") == 0
    assert changed_lines("a\nb\nc\n", "a\nx\ny\nc\n") == 2
    assert changed_lines("a\nb\nc\n", "c\n") == 2


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_changes_in_five_lines(name: str) -> None:
    script = SCRIPTS[name]
    small = edited(checked_out(script), script.small)
    assert 2 <= changed_lines(small, edited(small, script.parallel)) <= 5


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_has_the_losses_of_one_process(name: str) -> None:
    script = SCRIPTS[name]
    checked_out(script)
    found = compared(script)
    assert found.verdict(script) in ("equal", "refused"), (found.difference, found.error)
