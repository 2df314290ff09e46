"""Schedules of a pipeline: the order of forwards and backwards of each stage.

A stage runs one part of the model, or several of them if the schedule interleaves. A task begins when its stage has
ended the task before it and its input has arrived. What the cost model prices and what the ranks run are these orders.

    gpipe        all forwards, then all backwards                         Huang et al., 2019
    1f1b         as few forwards ahead as keep all stages busy            Narayanan et al., PipeDream-Flush, 2021
    interleaved  as 1f1b, with several chunks of the model on each stage  Narayanan et al., Megatron-LM, 2021
    zero_bubble  as 1f1b, with the gradients of weights put off           Qi et al., 2023 (ZB-H1)

Other stages wait for the gradient of a part's inputs alone. `zero_bubble` computes the gradients of weights later, in
the time in which a stage would wait. Stage s puts off those of s micro-batches.

Messages stand in the program of a stage where their sender's task ends in one simulated step. All stages take them in
this one order, so that no stages wait for one another in a circle, even if each send waits for its receive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Literal, NamedTuple, get_args

__all__ = [
    "SCHEDULES",
    "BackwardHalf",
    "Route",
    "Schedule",
    "StageMessage",
    "StageOrders",
    "StageTask",
    "TaskKind",
    "Turn",
    "Work",
    "most_in_flight",
    "most_kept",
    "orders",
    "reductions_after",
    "stage_program",
]

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)


class TaskKind(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"


class BackwardHalf(Enum):
    INPUTS = "gradient of inputs"
    WEIGHTS = "gradient of weights"


@dataclass(frozen=True)
class StageTask:
    """Forward, backward or half a backward of one chunk for one micro-batch."""

    kind: TaskKind
    micro_batch: int
    chunk: int = 0
    # Half of a backward; None for all of it, and for a forward.
    half: BackwardHalf | None = None


class Work(IntEnum):
    """Work of a task."""

    FORWARD = 0
    BACKWARD = 1
    INPUTS = 2
    WEIGHTS = 3


class Turn(NamedTuple):
    """Task in a row of all stages' tasks, in which each stands behind the task whose result it takes."""

    stage: int
    task: StageTask
    part: int
    work: Work
    # Place of the task whose result it takes, -1 if there is none, and its part if that is on another stage, else -1.
    source: int
    sender: int
    # Chunk of its stage whose gradients are reduced from here on, -1 if there is none.
    reduced: int


class StageOrders(tuple[tuple[StageTask, ...], ...]):
    """Tasks of each stage, in order."""

    @cached_property
    def turns(self) -> tuple[Turn, ...]:
        """Return the tasks of all stages in one row."""
        stages = len(self)
        chunks = 1 + max(task.chunk for task in self[0])
        reduced = [_reduced(order, stage) for stage, order in enumerate(self)]
        # By the task that takes it: place and part of what makes a result.
        made: dict[tuple[int, TaskKind, int, int], tuple[int, int]] = {}
        found: list[Turn] = []
        place, waiting = [0] * stages, list(range(stages))
        while waiting:
            stage = waiting.pop()
            order = self[stage]
            while place[stage] < len(order):
                task = order[place[stage]]
                taken = (
                    made.pop((stage, task.kind, task.micro_batch, task.chunk), None) if _takes(stage, task) else _INPUT
                )
                if taken is None:
                    break
                source, maker = taken
                part = task.chunk * stages + stage
                sender = maker if source >= 0 and maker % stages != stage else -1
                follower = _follower(stage, task, stages, chunks)
                if follower is not None:
                    made[follower] = len(found), part
                    if follower[0] != stage:
                        waiting.append(follower[0])
                found.append(Turn(stage, task, part, _work(task), source, sender, reduced[stage].get(place[stage], -1)))
                place[stage] += 1
        stuck = [stage for stage in range(stages) if place[stage] < len(self[stage])]
        assert not stuck, f"deadlock: stages {stuck} wait for inputs that no task sends"
        return tuple(found)


# Neither place nor part: an input of the step.
_INPUT = (-1, -1)


def reductions_after(order: Sequence[StageTask], stage: int) -> dict[int, StageTask]:
    """Return, by chunk, the backward after which a stage begins to reduce its gradients, where it waits for that.

    Others begin within their last backward. A reduction slows the tasks beside it. Where chunks interleave, a
    micro-batch passes all stages while they reduce, and each of them would slow it down, one after the other. So they
    wait until the first stage has the gradients, and all slow down together.
    """
    backwards = [task for task in order if task.kind is TaskKind.BACKWARD]
    last = {task.chunk: place for place, task in enumerate(backwards)}
    if len(last) == 1 or stage == 0:
        return {}
    return {chunk: backwards[place + stage - 1] for chunk, place in last.items() if place + stage < len(backwards)}


