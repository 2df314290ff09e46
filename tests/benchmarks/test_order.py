"""Predicted and measured steps of `benchmarks.order`: all pairs of a size and a strategy are judged at once."""

from __future__ import annotations

import pytest

from benchmarks.order import judge

SMALL = {"predicted": {"dp": 1.0, "tp": 2.0}, "measured": {"dp": 1.25, "tp": 2.0}}
WIDE = {"predicted": {"dp": 4.0, "tp": 3.0}, "measured": {"dp": 5.0, "tp": 6.0}}


def test_all_pairs_count_alike() -> None:
    found = judge([SMALL, WIDE])
    assert found["pairs"] == 4
    # Errors of 20 %, 0 %, 20 % and 50 %.
    assert found["error"] == pytest.approx(0.2)
    # Five of the six pairs are in order: those of `wide` are not.
    assert found["tau"] == pytest.approx(4 / 6)


def test_a_perfect_prediction() -> None:
    same = {"predicted": SMALL["measured"], "measured": SMALL["measured"]}
    assert judge([same]) == {"pairs": 2, "error": 0.0, "tau": 1.0}
