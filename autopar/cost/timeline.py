"""Timeline of a step for display: events of compute, communication of values, communication of parameters.

Ops run one after another and wait for the values that are sent to them. Parameters are gathered one bucket ahead of
their use. Their gradients are reduced in parallel with the rest of the backward, and the optimizer waits for all of
them. The price of a plan is that of `evaluate`, which has one formula for the same overlap.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.cost.equal_stages import equal_stages
from autopar.cost.evaluate import on_slowest, priced_parts
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.lowered_step import LoweredStep, lower_step
from autopar.cost.pipeline import parts_by_stage, step_times
from autopar.cost.profile import Profile, profile
from autopar.cost.tasks import Direction, Task
from autopar.files import write_text
from autopar.ir.graph import NamedGraph
from autopar.sharding.assignment import StepPlan
from autopar.sharding.schedules import BackwardHalf

STREAMS = ("compute", "communication of values", "communication of parameters")
COPIES = "copies to and from the host"


@dataclass(frozen=True)
class Event:
    """A task of one micro-batch, with its stream and its start."""

    task: Task
    stream: str
    start_seconds: float
    micro_batch: int

    @property
    def end_seconds(self) -> float:
        return self.start_seconds + self.task.seconds


@dataclass(frozen=True)
class Timeline:
    """All events of a step, in the order of their start within each stream."""

    events: tuple[Event, ...]
    # Of a pipeline, two for each stage.
    streams: tuple[str, ...] = STREAMS

    @property
    def seconds(self) -> float:
        return max((event.end_seconds for event in self.events), default=0.0)

    def to_json(self) -> dict[str, Any]:
        """Return the trace event format, which chrome://tracing and ui.perfetto.dev open."""
        named = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": i, "args": {"name": stream}}
            for i, stream in enumerate(self.streams)
        ]
        return {
            "traceEvents": [*named, *(_trace_event(event, self.streams) for event in self.events)],
            "displayTimeUnit": "ms",
        }

    def save(self, path: str | Path) -> None:
        write_text(path, json.dumps(self.to_json()))


def timeline(graph: NamedGraph, plan: StepPlan, cluster: Cluster) -> Timeline:
    """Return the timeline of one device in one step; of a pipeline, that of its stages.

    Parameters:
        graph: the graph that the plan was made for, `Plan.graph`.
        plan: the assignment of a step and its training options, `Plan.decided`.
        cluster: devices and links, from `load_cluster`.

    Returns:
        The events; `save(path)` writes them as a Chrome trace.

    `evaluate` prices the same step by a formula: its `step_seconds` differs from the end of the timeline.

    >>> import autopar, torch
    >>> model, inputs = torch.nn.Linear(64, 64, device="meta"), (torch.empty(32, 64, device="meta"),)
    >>> plan = autopar.plan(model, "dp=2", inputs, layout="ddp", cluster="h100", cache=False)
    >>> step = autopar.timeline(plan.graph, plan.decided, plan.cluster)
    >>> [event.task.kind for event in step.events if event.task.sends]
    ['all_reduce']
    """
    return step_timeline(lower_step(graph, plan), cluster)


def step_timeline(step: LoweredStep, cluster: Cluster) -> Timeline:
    """Return the timeline of a device, or of all stages of a pipeline."""
    if step.plan.assignment.pipelining is not None:
        return _stages_timeline(step, cluster)
    return timeline_of(profile(*on_slowest(step, cluster)), step.plan.options.micro_batches)


def _stages_timeline(step: LoweredStep, cluster: Cluster) -> Timeline:
    """Return two streams for each stage: its forwards, backwards and optimizer, and its gathers and reductions."""
    times = [part.times for part in priced_parts(step, cluster, equal_stages(step))]
    found, count = step_times(step, cluster, times), step.plan.options.micro_batches
    events: list[Event] = []
    # The optimizer of every stage begins when all gradients are reduced, as `evaluate` has it.
    ran, last = found.ran, max(found.reduced)
    for stage, parts in enumerate(parts_by_stage(step, times)):
        stream = f"stage {stage}"
        for one in (one for one in ran.tasks if one.stage == stage):
            part = f"part {one.task.chunk * len(ran.busy) + stage}"
            name = f"weights of {part}" if one.task.half is BackwardHalf.WEIGHTS else part
            task = Task(name, "compute", one.task.kind.value, one.end_seconds - one.start_seconds)
            events.append(Event(task, stream, one.start_seconds, one.task.micro_batch))
        for sent in found.traffic[stage].ran:
            seconds = sent.end_seconds - sent.start_seconds
            if sent.kind == "gathers":
                gathers = Task("parameters", "all_gather", "forward", seconds)
                events.append(Event(gathers, _beside(stage), sent.start_seconds, 0))
            else:
                sums = Task("gradients", "reduce_scatter", "backward", seconds)
                events.append(Event(sums, _beside(stage), sent.start_seconds, count - 1))
        update = Task("optimizer", "compute", "optimizer", sum(times[part].optimizer for part in parts))
        events += [Event(update, stream, last, count - 1)] if update.seconds else []
    streams = [name for stage in range(len(ran.busy)) for name in (f"stage {stage}", _beside(stage))]
    return Timeline(tuple(events), tuple(streams))


def _beside(stage: int) -> str:
    return f"parameters of stage {stage}"


