"""Errors of published runs by kind, from one half of them, and the other half within them."""

from __future__ import annotations

import random
from dataclasses import replace
from math import exp
from pathlib import Path

import pytest

from autopar.cost.step_errors import errors_of, shipped_errors
from benchmarks.published.cpu_steps import cpu_errors, judge
from benchmarks.published.errors import covered, errors_by_kind, held_back, kind_of, run_errors
from benchmarks.published.price import price
from benchmarks.published.priced import Priced, half_of
from benchmarks.published.readers.rows import read_rows
from benchmarks.published.runs import Measured
from benchmarks.published.splits import splits
from benchmarks.published.tables import reader_of
from tests.benchmarks.test_published_runs import RUN as ON_A100

RUN = replace(ON_A100, cluster="h100")
CPU_TABLE = Path(__file__).parents[2] / "benchmarks" / "published" / "measured" / "e2e_cpu_order.csv"
TABLE = Path(__file__).parents[3] / "shared" / "data" / "published" / "e2e_vtrain_singlenode_a100.csv"


def measured(seconds: float, number: int = 0, **changes: object) -> Priced:
    """A run that was predicted to take a second."""
    run = replace(RUN, measured=Measured(seconds), group=f"model {number}", **changes)  # type: ignore[arg-type]
    return Priced(run, 1.0, None, True)


def normal(count: int, seed: int) -> list[Priced]:
    values = random.Random(seed)
    return [measured(exp(values.gauss(0.1, 0.2)), number) for number in range(count)]


def test_kinds_of_runs() -> None:
    assert kind_of(RUN).text == "H100, one node, no pipeline"
    assert kind_of(replace(RUN, dp=2, pp=8)).text == "H100, several nodes, a pipeline"


def test_ranges_are_the_quantiles_of_the_errors() -> None:
    """80 % of a normal distribution lies within 1.2816 deviations; of differences of two, within 1.2816 √2."""
    found = next(one for one in errors_by_kind(run_errors(normal(2000, 1))) if one.kind == kind_of(RUN))
    assert found.low == pytest.approx(exp(0.1 - 1.2816 * 0.2), rel=0.03)
    assert found.high == pytest.approx(exp(0.1 + 1.2816 * 0.2), rel=0.03)
    assert found.apart == pytest.approx(exp(1.2816 * 2**0.5 * 0.2), rel=0.03)


@pytest.mark.parametrize("count", [12, 30])
def test_few_runs_give_ranges_that_hold_as_many(count: int) -> None:
    shares = []
    for seed in range(60):
        known = errors_by_kind(run_errors(normal(count, seed)))
        shares.append(covered("", run_errors(normal(100, 1000 + seed)), known).inside or 0.0)
    assert sum(shares) / len(shares) == pytest.approx(0.8, abs=0.03)


def test_few_runs_have_no_range() -> None:
    assert errors_by_kind(run_errors(normal(9, 1))) == ()


def test_a_grid_of_devices_is_in_one_half() -> None:
    assert half_of(RUN) == half_of(replace(RUN, micro_batch=8, sharding="zero1"))
    halves = [half_of(replace(RUN, group=str(number))) for number in range(200)]
    assert 70 < halves.count("held") < 130


def test_wrong_ranges_are_seen() -> None:
    known = errors_by_kind(run_errors(normal(200, 1)))
    slow = [measured(3.0, number) for number in range(200)]
    assert {one.inside for one in held_back({"table": slow}, known)} == {0.0}


def test_order_beyond_the_noise() -> None:
    known = errors_by_kind(run_errors(normal(200, 1)))
    pair = [replace(measured(seconds), step_seconds=guess) for seconds, guess in ((1.0, 1.0), (1.8, 1.7))]
    assert covered("", run_errors(pair), known).in_order == 1.0
    swapped = [replace(one, step_seconds=2.7 - one.step_seconds) for one in pair]
    assert covered("", run_errors(swapped), known).in_order == 0.0
    equal = [replace(one, step_seconds=1.0) for one in pair]
    assert covered("", run_errors(equal), known).in_order is None


def test_runs_on_cpus_have_a_line_of_their_own() -> None:
    errors = cpu_errors([CPU_TABLE])
    (found,) = (one for one in errors_by_kind(errors) if one.kind.bits == "32")
    assert (found.kind.device, found.kind.stages, found.runs) == ("CPU", "any", 15)
    shipped = errors_of(replace(found.kind, stages="several"), shipped_errors())
    assert shipped is not None
    assert (shipped.low, shipped.high) == pytest.approx((found.low, found.high), abs=1e-3)
    # Each model by the two others.
    assert [one.runs for one in judge(errors)] == [5, 5, 5]


def test_rows_unlike_their_neighbours() -> None:
    """nanotron's 47, 1,237, 45 ms at micro-batches of 1, 2, 4."""
    times = {1: 0.047, 2: 1.237, 4: 0.045}
    rows = [measured(seconds, micro_batch=size, micro_batches=8 // size) for size, seconds in times.items()]
    rows = [replace(one, step_seconds=0.05) for one in rows]
    (split,) = (one for one in splits(rows) if any("neighbours" in side for side in one))
    assert [one.run.micro_batch for one in split["unlike its neighbours"]] == [2]
    smooth = [replace(one, step_seconds=2 * one.run.measured.step_seconds) for one in rows]  # type: ignore[operator]
    assert splits(smooth) == []


@pytest.mark.slow
@pytest.mark.skipif(not TABLE.is_file(), reason="the published tables are not here")
def test_ranges_hold_most_of_the_held_back_runs() -> None:
    reader = reader_of(TABLE)
    assert reader is not None
    priced = [price(run) for run in reader(read_rows(TABLE))]
    known = errors_by_kind(run_errors(one for one in priced if half_of(one.run) == "fit"))
    (whole, *_) = held_back({TABLE.stem: priced}, known)
    assert whole.runs > 200
    assert whole.inside is not None
    assert 0.7 <= whole.inside <= 0.9
