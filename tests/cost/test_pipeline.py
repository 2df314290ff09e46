"""Pipelines against the closed forms of the papers that introduced their schedules."""

from __future__ import annotations

import pytest

from autopar.cost.order_times import PartCosts, run_on_shared_cores, run_orders
from autopar.cost.pipeline import StageCosts, pipeline
from autopar.sharding.schedules import Schedule, TaskKind, orders

SIZES = [(1, 1), (1, 5), (2, 1), (2, 8), (4, 4), (4, 3), (8, 32)]


def equal_stages(count: int, **more: float) -> list[StageCosts]:
    return [StageCosts(forward_seconds=1.0, backward_seconds=2.0, **more)] * count


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_bubble_of_equal_stages(stages: int, micro_batches: int, schedule: str) -> None:
    """(p - 1) / m of the busy time, for both: they differ in memory."""
    costs = pipeline(equal_stages(stages), micro_batches, schedule)
    assert costs.bubble == pytest.approx((stages - 1) / micro_batches)
    assert costs.seconds == pytest.approx(3.0 * (micro_batches + stages - 1))
    assert costs.busy_seconds == pytest.approx((3.0 * micro_batches,) * stages)


@pytest.mark.parametrize(("stages", "micro_batches", "chunks"), [(2, 4, 2), (4, 8, 2), (4, 16, 3), (8, 8, 4)])
def test_bubble_of_interleaved_stages(stages: int, micro_batches: int, chunks: int) -> None:
    """(p - 1) / (m v): the chunks of Narayanan et al., 2021."""
    costs = pipeline(equal_stages(stages), micro_batches, "interleaved", chunks)
    assert costs.bubble == pytest.approx((stages - 1) / (micro_batches * chunks))


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 5), (2, 2), (2, 8), (4, 4), (4, 16), (8, 32)])
@pytest.mark.parametrize(("forward", "inputs", "weights"), [(1.0, 1.0, 1.0), (2.0, 3.0, 2.0), (5.0, 4.0, 3.0)])
def test_bubble_of_zero_bubble(stages: int, micro_batches: int, forward: float, inputs: float, weights: float) -> None:
    """(p - 1) (F + I - W): ZB-H1 of Qi et al., 2023."""
    costs = pipeline(
        [StageCosts(forward, inputs + weights, late_seconds=weights)] * stages, micro_batches, "zero_bubble"
    )
    busy = micro_batches * (forward + inputs + weights)
    assert costs.busy_seconds == pytest.approx((busy,) * stages)
    assert costs.seconds == pytest.approx(busy + (stages - 1) * (forward + inputs - weights))


def test_zero_bubble_keeps_the_operands_of_put_off_gradients() -> None:
    """Stage s has p - s micro-batches in flight and puts off those of s others; a backward frees what it saved."""
    stages = equal_stages(4, resident_bytes=100.0, activation_bytes=10.0, late_bytes=1.0, late_seconds=1.0)
    costs = pipeline(stages, 8, "zero_bubble")
    assert costs.in_flight == (4.0, 3.0, 2.0, 1.0)
    assert costs.memory_bytes == (140.0, 131.0, 122.0, 113.0)
    assert pipeline(stages, 8).memory_bytes == (140.0, 130.0, 120.0, 110.0)
    # Larger than the activations, as under recomputation, they count right after a backward.
    large = pipeline(equal_stages(4, activation_bytes=1.0, late_bytes=10.0), 8, "zero_bubble")
    assert large.memory_bytes == (13.0, 22.0, 31.0, 40.0)


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_in_flight_micro_batches(stages: int, micro_batches: int) -> None:
    gpipe = pipeline(equal_stages(stages), micro_batches, "gpipe")
    assert gpipe.in_flight == (micro_batches,) * stages
    alternating = pipeline(equal_stages(stages), micro_batches, "1f1b")
    assert alternating.in_flight == tuple(min(micro_batches, stages - stage) for stage in range(stages))


