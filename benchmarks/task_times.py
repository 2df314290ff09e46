"""Times of the forwards and backwards of a pipeline as its stages run them, and the schedule simulated with them.

A task lasts until the stage begins the next thing, without its waits for messages: handing messages to the process
group is a part of it. A message lasts from its send to the end of the wait for it, where a stage waited when it was
sent; clocks of processes of one machine agree.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.cost.order_times import PartCosts, run_orders
from autopar.lowering.collectives.stage_messages import MessageExchange
from autopar.lowering.modules import pipeline_loop
from autopar.sharding.schedules import BackwardHalf, StageMessage, StageTask, TaskKind, orders

__all__ = ["Idle", "StepTrace", "TaskTimes", "bubble", "halves"]


class Timed(NamedTuple):
    """Task: its begin and end, the time without waiting for messages, and the processor's time without any."""

    task: StageTask
    begin: float
    end: float
    busy: float
    processor: float


@dataclass
class StepTrace:
    """What one stage did in one step."""

    tasks: list[Timed] = field(default_factory=list)
    # When a message was sent; when the wait for a message began and ended.
    sent: dict[StageMessage, float] = field(default_factory=dict)
    waits: dict[StageMessage, tuple[float, float]] = field(default_factory=dict)


class TaskTimes:
    """Traces of our steps."""

    def __init__(self) -> None:
        self.steps: list[StepTrace] = []

    def run(self, step: Callable[[], None]) -> None:
        trace, waited = StepTrace(), 0.0
        run, receive, exchange = pipeline_loop._Run._run, MessageExchange.received, MessageExchange.exchange

        def timed(one: Any, item: Any, *others: Any) -> None:
            before, begin, used = waited, time.perf_counter(), time.thread_time()
            if trace.tasks:
                last = trace.tasks[-1]
                trace.tasks[-1] = last._replace(end=begin, busy=last.busy + begin - last.end)
            run(one, item, *others)
            end, processor = time.perf_counter(), time.thread_time() - used
            if isinstance(item, StageTask):
                trace.tasks.append(Timed(item, begin, end, end - begin - (waited - before), processor))
            elif trace.tasks:
                last = trace.tasks[-1]
                trace.tasks[-1] = last._replace(end=end, busy=last.busy + end - begin)

        def received(one: Any, route: int, micro_batch: int, backward: bool) -> Tensor:
            nonlocal waited
            begin = time.perf_counter()
            found = receive(one, route, micro_batch, backward)
            end = time.perf_counter()
            waited += end - begin
            trace.waits[StageMessage(route, micro_batch, backward)] = begin, end
            return found

        def exchanged(one: Any, message: StageMessage) -> None:
            if one.messages.envelopes[message].is_sent:
                trace.sent[message] = time.perf_counter()
            exchange(one, message)

        with (
            mock.patch.object(pipeline_loop._Run, "_run", timed),
            mock.patch.object(MessageExchange, "received", received),
            mock.patch.object(MessageExchange, "exchange", exchanged),
        ):
            step()
        self.steps.append(trace)


def halves(pair: Sequence[Callable[[], None]], steps: int) -> float:
    """Return the processor's time of the backwards of one step to that of another one; steps of both take turns."""
    times = [TaskTimes(), TaskTimes()]
    for turn in range(steps):
        for which in ((0, 1), (1, 0))[turn % 2]:
            times[which].run(pair[which])
    backwards = TaskKind.BACKWARD
    found = torch.tensor(
        [
            [sum(one.processor for one in trace.tasks if one.task.kind is backwards) for trace in each.steps]
            for each in times
        ]
    )
    dist.all_reduce(found)
    halved, whole = found.median(1).values.tolist()
    return float(halved / whole)


class Idle(NamedTuple):
    """Idle time of the busiest stage to the length of a step, as measured and as simulated."""

    measured: float
    simulated: float

    def __str__(self) -> str:
        ratio = f"{self.measured / self.simulated:.3f}" if self.simulated >= LEAST_IDLE else "-"
        return f"{self.measured:6.1%} {self.simulated:6.1%} {ratio:>6}"


# Ratios of smaller shares say nothing: a stage that never waits is late by chance alone.
LEAST_IDLE = 0.01


def bubble(step: Callable[[], None], schedule: Any, micro_batches: int, ranks: int, steps: int) -> Idle:
    """Return the idle time of our steps, and that of the schedule simulated with the tasks of each and a message.

    The median of the faster half counts. Micro-batches differ: with the means of their times a stage would wait less.
    """
    times = TaskTimes()
    for _ in range(steps):
        dist.barrier()
        times.run(step)
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, times.steps)
    by_step = [*zip(*every, strict=True)]
    send = message_seconds(by_step)
    plan = orders(ranks, micro_batches, schedule, halves=True)
    found: list[tuple[float, Idle]] = []
    for stages in by_step:
        begins = [trace.tasks[0].begin for trace in stages]
        span = max(trace.tasks[-1].end for trace in stages) - min(begins)
        measured = 1 - max(sum(one.busy for one in trace.tasks) for trace in stages) / span
        parts = [replace(part_costs(trace.tasks, micro_batches), send_seconds=send) for trace in stages]
        own = [{one.task: one.busy for one in trace.tasks} for trace in stages]
        ran = run_orders(parts, plan, [0.0] * ranks, sends_wait=False, own=own)
        found.append((span, Idle(measured, 1 - max(ran.busy) / max(ran.finished))))
    faster = [idle for _, idle in sorted(found)[: (len(found) + 1) // 2]]
    return Idle(*(statistics.median(column) for column in zip(*faster, strict=True)))


def message_seconds(steps: Sequence[Sequence[StepTrace]]) -> float:
    """Return the median time of messages that a stage waited for when they were sent."""
    found = []
    for stages in steps:
        sent = {message: at for trace in stages for message, at in trace.sent.items()}
        for trace in stages:
            for message, (begin, end) in trace.waits.items():
                if message in sent and begin < sent[message]:
                    found.append(end - sent[message])
    return statistics.median(found) if found else 0.0


def part_costs(tasks: Sequence[Timed], micro_batches: int) -> PartCosts:
    """Return the mean times of the tasks of one stage."""

    def mean(*which: tuple[TaskKind, BackwardHalf | None]) -> float:
        return sum(one.busy for one in tasks if (one.task.kind, one.task.half) in which) / micro_batches

    weights = TaskKind.BACKWARD, BackwardHalf.WEIGHTS
    backward = mean((TaskKind.BACKWARD, None), (TaskKind.BACKWARD, BackwardHalf.INPUTS), weights)
    return PartCosts(mean((TaskKind.FORWARD, None)), backward, late_seconds=mean(weights))
