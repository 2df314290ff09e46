"""What holds for every test."""

import gc
import os
import tempfile
import time
from itertools import count
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

CACHE = pytest.StashKey[tempfile.TemporaryDirectory[str]]()
"""The home of what is kept between runs, for this process of the tests."""
COUNT = count()
END = pytest.StashKey[float]()
"""When to leave out the tests that are left."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--minutes", type=float, help="skip the tests that have not begun after so many minutes")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.monotonic() > item.config.stash[END]:
        pytest.skip(f"not begun within {item.config.getoption('--minutes'):g} minutes")


def pytest_configure(config: pytest.Config) -> None:
    minutes = config.getoption("--minutes")
    config.stash[END] = inf if minutes is None else time.monotonic() + 60 * minutes
    # The tests run in several processes; threads on top of them only get in each other's way.
    torch.set_num_threads(1)
    # Timings are benchmarks, not tests. The same examples are drawn each time: what is red once is red again. Others
    # are drawn with --hypothesis-profile explore.
    settings.register_profile("autopar", deadline=None, derandomize=True)
    settings.register_profile("explore", deadline=None)
    settings.load_profile(config.getoption("--hypothesis-profile", default=None) or "autopar")
    # Plans that were found in an earlier run, by another process or by the user are no business of the tests. What the
    # tests start inherits it.
    config.stash[CACHE] = tempfile.TemporaryDirectory(prefix="autopar-tests-", ignore_cleanup_errors=True)
    os.environ["XDG_CACHE_HOME"] = config.stash[CACHE].name
    # Every stage verifies what it hands to the next, also in the processes that tests start.
    os.environ["AUTOPAR_VERIFY"] = "1"


def pytest_collection_finish() -> None:
    # Thousands of collected tests stay to the end; each full collection of garbage would walk through them.
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[CACHE].cleanup()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that one test has found is not found again by the next: each runs as if it were alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path(tmp_path_factory.getbasetemp(), f"cache{next(COUNT)}")))


@pytest.fixture
def capsys(capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> pytest.CaptureFixture[str]:
    """What a test reads of what was printed is shown all the same when it fails."""
    read = capsys.readouterr

    def remember() -> Any:
        found = read()
        for stream, text in zip(("stdout", "stderr"), found, strict=True):
            if text:
                request.node.add_report_section("call", f"{stream}, as read by the test", text[-4000:])
        return found

    capsys.readouterr = remember  # type: ignore[method-assign]
    return capsys


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How much the soundness test has proved; the counts come from the processes with the test reports."""
    proved = [
        value
        for report in terminalreporter.getreports("passed")
        for name, value in report.user_properties
        if name == "proved_cases"
    ]
    if proved:
        terminalreporter.write_sep("-", "rules proved by execution")
        terminalreporter.write_line(f"{sum(proved)} cases (rule, factor, shards) of {len(proved)} lines of the table")