def _reduced(order: Sequence[StageTask], stage: int) -> dict[int, int]:
    """Return, by place in the order of a stage, the chunk whose gradients are reduced from there on."""
    after = reductions_after(order, stage)
    places = {task: place for place, task in enumerate(order)}
    last = {task.chunk: place for place, task in enumerate(order) if task.kind is TaskKind.BACKWARD}
    return {places[after[chunk]] + 1 if chunk in after else place: chunk for chunk, place in last.items()}


def most_in_flight(plan: Sequence[Sequence[StageTask]], chunks: int) -> tuple[float, ...]:
    """Return the most micro-batches with activations at once, by stage; a chunk counts as its share of the stage."""
    return tuple(most_kept(order, chunks, 1.0, 0.0) for order in plan)


def most_kept(order: Iterable[StageTask], chunks: int, activation_bytes: float, late_bytes: float) -> float:
    """Return the most bytes that a stage keeps at once, for micro-batches in flight and for put-off gradients.

    A backward of the inputs frees the activations of its micro-batch, but for the operands of put-off gradients.
    """
    changes = {None: -activation_bytes, BackwardHalf.INPUTS: late_bytes - activation_bytes}
    changes[BackwardHalf.WEIGHTS] = -late_bytes
    kept = (activation_bytes if task.kind is TaskKind.FORWARD else changes[task.half] for task in order)
    return max(accumulate(kept)) / chunks


def _work(task: StageTask) -> Work:
    if task.kind is TaskKind.FORWARD:
        return Work.FORWARD
    return {None: Work.BACKWARD, BackwardHalf.INPUTS: Work.INPUTS, BackwardHalf.WEIGHTS: Work.WEIGHTS}[task.half]


def _takes(stage: int, task: StageTask) -> bool:
    """Return whether a task takes the result of another one.

    The first chunk of the first stage takes the inputs of the step, a put-off gradient what the stage keeps.
    """
    from_input = task.kind is TaskKind.FORWARD and stage == 0 and task.chunk == 0
    return not from_input and task.half is not BackwardHalf.WEIGHTS


def _follower(stage: int, task: StageTask, stages: int, chunks: int) -> tuple[int, TaskKind, int, int] | None:
    """Return the stage, kind, micro-batch and chunk of the task that takes the result of a task, if there is one."""
    part = task.chunk * stages + stage
    if task.kind is TaskKind.FORWARD:
        if part + 1 == stages * chunks:
            return stage, TaskKind.BACKWARD, task.micro_batch, task.chunk
        return (part + 1) % stages, TaskKind.FORWARD, task.micro_batch, (part + 1) // stages
    if part == 0 or task.half is BackwardHalf.WEIGHTS:
        return None
    return (part - 1) % stages, TaskKind.BACKWARD, task.micro_batch, (part - 1) // stages


@lru_cache(maxsize=64)
def orders(
    stages: int, micro_batches: int, schedule: Schedule, chunks: int = 1, more: int = 0, halves: bool = False
) -> StageOrders:
    """Return the tasks of each stage, in order; `more` micro-batches are in flight beyond those of the schedule.

    With `halves` the backwards of `zero_bubble` are in two halves. Without, they are whole, as in `1f1b`.
    """
    assert min(stages, micro_batches, chunks) >= 1, f"{stages} stages, {micro_batches} micro-batches, {chunks} chunks"
    assert chunks == 1 or schedule == "interleaved", f"{schedule} has one chunk on each stage, not {chunks}"
    assert chunks == 1 or micro_batches % stages == 0, f"{micro_batches} micro-batches do not interleave on {stages}"
    count = micro_batches * chunks
    forwards = [_task(TaskKind.FORWARD, i, stages, chunks) for i in range(count)]
    backwards = [_task(TaskKind.BACKWARD, i, stages, chunks) for i in range(count)]
    found = []
    for stage in range(stages):
        # Forwards before the stage alternates one forward, one backward.
        ahead = 2 * (stages - stage - 1) + (chunks - 1) * stages if chunks > 1 else stages - stage - 1
        ahead = count if schedule == "gpipe" else min(count, ahead + more)
        order = forwards[:ahead]
        for forward, backward in zip(forwards[ahead:], backwards, strict=False):
            order += [forward, backward]
        order += backwards[count - ahead :]
        found.append(tuple(_halved(order, stage)) if halves and schedule == "zero_bubble" else tuple(order))
    return StageOrders(found)


