"""Stages of a searched plan: the bound on the step, and recomputation by stage."""

from __future__ import annotations

import random

import pytest

import autopar
from autopar.cost.order_times import PartCosts, run_orders
from autopar.cost.overlap import ChunkTraffic, StageTraffic
from autopar.mesh import SubMesh
from autopar.plans.find import PlanRequest, plan_graph
from autopar.sharding.assignment import Pipelining
from autopar.sharding.schedules import Schedule, orders
from autopar.solver.stages import least_shares
from examples.gpt import gpt


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 4), ("zero_bubble", 1)]
)
def test_no_step_is_below_the_bound(schedule: Schedule, chunks: int) -> None:
    """The bound holds for stages of any times, with what each does once, and equal stages come close to it."""
    draw = random.Random(0)
    for _ in range(60):
        stages, times = draw.choice([1, 2, 4, 8]), draw.choice([1, 2, 4])
        count = stages * times
        work = [draw.uniform(0.1, 1.0) for _ in range(stages)]
        halves = schedule == "zero_bubble"
        late = draw.uniform(0.0, 0.5) if halves else 0.0
        each = [PartCosts(one / 3 / chunks, one * 2 / 3 / chunks, late_seconds=late * one) for one in work]
        parts = each * chunks
        # Gathers and reductions of each part, and the communication that runs beside a forward or a backward.
        most, overlap = draw.choice([0.0, 0.5, 5.0]), draw.choice([0.0, 0.5, 1.0])
        sent = [(draw.uniform(0.0, most), draw.uniform(0.0, most)) for _ in parts]
        rooms = [(overlap * one.forward_seconds, overlap * one.backward_seconds) for one in parts]
        plan = orders(stages, count, schedule, chunks, halves=halves)
        chunks_of = [
            [ChunkTraffic(*sent[part], *rooms[part], overlap * parts[part].late_seconds) for part in mine]
            for mine in (range(stage, len(parts), stages) for stage in range(stages))
        ]
        traffic = [StageTraffic(mine, 0.0) for mine in chunks_of]
        finished = run_orders(parts, plan, [0.0] * stages, sends_wait=False, traffic=traffic).finished
        step = max(one.finished(end) for one, end in zip(traffic, finished, strict=True))
        one = Pipelining("pp", SubMesh({"pp": stages}), schedule, chunks, 0, {}, {})
        passes, ends, tail = least_shares(one, count)
        once = sum(max(0.0, sum(row[way] for row in sent) - tail * sum(row[way] for row in rooms)) for way in range(2))
        assert passes * sum(work) + ends * once <= step * (1 + 1e-9)
        assert passes >= (count / stages) * (1 - 1e-9)


def test_early_stages_recompute_more() -> None:
    """The first stage keeps more micro-batches than the last, so less of its memory is left for results."""
    model, inputs = gpt(layers=8, d_model=256, heads=8, seq=256, batch=64, device="meta")
    graph = autopar.trace(model, inputs)
    layout = "micro 8; pipeline pp 1f1b; batch -> none"
    request = PlanRequest("h100", cache=False, memory="100%")
    free = plan_graph(graph, (autopar.Mesh("pp=4"),), layout, request)
    # Enough for the last stage, too little for the first.
    limit = 0.75 * free.costs.stages[0].memory.peak_bytes
    found = plan_graph(graph, (autopar.Mesh("pp=4"),), layout, PlanRequest("h100", limit, cache=False))
    pipelining = found.decided.assignment.pipelining
    assert pipelining is not None
    again = [0] * 4
    for path, mode in found.decided.recompute.items():
        stage = next(part for op, part in pipelining.parts.items() if op.startswith(f"{path}."))
        again[stage] += 2 if mode == "full" else 1
    assert again[0] > again[3]
    assert max(stage.memory.peak_bytes for stage in found.costs.stages) <= limit
