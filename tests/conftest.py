"""What holds for every test."""

import pytest
import torch
from hypothesis import settings


def pytest_configure() -> None:
    # The tests run in several processes; threads on top of them only get in each other's way.
    torch.set_num_threads(1)
    # Timings are benchmarks, not tests.
    settings.register_profile("autopar", deadline=None)
    settings.load_profile("autopar")


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
