"""Times of the tasks of all stages of a pipeline, each in the order of its stage."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.cost.overlap import StageTraffic
from autopar.sharding.schedules import StageOrders, StageTask, Turn, Work


@dataclass(frozen=True)
class PartCosts:
    """Time of one part of the model for one micro-batch."""

    forward_seconds: float
    backward_seconds: float
    # Sending activations to the next part, or their gradient to the one before.
    send_seconds: float = 0.0
    # Of the backward, the gradients of weights that `zero_bubble` puts off.
    late_seconds: float = 0.0

    def seconds(self, work: Work) -> float:
        """Return the time of a task."""
        return (
            self.forward_seconds,
            self.backward_seconds,
            self.backward_seconds - self.late_seconds,
            self.late_seconds,
        )[work]


class TaskTime(NamedTuple):
    """Forward or backward of one part for one micro-batch, with its begin and end."""

    stage: int
    task: StageTask
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class OrderTimes:
    """Times of the tasks of all stages."""

    # By stage: the end of its last task, and the time that it works.
    finished: tuple[float, ...]
    busy: tuple[float, ...]
    turns: tuple[Turn, ...]
    # By turn.
    starts: Sequence[float]
    ends: Sequence[float]

    @property
    def tasks(self) -> list[TaskTime]:
        rows = zip(self.turns, self.starts, self.ends, strict=True)
        return [TaskTime(turn.stage, turn.task, start, end) for turn, start, end in rows]


def run_orders(
    parts: Sequence[PartCosts],
    plan: StageOrders,
    begins: Sequence[float],
    sends_wait: bool,
    core_fraction: float = 1.0,
    traffic: Sequence[StageTraffic] = (),
    own: Sequence[Mapping[StageTask, float]] = (),
) -> OrderTimes:
    """Return the times of all tasks; each stage runs until an input is missing.

    A stage begins at its second of `begins`. With `sends_wait` it does not compute while it sends. Where stages share
    cores, the seconds of the parts are those while all stages compute; fewer of them compute faster. `traffic` of each
    stage makes its tasks longer, where stages have cores of their own. `own` has the seconds of each task of each
    stage, where they differ between micro-batches.
    """
    if core_fraction < 1.0:
        return run_on_shared_cores(parts, plan, begins, core_fraction)
    clock, busy = list(begins), [0.0] * len(plan)
    seconds = [[part.seconds(work) for part in parts] for work in Work]
    sends = [part.send_seconds for part in parts]
    is_sent = {turn.source for turn in plan.turns if turn.sender >= 0} if sends_wait else frozenset[int]()
    starts, ends = [0.0] * len(plan.turns), [0.0] * len(plan.turns)
    for place, (stage, task, part, work, source, sender, reduced) in enumerate(plan.turns):
        start = clock[stage]
        if source >= 0:
            ready = ends[source] if sends_wait or sender < 0 else ends[source] + sends[sender]
            if ready > start:
                start = ready
        took = own[stage][task] if own else seconds[work][part]
        if place in is_sent:
            took += sends[part]
        end = start + took
        busy[stage] += took
        if traffic and (reduced >= 0 or traffic[stage].queue):
            end += traffic[stage].added(task, clock[stage], start, took, reduced)
        starts[place] = start
        ends[place] = clock[stage] = end
    return OrderTimes(tuple(clock), tuple(busy), plan.turns, starts, ends)


def run_on_shared_cores(
    parts: Sequence[PartCosts], plan: StageOrders, begins: Sequence[float], core_fraction: float
) -> OrderTimes:
    """Return the times of all tasks of stages that share cores, with sends beside the compute.

    The stages that compute divide the cores among them, and no stage has more than one core for each of its devices.
    """
    stages, turns = len(plan), plan.turns
    # By stage: the places of its turns that are left, in order.
    left_of: list[list[int]] = [[] for _ in range(stages)]
    for place in reversed(range(len(turns))):
        left_of[turns[place].stage].append(place)
    clock, busy = list(begins), [0.0] * stages
    starts, ends = [math.nan] * len(turns), [math.nan] * len(turns)
    # By stage that computes: begin of its task, and the seconds that are left of it while all compute.
    running: dict[int, tuple[float, float]] = {}
    now = 0.0
    while True:
        begin = math.inf
        for stage in (stage for stage in range(stages) if stage not in running and left_of[stage]):
            turn = turns[left_of[stage][-1]]
            ready = 0.0 if turn.source < 0 else ends[turn.source]
            ready += parts[turn.sender].send_seconds if turn.sender >= 0 else 0.0
            start = math.inf if math.isnan(ready) else max(clock[stage], ready)
            if start <= now:
                running[stage] = now, parts[turn.part].seconds(turn.work)
            else:
                begin = min(begin, start)
        if not running and math.isinf(begin):
            break
        speed = min(1.0 / core_fraction, stages / max(1, len(running)))
        end = min((now + left / speed for _, left in running.values()), default=math.inf)
        then = min(begin, end)
        for stage, (start, left) in [*running.items()]:
            rest = left - speed * (then - now)
            if now + left / speed > then:
                running[stage] = start, rest
                continue
            del running[stage]
            place = left_of[stage].pop()
            starts[place], ends[place] = start, then
            busy[stage] += then - start
            clock[stage] = then
        now = then
    return OrderTimes(tuple(clock), tuple(busy), turns, starts, ends)
