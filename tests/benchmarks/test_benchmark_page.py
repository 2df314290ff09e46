"""The page of benchmarks: written from the runs that are kept, and from nothing else."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from benchmarks.page import PAGE, Run, kept, page, run


def test_the_page_is_written_from_the_runs() -> None:
    runs = kept()
    assert runs, "no run is kept"
    assert [one.command for one in runs] == sorted(one.command for one in runs)
    assert [one.module for one in runs if find_spec(one.module) is None] == []
    assert PAGE.read_text(encoding="utf-8") == page(runs), "python -m benchmarks.page writes it"


def test_a_section_has_the_command_and_its_output() -> None:
    shown = Run("sizes --layers 8", "  5.0 ms\n", "2026-01-01", 7, "2 cores", "torch 2.13").section()
    assert shown.startswith("## Sizes\n\nMeasure a call")
    assert "```text\n$ python -m benchmarks.sizes --layers 8\n  5.0 ms\n```" in shown


def test_a_run_that_fails_says_why() -> None:
    with pytest.raises(
        SystemExit, match=r"benchmarks.sizes --nothing failed:\n(.|\n)*unrecognized arguments: --nothing"
    ):
        run("sizes --nothing", 100)
