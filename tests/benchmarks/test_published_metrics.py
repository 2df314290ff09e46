"""The measures of agreement, against values worked out by hand."""

from __future__ import annotations

import pytest

from benchmarks.published.metrics import Pair, kendall_tau, mean_of, median_error, precision_recall, regret


def pairs(predicted: list[float], measured: list[float]) -> list[Pair]:
    return [Pair(one, other) for one, other in zip(predicted, measured, strict=True)]


def test_tau_of_the_same_and_of_the_reverse_order() -> None:
    assert kendall_tau(pairs([1, 2, 3, 4], [10, 20, 30, 40])) == 1
    assert kendall_tau(pairs([4, 3, 2, 1], [10, 20, 30, 40])) == -1


def test_tau_of_one_swap() -> None:
    """Six pairs, of which one is in the other order: (5 - 1) / 6."""
    assert kendall_tau(pairs([1, 3, 2, 4], [10, 20, 30, 40])) == pytest.approx(4 / 6)


def test_tau_with_ties() -> None:
    """Of three pairs one is tied among the predictions, two agree: 2 / sqrt(2 * 3)."""
    assert kendall_tau(pairs([1, 1, 2], [10, 20, 30])) == pytest.approx(2 / 6**0.5)


def test_tau_of_nothing_to_compare() -> None:
    assert kendall_tau(pairs([1], [1])) is None
    assert kendall_tau(pairs([1, 1], [1, 2])) is None


def test_regret_is_what_the_favourite_costs() -> None:
    assert regret(pairs([5, 1, 2], [10, 12, 30])) == pytest.approx(0.2)
    assert regret(pairs([1, 5, 2], [10, 12, 30])) == 0


def test_of_equal_favourites_the_worst_counts() -> None:
    assert regret(pairs([1, 1, 2], [10, 15, 30])) == pytest.approx(0.5)


def test_median_error_is_relative_to_what_was_measured() -> None:
    assert median_error(pairs([9, 20, 6], [10, 10, 5])) == pytest.approx(0.2)
    assert median_error([]) is None


def test_precision_and_recall() -> None:
    outcomes = [(True, True), (True, True), (True, False), (False, True), (False, False), (False, True)]
    hits = precision_recall(outcomes)
    assert hits.precision == pytest.approx(2 / 3)
    assert hits.recall == pytest.approx(2 / 4)
    assert (hits.predicted, hits.real) == (3, 4)
    assert precision_recall([(False, True)]).precision is None


def test_means_leave_out_what_is_undefined() -> None:
    assert mean_of([1.0, None, 3.0]) == 2.0
    assert mean_of([None]) is None
