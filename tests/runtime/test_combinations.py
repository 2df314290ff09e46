"""Combinations of features that are tested one by one elsewhere, beside one process.

`python -m benchmarks.combinations --cases 200` runs more of them, `--case N` one again, and `--plans` plans them alone.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from autopar.lowering.modules import bucket_ends
from tests.runtime.combinations import combination
from tests.runtime.combined_plans import plan_cases
from tests.runtime.combined_steps import CaseOutcome, run_cases
from tests.runtime.launcher import launch

# By the number of ranks; each of these runs, and a few seconds suffice.
FAST = {
    2: (9056, 9060, 9113, 9125, 9136, 9145, 9151),
    4: (9010, 9027, 9046),
}
# Planned, and not run.
PLANNED = (1293, 20011, 90033, 90326, 90571)
FAULTY = 9053
PER_LAUNCH = 12
MANY = range(20_000, 20_030)


def failed(found: list[list[CaseOutcome]]) -> str:
    return "\n".join(str(one) for rank in found for one in rank if one.kind == "wrong")


@pytest.mark.parametrize("ranks", FAST)
def test_some_combinations(ranks: int) -> None:
    found = launch(run_cases, FAST[ranks], ranks=ranks)
    assert not failed(found), failed(found)
    assert all(one.kind == "right" for rank in found for one in rank), [str(one) for one in found[0]]


def test_some_plans() -> None:
    found = list(plan_cases(PLANNED))
    assert all(one.kind == "right" for one in found), [str(one) for one in found]


@pytest.mark.slow
def test_many_plans() -> None:
    found = list(plan_cases(MANY))
    assert not [str(one) for one in found if one.kind not in ("right", "refused")]
    assert sum(one.kind == "right" for one in found) > len(found) / 2


def launches() -> list[tuple[int, ...]]:
    """The many cases, in groups of one number of ranks."""
    by_ranks: dict[int, list[int]] = {}
    for case in MANY:
        by_ranks.setdefault(combination(case).ranks, []).append(case)
    return [
        tuple(cases[begin : begin + PER_LAUNCH])
        for cases in by_ranks.values()
        for begin in range(0, len(cases), PER_LAUNCH)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("cases", launches(), ids=lambda cases: f"{cases[0]}-{cases[-1]}")
def test_many_combinations(cases: tuple[int, ...]) -> None:
    found = launch(run_cases, cases, ranks=combination(cases[0]).ranks)
    assert not failed(found), failed(found)
    assert any(one.kind == "right" for one in found[0]), [str(one) for one in found[0]]


def faulty(cases: tuple[int, ...]) -> list[str]:
    """How cases end whose deferred gradients are a tenth too large."""
    original = bucket_ends.with_unsent

    def larger(*arguments: Any) -> tuple[Tensor | None, ...]:
        return tuple(x if x is None else 1.1 * x for x in original(*arguments))

    with mock.patch.object(bucket_ends, "with_unsent", larger):
        return [one.kind for one in run_cases(cases)]


def test_a_fault_is_found() -> None:
    assert launch(faulty, (FAULTY,), ranks=2) == [["wrong"]] * 2


def test_a_number_draws_one_case() -> None:
    assert combination(4711) == combination(4711)
    drawn = [combination(case) for case in range(300)]
    assert {one.ranks for one in drawn} == {2, 3, 4}
    words = ("micro", "pipeline", "regather", "recompute", "fold", "pieces", "capacity", "pad", "fsdp", "?")
    for word in words:
        assert sum(word in (one.layout or "?") for one in drawn) >= 3, word
    assert len({one.precision for one in drawn}) > 8
    assert {one.compiled for one in drawn} == {"", "layers", "module"}
    assert {one.reloaded for one in drawn} == {"", "full", "shards", "torch"}