@pytest.mark.parametrize(("stages", "micro_batches", "chunks"), [(2, 4, 2), (4, 8, 2), (8, 16, 3)])
def test_in_flight_of_interleaved_stages(stages: int, micro_batches: int, chunks: int) -> None:
    """The first stage holds p (1 + (p - 1) / (p v)) micro-batches: Korthikanti et al., 2022."""
    costs = pipeline(equal_stages(stages), micro_batches, "interleaved", chunks)
    assert costs.in_flight[0] == pytest.approx(stages * (1 + (stages - 1) / (stages * chunks)))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_every_task_runs_once(schedule: str) -> None:
    for order in orders(3, 5, schedule):
        assert len(order) == len(set(order)) == 10
        for micro_batch in range(5):
            ways = [task.kind for task in order if task.micro_batch == micro_batch]
            assert ways == [TaskKind.FORWARD, TaskKind.BACKWARD]


def test_one_chunk_interleaved_is_1f1b() -> None:
    assert pipeline(equal_stages(4), 8, "interleaved") == pipeline(equal_stages(4), 8, "1f1b")


def test_the_slowest_stage_sets_the_pace() -> None:
    """Through a slow last stage micro-batches go one by one; the first of them must get there, the last come back."""
    stages = [*equal_stages(3), StageCosts(forward_seconds=3.0, backward_seconds=5.0)]
    costs = pipeline(stages, 16)
    assert costs.seconds == pytest.approx(16 * 8.0 + 3 * (1.0 + 2.0))
    assert costs.finished_seconds[3] < costs.finished_seconds[0]


def test_sends_take_their_time() -> None:
    """Two stages, one micro-batch: forward, send, forward, backward, send, backward."""
    costs = pipeline(equal_stages(2, send_seconds=0.25), 1)
    assert costs.seconds == pytest.approx(1.0 + 0.25 + 1.0 + 2.0 + 0.25 + 2.0)
    assert pipeline(equal_stages(1, send_seconds=0.25), 4).seconds == pytest.approx(12.0)


def test_memory_is_what_is_held_and_what_is_in_flight() -> None:
    stages = equal_stages(4, resident_bytes=100.0, activation_bytes=10.0)
    assert pipeline(stages, 8).memory_bytes == (140.0, 130.0, 120.0, 110.0)
    assert pipeline(stages, 8, "gpipe").memory_bytes == (180.0,) * 4


def test_interleaving_needs_micro_batches_that_divide() -> None:
    with pytest.raises(AssertionError, match="do not interleave"):
        orders(4, 6, "interleaved", 2)
    with pytest.raises(AssertionError, match="one chunk"):
        orders(4, 8, "1f1b", 2)


PARTS = ((1.0, 2.0), (1.5, 2.5), (0.5, 3.0))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_a_core_for_each_stage_is_shared_by_none(schedule: Schedule) -> None:
    """The simulation of shared cores gives the times of the other one where each stage has a core."""
    parts = [PartCosts(forward, backward, 0.25, 0.5 * backward) for forward, backward in PARTS]
    plan = orders(3, 6, schedule, halves=True)
    expected = run_orders(parts, plan, [0.0, 0.5, 0.0], sends_wait=False)
    found = run_on_shared_cores(parts, plan, [0.0, 0.5, 0.0], core_fraction=1.0)
    assert found.finished == pytest.approx(expected.finished)
    assert found.busy == pytest.approx(expected.busy)
    assert len(found.tasks) == len(expected.tasks)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_stages_on_one_core_take_the_time_of_their_work(schedule: Schedule) -> None:
    """One of them computes at any time, at the speed of all: there is no bubble, whatever the schedule."""
    parts = [PartCosts(forward, backward) for forward, backward in PARTS]
    found = run_orders(parts, orders(3, 6, schedule), [0.0] * 3, sends_wait=False, core_fraction=1 / 3)
    assert max(found.finished) == pytest.approx(6 * sum(map(sum, PARTS)) / 3)


@pytest.mark.parametrize("micro_batches", [1, 4, 16])
def test_two_cores_for_four_stages(micro_batches: int) -> None:
    """One micro-batch passes through stages that are alone, each at twice its speed; many keep two cores busy."""
    parts = [PartCosts(1.0, 2.0)] * 4
    found = run_orders(parts, orders(4, micro_batches, "1f1b"), [0.0] * 4, sends_wait=False, core_fraction=0.5)
    work = 3.0 * micro_batches
    assert work - 1e-9 <= max(found.finished) <= work + 3.0 * 3 / 2
    if micro_batches == 1:
        assert max(found.finished) == pytest.approx(4 * 3.0 / 2)