def _halved(order: list[StageTask], put_off: int) -> Iterator[StageTask]:
    """Yield the tasks with backwards in two halves; the second one is put off by some micro-batches."""
    waiting: deque[StageTask] = deque()
    for task in order:
        if task.kind is not TaskKind.BACKWARD:
            yield task
            continue
        yield replace(task, half=BackwardHalf.INPUTS)
        waiting.append(replace(task, half=BackwardHalf.WEIGHTS))
        if len(waiting) > put_off:
            yield waiting.popleft()
    yield from waiting


def _task(kind: TaskKind, position: int, stages: int, chunks: int) -> StageTask:
    """Return the task at a position of a stage's forwards or backwards."""
    if chunks == 1:
        return StageTask(kind, position)
    # One chunk runs as many micro-batches as there are stages, then the next chunk.
    turn, within = divmod(position, stages * chunks)
    chunk, offset = divmod(within, stages)
    return StageTask(kind, turn * stages + offset, chunk if kind is TaskKind.FORWARD else chunks - 1 - chunk)


# -- messages ----------------------------------------------------------------------------------------------------------


class Route(NamedTuple):
    """Way of a value from the part that makes it to one that reads it; a gradient goes back."""

    source: int
    target: int
    differentiable: bool


class StageMessage(NamedTuple):
    """Value of a route for one micro-batch, or its gradient."""

    # Place of the route.
    route: int
    micro_batch: int
    backward: bool


def stage_program(
    stage: int, plan: Sequence[Sequence[StageTask]], routes: Sequence[Route]
) -> tuple[StageTask | StageMessage, ...]:
    """Return the tasks of a stage with the messages that it sends and receives, given the tasks of all stages."""
    starts, ends = _simulated(plan, routes)
    events: list[tuple[int, bool, StageTask | StageMessage]] = [
        (start, True, task) for task, start in zip(plan[stage], starts[stage], strict=True)
    ]
    micro_batches = 1 + max(task.micro_batch for task in plan[stage])
    for number, route in enumerate(routes):
        stages = [part % len(plan) for part in (route.source, route.target)]
        if stage not in stages or stages[0] == stages[1]:
            continue
        ways = [(False, TaskKind.FORWARD, route.source)]
        ways += [(True, TaskKind.BACKWARD, route.target)] if route.differentiable else []
        for backward, kind, sender in ways:
            for one in range(micro_batches):
                events.append((ends[kind, sender, one], False, StageMessage(number, one, backward)))
    # A message stands before the tasks that begin when it arrives.
    events.sort(key=lambda event: (event[0], event[1], event[2] if isinstance(event[2], StageMessage) else ()))
    return tuple(item for _, _, item in events)


def _simulated(
    plan: Sequence[Sequence[StageTask]], routes: Sequence[Route]
) -> tuple[list[list[int]], dict[tuple[TaskKind, int, int], int]]:
    """Return the starts of the tasks of each stage, and the ends of forwards and backwards by part and micro-batch.

    A forward takes one unit of time, a backward two, half a backward one, and a message none.
    """
    readers: dict[int, list[int]] = {}
    makers: dict[int, list[int]] = {}
    for route in routes:
        makers.setdefault(route.target, []).append(route.source)
        if route.differentiable:
            readers.setdefault(route.source, []).append(route.target)
    needed = {TaskKind.FORWARD: makers, TaskKind.BACKWARD: readers}
    ends: dict[tuple[TaskKind, int, int], int] = {}
    starts: list[list[int]] = [[] for _ in plan]
    clock = [0] * len(plan)
    moves = True
    while moves:
        moves = False
        for stage, order in enumerate(plan):
            while len(starts[stage]) < len(order):
                task = order[len(starts[stage])]
                part = task.chunk * len(plan) + stage
                is_late = task.half is BackwardHalf.WEIGHTS
                before = [] if is_late else needed[task.kind].get(part, ())
                arrived = [ends.get((task.kind, other, task.micro_batch), -1) for other in before]
                if -1 in arrived:
                    break
                starts[stage].append(max(clock[stage], *arrived, 0))
                clock[stage] = starts[stage][-1] + (2 if task.kind is TaskKind.BACKWARD and task.half is None else 1)
                if not is_late:
                    ends[task.kind, part, task.micro_batch] = clock[stage]
                moves = True
    stuck = [stage for stage, order in enumerate(plan) if len(starts[stage]) < len(order)]
    assert not stuck, f"deadlock: stages {stuck} wait for values that no task sends"
    return starts, ends
