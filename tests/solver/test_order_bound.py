"""Bound of a schedule by paths of its tasks."""

from __future__ import annotations

import random

import pytest

from autopar.cost.order_times import PartCosts, run_orders
from autopar.sharding.schedules import Schedule, orders
from autopar.solver.order_bound import MOST_TURNS, order_bound

SCHEDULES: list[tuple[Schedule, int]] = [
    ("1f1b", 1),
    ("gpipe", 1),
    ("interleaved", 2),
    ("interleaved", 4),
    ("zero_bubble", 1),
]


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_no_step_is_below_the_bound(schedule: Schedule, chunks: int) -> None:
    """It holds for stages of any times, with any share of forwards, put-off gradients and messages."""
    draw = random.Random(1)
    for _ in range(40):
        stages = draw.choice([1, 2, 4, 8])
        count = stages * draw.choice([1, 2, 4])
        send = draw.choice([0.0, 0.01])
        plan = orders(stages, count, schedule, chunks, halves=True)
        found = order_bound(stages, count, schedule, chunks, 0, send)
        assert found is not None
        parts = []
        for _ in range(stages):
            work, share = draw.uniform(0.0, 1.0), draw.uniform(0.0, 1.0)
            late = min(0.5, 1.0 - share) * draw.random() * work if schedule == "zero_bubble" else 0.0
            parts.append(PartCosts(share * work / chunks, (1 - share) * work / chunks, send, late / chunks))
        step = max(run_orders(parts * chunks, plan, [0.0] * stages, sends_wait=False).finished)
        every = chunks * sum(part.forward_seconds + part.backward_seconds for part in parts)
        assert found.passes * every + found.sends * send <= step * (1 + 1e-9)


@pytest.mark.parametrize(("stages", "count"), [(1, 4), (2, 8), (4, 8), (8, 64)])
def test_equal_stages_are_the_best_of_1f1b(stages: int, count: int) -> None:
    """A step of equal stages takes the work of a stage once for each micro-batch, and waits for the other stages."""
    found = order_bound(stages, count, "1f1b", 1, 0)
    assert found is not None
    assert found.passes == pytest.approx((count + stages - 1) / stages)


def test_the_bound_is_close_to_equal_stages_where_chunks_interleave() -> None:
    plan, send = orders(8, 8, "interleaved", 4), 0.001
    parts = [PartCosts(1 / 3 / 32, 2 / 3 / 32, send)] * 32
    step = max(run_orders(parts, plan, [0.0] * 8, sends_wait=False).finished)
    found = order_bound(8, 8, "interleaved", 4, 0, send)
    assert found is not None
    assert 0.95 * step < found.passes + found.sends * send <= step


def test_very_many_tasks_have_no_bound() -> None:
    assert order_bound(2, MOST_TURNS // 4, "1f1b", 1, 0) is not None
    assert order_bound(2, MOST_TURNS // 4 + 1, "1f1b", 1, 0) is None