def timeline_of(found: Profile, micro_batches: int) -> Timeline:
    clock = _Clock(found)
    for micro_batch in range(micro_batches):
        last = micro_batch == micro_batches - 1
        clock.forward(found.forward, micro_batch, with_once=micro_batch == 0)
        clock.backward(found.backward, micro_batch, with_once=last)
    clock.finish(found.optimizer, micro_batches - 1)
    return Timeline(tuple(clock.events), (*STREAMS, COPIES) if found.copies else STREAMS)


class _Clock:
    """Clock of the simulated step: the end of the ops so far, of parameter communication and of copies to the host."""

    def __init__(self, found: Profile) -> None:
        self.events: list[Event] = []
        self.now = 0.0
        self.sent = 0.0
        # End of what one half of a micro-batch sends while the other computes.
        self.sent_values = 0.0
        self.copied = 0.0
        self.copies = found.copies
        layers = {op: number for number, one in enumerate(found.copies) for op in one.ops}
        # By the place of a task: the offloaded layer that ends with it, or whose backward begins with it.
        places = [(place, layers[task.name]) for place, task in enumerate(found.forward) if task.name in layers]
        self.ends = {place: number for number, place in {number: place for place, number in places}.items()}
        places = [(place, layers[task.name]) for place, task in enumerate(found.backward) if task.name in layers]
        self.begins = {place: number for number, place in {number: place for place, number in reversed(places)}.items()}
        # Ends of the copies of each layer, in the current micro-batch.
        self.gone: dict[int, float] = {}
        self.back: dict[int, float] = {}

    def forward(self, tasks: Sequence[Task], micro_batch: int, with_once: bool) -> None:
        # A gather may begin when the op begins that uses the bucket before.
        ahead = self.now
        for place, task in enumerate(tasks):
            if task.once and not with_once:
                continue
            if task.overlapped and task.of_halves:
                self._send_beside(task, micro_batch)
                continue
            if not task.overlapped:
                self._run(task, micro_batch)
                if place in self.ends:
                    self._leave(self.ends[place], micro_batch)
                continue
            arrived = self._send(task, ahead, micro_batch)
            ahead = self.now
            self.now = max(self.now, arrived)
        self.now = max(self.now, self.sent_values)

    def backward(self, tasks: Sequence[Task], micro_batch: int, with_once: bool) -> None:
        for place, task in enumerate(tasks):
            if task.once and not with_once:
                continue
            if place in self.begins:
                self._bring_back(self.begins[place], micro_batch)
            if task.overlapped and task.of_halves:
                self._send_beside(task, micro_batch)
            elif task.overlapped:
                arrived = self._send(task, self.now, micro_batch)
                # An op waits for the regather of its parameters, but not for the reduction of gradients.
                if task.direction == "recompute":
                    self.now = max(self.now, arrived)
            else:
                self._run(task, micro_batch)
        self.now = max(self.now, self.sent_values)

    def _leave(self, layer: int, micro_batch: int) -> None:
        """Copy the tensors of a layer to the host; the device waits for those of the layer before."""
        self.gone[layer] = self._copy(layer, "forward", micro_batch)
        self.now = max(self.now, self.gone.get(layer - 1, 0.0))
        self.back = {len(self.copies) - 1: 0.0}  # the last layer never leaves

    def _bring_back(self, layer: int, micro_batch: int) -> None:
        """Wait for the tensors of a layer, and copy those of the layer before."""
        for one in (layer, layer - 1):
            if one >= 0 and one not in self.back:
                self.back[one] = self._copy(one, "backward", micro_batch)
        self.now = max(self.now, self.back[layer])

    def _copy(self, layer: int, direction: Direction, micro_batch: int) -> float:
        one, start = self.copies[layer], max(self.now, self.copied)
        task = Task(f"offloaded layer {layer}", "host_copy", direction, one.seconds, bytes=one.bytes)
        self.events.append(Event(task, COPIES, start, micro_batch))
        self.copied = start + one.seconds
        return self.copied

    def finish(self, tasks: Iterable[Task], micro_batch: int) -> None:
        self.now = max(self.now, self.sent)
        for task in tasks:
            self._run(task, micro_batch)

    def _run(self, task: Task, micro_batch: int) -> None:
        self.events.append(Event(task, STREAMS[task.sends], self.now, micro_batch))
        self.now += task.seconds

    def _send_beside(self, task: Task, micro_batch: int) -> None:
        start = max(self.now, self.sent_values)
        self.events.append(Event(task, STREAMS[1], start, micro_batch))
        self.sent_values = start + task.seconds

    def _send(self, task: Task, earliest: float, micro_batch: int) -> float:
        start = max(earliest, self.sent)
        self.events.append(Event(task, STREAMS[2], start, micro_batch))
        self.sent = start + task.seconds
        return self.sent


def _trace_event(event: Event, streams: Sequence[str]) -> dict[str, Any]:
    task = event.task
    details = {"kind": task.kind, "direction": task.direction, "bytes": task.bytes, "flops": task.flops}
    details |= {"axes": "*".join(task.axes), "micro_batch": event.micro_batch}
    name = task.name if task.kind == "compute" else f"{task.kind} {task.name}"
    return {
        "name": name,
        "cat": task.direction,
        "ph": "X",
        "pid": 0,
        "tid": streams.index(event.stream),
        "ts": event.start_seconds * 1e6,
        "dur": task.seconds * 1e6,
        "args": details,
    }
